"""An orthonormal basis that grows, and what it becomes when one of its makers is left out."""

from __future__ import annotations

import torch
from torch import Tensor


class Basis:
    r"""Rows that span what was appended so far: appended = lower @ rows.

    Attributes:
        rows: The basis, [k, n], orthonormal to rounding whatever is appended.
        lower: The coordinates of what was appended, [k, k], lower triangular.
    """

    def __init__(self, n: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.empty(0, n, dtype=dtype, device=device)
        self.lower = torch.empty(0, 0, dtype=dtype, device=device)

    def append(self, vectors: Tensor, call: str) -> Tensor:
        """Add vectors, [j, n], and return the new rows of the basis, [j, n].

        Householder's method runs on the old rows and the new vectors together, because Gram and Schmidt's would lose
        orthogonality where the new ones lie in the old span (an operator of low rank).

        Raises:
            ValueError: The vectors are to be differentiated, and are dependent to half the digits.
        """
        k = self.rows.shape[0]
        q, r = torch.linalg.qr(torch.cat([self.rows, vectors]).t())
        signs = torch.sign(r.diagonal()[:k].detach())
        coordinates = r[:, k:].t()
        coordinates = torch.cat([coordinates[:, :k] * signs, coordinates[:, k:]], 1)
        self.lower = torch.cat([torch.nn.functional.pad(self.lower, (0, vectors.shape[0])), coordinates])
        new = q[:, k:].t()
        self.rows = torch.cat([self.rows, new])
        if self.lower.requires_grad:
            self._check_independence(call)
        return new

    def _check_independence(self, call: str) -> None:
        pivots = self.lower.detach().diagonal().abs()
        if pivots.min() < torch.finfo(pivots.dtype).eps ** 0.5 * pivots.max():
            raise ValueError(
                f"{call}: the products require grad, and {len(pivots)} of them are numerically dependent, so their "
                'orthonormal basis has no usable derivative. Take method="hutchinson" or fewer probes.'
            )


def left_out(lower: Tensor) -> Tensor:
    r"""Return what the span loses when one vector is left out: unit rows :math:`s_i`, [k, k].

    With the rows :math:`Q` of a basis of k vectors, that of all but the i-th has the projector
    :math:`Q^T (I - s_i s_i^T) Q`, where :math:`s_i` is the i-th column of the inverse of ``lower``, normalised:
    orthogonal to every other vector's coordinates.

    References:
        Epperly, Tropp, Webber, "XTrace: making the most of every sample in stochastic trace estimation", SIAM J.
        Matrix Anal. Appl. 45(1), 2024, section 2.
    """
    inverse = inverse_rows(lower)
    return inverse / torch.linalg.vector_norm(inverse, dim=1, keepdim=True)


def inverse_rows(lower: Tensor) -> Tensor:
    """Return the columns of the inverse of a triangular matrix as rows; pivots are moved off zero by rounding."""
    eye = torch.eye(lower.shape[0], dtype=lower.dtype, device=lower.device)
    pivots = lower.detach().diagonal()
    largest = lower.detach().abs().amax()
    least = torch.finfo(lower.dtype).eps * torch.where(largest > 0, largest, torch.ones_like(largest))
    moved = torch.where(pivots.abs() < least, torch.copysign(least, pivots) - pivots, 0.0)
    return torch.linalg.solve_triangular(lower + torch.diag(moved), eye, upper=False).t()
