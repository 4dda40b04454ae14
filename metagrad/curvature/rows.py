"""Sums over rows as long as a network has parameters, to the precision of their elements.

On a CPU, torch's norms and matrix products add up a row in few running sums. If all terms have one sign, as the
squares of a norm do, the error grows with the length. In single precision, the norm of 25 million normal numbers is
off by 1e-3 (torch 2.13). ``sum`` adds in pairs and is off by 1e-8. Products of pieces that are then summed are off by
1e-7.

References:
    Higham, "Accuracy and stability of numerical algorithms", 2nd edition, 2002, section 4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.core._torch import linalg

_PIECE = 4096


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Compute the dot product of each pair of rows, [..., n] and [..., n] to [...]."""
    return (a * b).sum(-1)


def norm(rows: Tensor) -> Tensor:
    """Return the norm of each row, [..., n] to [...]. Its derivatives at zero are 0."""
    squares = dot(rows, rows)
    if not rows.requires_grad:
        return squares.sqrt()
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)


def safe_norm(rows: Tensor) -> Tensor:
    """Return the norm of each row, a constant. No square is 0 or inf: float64 is scaled, and float32 summed in it."""
    if rows.dtype != torch.float64 or not rows.numel():
        return linalg.vector_norm(rows.detach(), dim=-1, dtype=torch.float64).to(rows.dtype)
    largest = linalg.vector_norm(rows.detach(), torch.inf, dim=-1, keepdim=True)
    scale = largest.where((largest > 0) & largest.isfinite(), 1)
    return linalg.vector_norm(rows.detach() / scale, dim=-1) * scale.squeeze(-1)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Compute the dot product of every row with every row, [..., k, n] and [..., j, n] to [..., k, j].

    Example:
        >>> from metagrad.curvature.rows import inner
        >>> long = torch.full((1, 2**24), 0.1)
        >>> inner(long, long) / 2**24
        tensor([[0.0100]])
    """
    n = a.shape[-1]
    if n <= _PIECE:
        return torch.bmm(a, b.mT) if a.ndim > 2 else a @ b.mT  # @ takes twice as long for small stacks
    if a.ndim > 2:
        return torch.stack([inner(*pair) for pair in zip(a, b, strict=True)])
    whole = n - n % _PIECE
    first, second = (rows[:, :whole].unflatten(1, (-1, _PIECE)).transpose(0, 1) for rows in (a, b))
    return torch.bmm(first, second.mT).sum(0) + a[:, whole:] @ b[:, whole:].mT


def orthonormal(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return orthonormal rows and the coordinates of vectors in them.

    ``vectors`` [k, n] is ``lower`` [k, k] @ ``rows`` [k, n], for k up to n. The rows are orthonormal for any vectors.
    They are differentiable if the vectors are linearly independent.
    """
    rows, lower = _householder(vectors.detach())
    if not vectors.requires_grad:
        return rows, lower
    rows = linalg.solve_triangular(lower, vectors, upper=False)  # the same rows, differentiable
    factor, _ = linalg.cholesky_ex(inner(rows, rows))
    return linalg.solve_triangular(factor, rows, upper=False), lower @ factor


def _householder(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormalize by Householder's method. On a CPU, long vectors are treated in pieces.

    References:
        Demmel, Grigori, Hoemmen, Langou, "Communication-optimal parallel and sequential QR and LU factorizations",
        SIAM J. Sci. Comput. 34, 2012, section 4 (tall matrices by pieces).
    """
    k, n = vectors.shape
    length = max(_PIECE, 4 * k)
    if n <= length or vectors.device.type != "cpu":
        q, r = linalg.qr(vectors.t())
        return q.t(), r.t()
    pieces = [_householder(piece) for piece in vectors.split(length, dim=1)]
    turns, lower = _householder(torch.cat([lower for _, lower in pieces], dim=1))
    parts = turns.split([len(rows) for rows, _ in pieces], dim=1)
    return torch.cat([turn @ rows for turn, (rows, _) in zip(parts, pieces, strict=True)], dim=1), lower
