"""The arithmetic that functional optimizers share.

Each function is differentiable at every order, also at zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from metagrad.core._torch import linalg
from metagrad.sparse.tables.row_sparse import RowSparse


def plus_scaled(base: Tensor, scale: float | Tensor, direction: Tensor, sign: int = 1) -> Tensor:
    """Compute ``base + sign * scale * direction``. Operands that the backward pass does not need are not saved."""
    is_sparse = isinstance(base, RowSparse) or isinstance(direction, RowSparse)
    # torch.compile drops ``alpha`` from the sum of a tensor and a matrix product.
    if torch.compiler.is_compiling() or (is_sparse and isinstance(scale, Tensor)):
        return base + sign * scale * direction
    if not isinstance(scale, Tensor):
        return torch.add(base, direction, alpha=sign * scale)
    return torch.addcmul(base, direction, scale, value=sign)


def average(old: Tensor, kept: float | Tensor, new: Tensor) -> Tensor:
    """Update a running average that keeps the share ``kept`` of its old value."""
    if isinstance(kept, Tensor) or old.dtype != new.dtype:
        return kept * old + (1 - kept) * new
    return torch.lerp(old, new, 1 - kept)


def average_square(old: Tensor, kept: float | Tensor, new: Tensor) -> Tensor:
    """Update a running average of squares."""
    if isinstance(kept, Tensor):
        return average(old, kept, new * new)
    return torch.addcmul(kept * old, new, new, value=1 - kept)


def minus_quotient(base: Tensor, factor: float | Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Compute ``base - factor * numerator / denominator``."""
    if isinstance(factor, Tensor):
        return base - factor * numerator / denominator
    return torch.addcdiv(base, numerator, denominator, value=-factor)


def is_differentiated(value: Tensor) -> bool:
    """Return whether a function of a tensor may be differentiated."""
    # In a compiled graph the guard costs nothing, and forward mode cannot be detected.
    is_on_tape = torch.is_grad_enabled() or torch.compiler.is_compiling()
    return is_on_tape or unpack_dual(value).tangent is not None


def root(value: Tensor) -> Tensor:
    r"""Compute :math:`\sqrt{x}`, with all derivatives 0 at :math:`x = 0`.

    The derivative of the root is infinite at zero, and zero times infinity is NaN. So a second moment of zero, as in
    a row whose gradient is zero, would make every meta-gradient NaN.
    """
    if not is_differentiated(value):
        return value.sqrt()
    zero = value == 0
    return torch.where(zero, 0, torch.where(zero, 1, value).sqrt())


def matrix_norm(matrix: Tensor) -> Tensor:
    """Compute the Frobenius norm of ``[..., m, n]``, as ``[..., 1, 1]``. All its derivatives at zero are 0."""
    zero = (matrix == 0).all(-1, keepdim=True).all(-2, keepdim=True)
    norm = linalg.vector_norm(torch.where(zero, 1, matrix), dim=(-2, -1), keepdim=True)
    return torch.where(zero, 0, norm)
