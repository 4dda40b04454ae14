"""Clipping gradients, of which some are sparse."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.tree import widened
from metagrad.sparse.kernels.accumulation import coalesced
from metagrad.sparse.tables.row_sparse import RowSparse


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    r"""Scale the gradients of parameters in place, so that together they have at most a given norm.

    .. math:: g_k \leftarrow g_k \cdot \min\!\left(1, \frac{c}{\|g\| + 10^{-6}}\right), \qquad
              \|g\| = \big\|(\|g_1\|, \|g_2\|, \dots)\big\|

    Like ``torch.nn.utils.clip_grad_norm_``, for gradients that are strided, :class:`RowSparse` or sparse COO;
    COO gradients are coalesced, for the norm is that of the sum of duplicates.

    Args:
        parameters: A tensor or an iterable of tensors; one without a gradient is passed over.
        max_norm: The norm :math:`c` that is allowed.
        norm_type: The order of the norm; above 0, ``inf`` for the largest element.
        error_if_nonfinite: Raise if the norm is NaN or infinite, instead of scaling by it.

    Returns:
        The norm before clipping, a scalar on the first gradient's device; of half precision in float32.

    Raises:
        ValueError: ``norm_type`` is not above 0, or a gradient has another sparse layout than COO.
        RuntimeError: The norm is not finite, with ``error_if_nonfinite``; no gradient is changed then.

    Example:
        >>> from metagrad.sparse.tables.clip import clip_grad_norm_
        >>> from metagrad.sparse.tables.row_sparse import RowSparse
        >>> w = torch.tensor([[3.0], [0.0], [4.0]], requires_grad=True)
        >>> w.grad = RowSparse(torch.tensor([0, 2]), torch.tensor([[3.0], [4.0]]), (3, 1))
        >>> clip_grad_norm_([w], max_norm=1.0).item()
        5.0
        >>> w.grad.values.flatten()
        tensor([0.6000, 0.8000])

    References:
        Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", ICML 2013, section 3.2.
    """
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_(..., norm_type): expected a number above 0, got {norm_type}.")
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    held = [p for p in held if p.grad is not None]
    if not held:
        return torch.tensor(0.0)
    with torch.no_grad():
        values = [_values(p) for p in held]
        device = values[0].device
        norms = [_norm(v, norm_type).to(device) for v in values]
        total = linalg.vector_norm(torch.stack(norms), norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"clip_grad_norm_(...): the norm of order {norm_type} of the gradients is {total.item()}. Look for "
                "the parameter whose gradient is not finite, or pass error_if_nonfinite=False."
            )
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for p in held:
            assert p.grad is not None
            p.grad.mul_(factor.to(p.grad.device))
    return total


def _values(parameter: Tensor) -> Tensor:
    """Return the elements of a gradient that are kept; those left out are zero."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, RowSparse):
        return gradient.values
    if gradient.layout is torch.sparse_coo:
        parameter.grad = coalesced(gradient)
        return torch.ops.aten._values(parameter.grad)
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"clip_grad_norm_(parameters, ...): a gradient of shape {tuple(gradient.shape)} must be strided, "
            f"RowSparse or sparse COO, got {gradient.layout}. Convert it by .to_sparse_coo()."
        )
    return gradient


def _norm(values: Tensor, order: float) -> Tensor:
    # The largest of no elements is undefined in torch; of no rows it is that of zeros. The norm of what float16 can
    # hold may be more than it can.
    values = widened(values)
    return linalg.vector_norm(values, order) if values.numel() else values.new_zeros(())
