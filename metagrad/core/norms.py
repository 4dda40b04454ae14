"""Normalization functions made of elementary operations, with correct derivatives of every order.

In torch 2.13, the third derivatives of the fused layer, batch and instance norm are incorrect. The Hessian of a MAML
objective needs third derivatives of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

from metagrad.core.checks import refuse
from metagrad.core.dispatch import Dispatch
from metagrad.core.tree import widened


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    r"""Normalize over the last dimensions, as :func:`torch.nn.functional.layer_norm`.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \, \gamma + \beta

    Args:
        input: Tensor of shape ``[..., *normalized_shape]``.
        normalized_shape: Sizes of the normalized dimensions.
        weight: Scale :math:`\gamma` of shape ``normalized_shape``, or None.
        bias: Offset :math:`\beta` of shape ``normalized_shape``, or None.
        eps: Constant added to the variance.

    Returns:
        The normalized tensor, with the shape and dtype of ``input``.

    Raises:
        ValueError: The last sizes of ``input`` differ from ``normalized_shape``.

    Example:
        >>> metagrad.models.layer_norm(torch.tensor([[1.0, 3.0]]), [2], eps=0.0)
        tensor([[-1.,  1.]])

    References:
        Ba, Kiros, Hinton, "Layer normalization", arXiv:1607.06450, equation 4.
    """
    shape = tuple(normalized_shape)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        refuse("layer_norm(input, normalized_shape)", f"last sizes {shape}", tuple(input.shape))
    centered, scale = _statistics(widened(input), tuple(range(-len(shape), 0)), eps)
    return _affine(centered * scale, weight, bias).to(input.dtype)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    r"""Normalize each channel over the batch, as :func:`torch.nn.functional.batch_norm`.

    If ``training`` is True, the function uses batch statistics and updates the running statistics. Otherwise it uses
    the running statistics.

    Args:
        input: Tensor of shape ``[N, C, ...]``.
        running_mean: Running mean of shape ``[C]``, updated in place in training, or None.
        running_var: Running unbiased variance of shape ``[C]``, updated in place in training, or None.
        weight: Scale of shape ``[C]``, or None.
        bias: Offset of shape ``[C]``, or None.
        training: If True, use the statistics of the batch.
        momentum: Weight of the batch statistics in the update of the running statistics.
        eps: Constant added to the variance.

    Returns:
        The normalized tensor, with the shape and dtype of ``input``.

    Raises:
        ValueError: ``training`` is False and there are no running statistics, or ``training`` is True and a channel
            has only one value.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> metagrad.models.batch_norm(x, None, None, training=True, eps=0.0)
        tensor([[-1.],
                [ 1.]])

    References:
        Ioffe, Szegedy, "Batch normalization", ICML 2015, algorithm 1.
    """
    if not training:
        if running_mean is None or running_var is None:
            refuse("batch_norm(..., training=False)", "running_mean and running_var", None)
        shift, scale = (widened(_by_channel(t, input.ndim)) for t in (running_mean, running_var))
        return _by_channels(widened(input) - shift, (scale + eps).rsqrt(), weight, bias).to(input.dtype)
    count = input.numel() // max(input.shape[1], 1)
    if count < 2:
        raise ValueError(
            f"batch_norm(input, ..., training=True): expected more than one value for each channel, got input of "
            f"shape {tuple(input.shape)}."
        )
    axes, running = (0, *range(2, input.ndim)), (running_mean, running_var, momentum)
    return _by_channels(*_statistics(widened(input), axes, eps, running), weight, bias).to(input.dtype)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalize each channel of each example, as :func:`torch.nn.functional.instance_norm`.

    Args:
        input: Tensor of shape ``[N, C, ...]``, with at least three dimensions.
        running_mean: Running mean of shape ``[C]``, or None. If ``use_input_stats`` is True, it is updated in place.
        running_var: Running unbiased variance of shape ``[C]``, or None, updated as ``running_mean``.
        weight: Scale of shape ``[C]``, or None.
        bias: Offset of shape ``[C]``, or None.
        use_input_stats: If True, use the statistics of the input. If False, use the running statistics.
        momentum: Weight of the input statistics in the update of the running statistics.
        eps: Constant added to the variance.

    Returns:
        The normalized tensor, with the shape and dtype of ``input``.

    Raises:
        ValueError: ``use_input_stats`` is True and a channel of an example has only one value, or
            ``use_input_stats`` is False and there are no running statistics.

    Example:
        >>> metagrad.models.instance_norm(torch.tensor([[[1.0, 3.0]]]), eps=0.0)
        tensor([[[-1.,  1.]]])

    References:
        Ulyanov, Vedaldi, Lempitsky, "Instance normalization", arXiv:1607.08022.
    """
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
    axes = tuple(range(2, input.ndim))
    if input.shape[2:].numel() < 2 or not axes:
        raise ValueError(
            "instance_norm(input, ...): expected more than one value for each channel of an example, got input of "
            f"shape {tuple(input.shape)}."
        )
    running = (running_mean, running_var, momentum)
    return _by_channels(*_statistics(widened(input), axes, eps, running), weight, bias).to(input.dtype)


