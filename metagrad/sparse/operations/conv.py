r"""Submanifold sparse convolution, as a family of rules closed under differentiation.

The convolution is linear in features and in weights. Its derivative in the features is the convolution with the
kernel flipped and its channels exchanged; that in the weights is :class:`_Correlate`, whose own derivatives are
convolutions. Only features and weights are kept for a derivative, never the features of all pairs: those are
gathered for one kernel position at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from metagrad.sparse.checks import check_floating, check_same
from metagrad.sparse.kernels.accumulation import widened
from metagrad.sparse.kernels.tangents import nestable, primal
from metagrad.sparse.operations.rulebook import Rulebook

_CALL = "conv(x, weight, rulebook, bias)"


def conv(x: Tensor, weight: Tensor, rulebook: Rulebook, bias: Tensor | None = None) -> Tensor:
    r"""Convolve features on the sites of a sparse grid; the output is on the same sites.

    .. math:: y_p = b + \sum_{o \,:\, p + o \text{ is a site}} W_o \, x_{p + o}

    Equal to ``torch.nn.functional.conv2d`` (or ``conv1d``, ``conv3d``) of the grid, zero where there is no site,
    with padding ``dilation * (kernel_size - 1) / 2``, read at the sites. Time is in pairs of sites, memory of every
    derivative in sites: no grid is made.

    Args:
        x: Features, [sites, C_in], in the order of the rulebook's ``coords``.
        weight: [C_out, C_in, *kernel_size], torch's layout.
        rulebook: Made of the sites for this kernel size.
        bias: [C_out].

    Returns:
        [sites, C_out].

    Raises:
        ValueError: Shapes do not fit the rulebook or each other, or two devices.
        TypeError: Operands of other types or of two dtypes.

    Note:
        No stride, no even kernels and no pooling: these change the sites. Under ``vmap`` the batch is a loop.

    Example:
        >>> coords = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 5, 5]])
        >>> rulebook = metagrad.sparse.Rulebook(coords, 3)
        >>> x = torch.tensor([[1.0], [2.0], [4.0]])
        >>> metagrad.sparse.conv(x, torch.ones(1, 1, 3, 3), rulebook).tolist()
        [[3.0], [3.0], [4.0]]

    References:
        Graham, van der Maaten, "Submanifold sparse convolutional networks", arXiv:1706.01307; Graham, Engelcke,
        van der Maaten, "3D semantic segmentation with submanifold sparse convolutional networks", arXiv:1711.10275.
    """
    _check_arguments(x, weight, rulebook, bias)
    kernels = weight.flatten(2).permute(2, 1, 0).contiguous()
    y = _Convolve.apply(rulebook, x, kernels)
    return y if bias is None else y + bias


class _Convolve(Function):
    """x [sites, C_in], w [positions, C_in, C_out] to [sites, C_out]."""

    @staticmethod
    def forward(rulebook: Rulebook, x: Tensor, w: Tensor) -> Tensor:
        y = widened(x @ w[len(rulebook.pairs)])
        for i, (sites, neighbours) in enumerate(rulebook.pairs):
            y.index_add_(0, sites, widened(x[neighbours] @ w[i]))
            y.index_add_(0, neighbours, widened(x[sites] @ w[-1 - i]))
        return y.to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.rulebook, x, w = inputs
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        d_x = _Convolve.apply(ctx.rulebook, grad, _adjoint(w)) if ctx.needs_input_grad[1] else None
        d_w = _Correlate.apply(ctx.rulebook, x, grad) if ctx.needs_input_grad[2] else None
        return None, d_x, d_w

    @staticmethod
    @nestable
    def jvp(ctx, _rulebook, d_x, d_w):
        return _tangent(_Convolve, ctx, d_x, d_w)

    @staticmethod
    def vmap(info, in_dims, rulebook, x, w):
        return _each(_Convolve, info.batch_size, in_dims, rulebook, x, w), 0


class _Correlate(Function):
    """x [sites, C_in], g [sites, C_out] to [positions, C_in, C_out]: the sum of x[p + o] g[p] over p."""

    @staticmethod
    def forward(rulebook: Rulebook, x: Tensor, g: Tensor) -> Tensor:
        half = len(rulebook.pairs)
        w = x.new_empty(2 * half + 1, x.shape[1], g.shape[1])
        w[half] = x.mT @ g
        for i, (sites, neighbours) in enumerate(rulebook.pairs):
            w[i] = x[neighbours].mT @ g[sites]
            w[-1 - i] = x[sites].mT @ g[neighbours]
        return w

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.rulebook, x, g = inputs
        ctx.save_for_backward(x, g)
        ctx.save_for_forward(x, g)

    @staticmethod
    def backward(ctx, grad):
        x, g = ctx.saved_tensors
        d_x = _Convolve.apply(ctx.rulebook, g, _adjoint(grad)) if ctx.needs_input_grad[1] else None
        d_g = _Convolve.apply(ctx.rulebook, x, grad) if ctx.needs_input_grad[2] else None
        return None, d_x, d_g

    @staticmethod
    @nestable
    def jvp(ctx, _rulebook, d_x, d_g):
        return _tangent(_Correlate, ctx, d_x, d_g)

    @staticmethod
    def vmap(info, in_dims, rulebook, x, g):
        return _each(_Correlate, info.batch_size, in_dims, rulebook, x, g), 0


def _adjoint(w: Tensor) -> Tensor:
    """Return the kernel that moves cotangents back: a pair of sites is met at the mirrored position."""
    return w.flip(0).mT.contiguous()


def _tangent(rule: type[Function], ctx, d_first: Tensor | None, d_second: Tensor | None) -> Tensor:
    """Differentiate a bilinear rule in forward mode."""
    first, second = map(primal, ctx.saved_tensors)
    if d_second is None:
        return rule.apply(ctx.rulebook, d_first, second)
    if d_first is None:
        return rule.apply(ctx.rulebook, first, d_second)
    return rule.apply(ctx.rulebook, d_first, second) + rule.apply(ctx.rulebook, first, d_second)


def _each(rule: type[Function], size: int, in_dims: tuple, rulebook: Rulebook, *operands: Tensor) -> Tensor:
    """Apply a rule to each member of a vmapped batch."""
    members = zip(
        *([x] * size if dim is None else x.unbind(dim) for x, dim in zip(operands, in_dims[1:], strict=True)),
        strict=True,
    )
    return torch.stack([rule.apply(rulebook, *member) for member in members])


def _check_arguments(x: Tensor, weight: Tensor, rulebook: Rulebook, bias: Tensor | None) -> None:
    if not isinstance(rulebook, Rulebook):
        raise TypeError(
            f"{_CALL}: rulebook must be a Rulebook, got {type(rulebook).__name__}. "
            "Rulebook(coords, kernel_size) makes one."
        )
    for name, tensor in (("x", x), ("weight", weight)) + ((("bias", bias),) if bias is not None else ()):
        check_floating(_CALL, name, tensor)
        check_same(_CALL, f"x and {name}", x, tensor)
    if x.device != rulebook.device:
        raise ValueError(
            f"{_CALL}: x is on {x.device} and the rulebook on {rulebook.device}. Make it of coords.to(x.device)."
        )
    if x.ndim != 2 or x.shape[0] != rulebook.num_sites:
        raise ValueError(
            f"{_CALL}: the rulebook has {rulebook.num_sites} sites, so x must be [{rulebook.num_sites}, C_in], "
            f"got {list(x.shape)}."
        )
    kernel = list(rulebook.kernel_size)
    if weight.ndim != 2 + len(kernel) or list(weight.shape[2:]) != kernel or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"{_CALL}: x has {x.shape[1]} channels and the rulebook is for kernel_size {rulebook.kernel_size}, so "
            f"weight must be [C_out, {x.shape[1]}, {', '.join(map(str, kernel))}], got {list(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{_CALL}: weight has {weight.shape[0]} output channels, so bias must be [{weight.shape[0]}], "
            f"got {list(bias.shape)}."
        )
