"""The arithmetic that rules share; each can be differentiated at every order, also at zero."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.sparse.tables.row_sparse import RowSparse


def plus_scaled(base: Tensor, scale: float | Tensor, direction: Tensor, sign: int = 1) -> Tensor:
    """Compute ``base + sign * scale * direction``; operands that the backward does not need are not kept."""
    if not isinstance(scale, Tensor):
        return torch.add(base, direction, alpha=sign * scale)
    if isinstance(base, RowSparse) or isinstance(direction, RowSparse):
        return torch.add(base, direction * scale, alpha=sign)
    return torch.addcmul(base, direction, scale, value=sign)


def average(old: Tensor, kept: float | Tensor, new: Tensor) -> Tensor:
    """Update a running average, of which the share ``kept`` stays."""
    return kept * old + (1 - kept) * new


def root(value: Tensor) -> Tensor:
    r"""Compute :math:`\sqrt{x}`, with all derivatives 0 at :math:`x = 0`.

    The derivative of the root is infinite there, and zero times infinity is NaN: a second moment that is zero,
    as in a row whose gradient is zero, would make every meta-gradient NaN.
    """
    zero = value == 0
    return torch.where(zero, 0, torch.where(zero, 1, value).sqrt())


def matrix_norm(matrix: Tensor) -> Tensor:
    """Compute the Frobenius norm of ``[..., m, n]``, as ``[..., 1, 1]``; all derivatives of that of 0 are 0."""
    zero = (matrix == 0).all(-1, keepdim=True).all(-2, keepdim=True)
    norm = torch.linalg.vector_norm(torch.where(zero, 1, matrix), dim=(-2, -1), keepdim=True)
    return torch.where(zero, 0, norm)