class composite_norms(Dispatch):  # noqa: N801, used like a function
    """Context manager that replaces the fused norms of unmodified models by the functions of this module.

    Example:
        Check the third derivative of a layer norm with finite differences:

        >>> x = torch.tensor([[0.3, 1.0, -0.5]], dtype=torch.float64, requires_grad=True)
        >>> f = lambda x: torch.nn.LayerNorm(3).double()(x)[0, 0]
        >>> with metagrad.models.composite_norms():
        ...     metagrad.gradcheck(f, x, order=3)
        True
    """

    def __init__(self) -> None:
        super().__init__(_COMPOSITES)


def unfused_attention() -> Any:
    """Context manager or decorator that selects the attention kernel with derivatives of every order."""
    kernels: Any = torch.nn.attention
    return kernels.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


@contextlib.contextmanager
def every_order() -> Generator[None]:
    """Context manager in which norms and attention have correct derivatives of every order.

    Norms use elementary operations, and attention uses a kernel that is not fused.
    """
    with unfused_attention(), composite_norms():
        yield


_COMPOSITES: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.layer_norm: layer_norm,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
}


def _statistics(
    input: Tensor,
    axes: tuple[int, ...],
    eps: float,
    running: tuple[Tensor | None, Tensor | None, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the centered input and the inverse standard deviation, and update the running statistics."""
    variance, mean = torch.var_mean(input, axes, correction=0, keepdim=True)
    if running is not None:
        count = input.numel() // max(variance.numel(), 1)
        _update_running(*running, mean, variance * (count / max(count - 1, 1)))
    # The backward of a subtraction would negate a tensor of the full size.
    return input + -mean, (variance + eps).rsqrt()


def _by_channels(centered: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    weight, bias = (x if x is None else _by_channel(x, centered.ndim) for x in (weight, bias))
    return _affine(centered, scale if weight is None else scale * weight, bias)


def _affine(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is None:
        return input if bias is None else input + bias
    return input * weight if bias is None else torch.addcmul(bias, input, weight)


def _by_channel(values: Tensor, ndim: int) -> Tensor:
    return values.view(-1, *[1] * (ndim - 2))


def _update_running(
    running_mean: Tensor | None, running_var: Tensor | None, momentum: float, mean: Tensor, var: Tensor
) -> None:
    """Update running statistics with input statistics of shape ``[1 or N, C, ...]``, averaged over examples.

    The update is differentiable if the running statistics require grad. Otherwise it leaves no graph, as in torch.
    """
    for running, value in ((running_mean, mean), (running_var, var)):
        if running is not None:
            value = value if running.requires_grad else value.detach()
            running.copy_(torch.lerp(widened(running), value.flatten(1).mean(0), momentum))
