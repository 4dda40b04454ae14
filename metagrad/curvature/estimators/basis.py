"""Growing orthonormal bases and their leave-one-out forms."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.curvature.rows import orthonormal


class Basis:
    """An orthonormal basis of all appended vectors: appended = lower @ rows.

    Args:
        nothing: An empty tensor [0, n].

    Attributes:
        rows: The basis, [k, n], orthonormal up to rounding for any vectors.
        lower: Coordinates of the appended vectors, [k, k], lower triangular.
    """

    def __init__(self, nothing: Tensor) -> None:
        self.rows: Tensor = nothing
        self.lower: Tensor = nothing.new_zeros(0, 0)

    def append(self, vectors: Tensor, call: str) -> Tensor:
        """Add vectors, [j, n]. Return the new rows of the basis, [j, n].

        Householder's method runs on the old rows and the new vectors together. Gram-Schmidt would lose orthogonality
        if the new vectors lie in the old span (an operator of low rank).

        Raises:
            ValueError: The vectors require grad and are linearly dependent up to half of the digits of their dtype.
        """
        k = self.rows.shape[0]
        rows, lower = orthonormal(torch.cat([self.rows, vectors]))
        signs = torch.sign(lower.diagonal()[:k].detach())
        coordinates = lower[k:]
        coordinates = torch.cat([coordinates[:, :k] * signs, coordinates[:, k:]], 1)
        self.lower = torch.cat([torch.nn.functional.pad(self.lower, (0, vectors.shape[0])), coordinates])
        new = rows[k:]
        self.rows = torch.cat([self.rows, new])
        if self.lower.requires_grad:
            self._check_independence(call)
        return new

    def _check_independence(self, call: str) -> None:
        pivots = self.lower.detach().diagonal().abs()
        if not pivots.min() >= torch.finfo(pivots.dtype).eps ** 0.5 * pivots.max():
            raise ValueError(
                f"{call}: the products require grad, and {len(pivots)} of them are numerically dependent, so their "
                'orthonormal basis has no usable derivative. Take method="hutchinson" or fewer probes.'
            )


def left_out(lower: Tensor) -> Tensor:
    """Return the direction that the span loses without each vector: unit rows :math:`s_i`, [k, k].

    The rows :math:`Q` are a basis of k vectors. The span of all vectors but the i-th has the projector :math:`Q^T (I
    - s_i s_i^T) Q`. Here :math:`s_i` is the normalized i-th column of the inverse of ``lower``, which is orthogonal
    to every other vector's coordinates.

    References:
        Epperly, Tropp, Webber, "XTrace: making the most of every sample in stochastic trace estimation", SIAM J.
        Matrix Anal. Appl. 45(1), 2024, section 2.
    """
    inverse = inverse_rows(lower)
    return inverse / linalg.vector_norm(inverse, dim=1, keepdim=True)


def inverse_rows(lower: Tensor) -> Tensor:
    """Return the columns of the inverse of a triangular matrix as rows. Rounding errors replace pivots of zero."""
    eye = torch.eye(lower.shape[0], dtype=lower.dtype, device=lower.device)
    pivots = lower.detach().diagonal()
    largest = lower.detach().abs().amax()
    least = torch.finfo(lower.dtype).eps * torch.where(largest > 0, largest, torch.ones_like(largest))
    moved = torch.where(pivots.abs() < least, torch.copysign(least, pivots) - pivots, 0.0)
    return linalg.solve_triangular(lower + torch.diag(moved), eye, upper=False).t()
