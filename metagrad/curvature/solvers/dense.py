"""Solutions with the matrix itself, computed column by column, for few parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.curvature.linear_map import Rows, SeparateMatrices, refuse_half
from metagrad.curvature.solvers.iteration import RESULTS, RUNNING, Run, Solver, Start, begun, fill, is_finite
from metagrad.curvature.solvers.solution import Result


@dataclass(frozen=True)
class Dense(Solver):
    """The Cholesky factor of the matrix: n products, for positive definite operators with few coordinates.

    If the matrix is not positive definite, the row ends as ``Result.NEGATIVE_CURVATURE``, without a direction.

    Raises:
        ValueError: In a solve: a preconditioner is given.
        TypeError: The operator has half precision, in which torch cannot factorize.

    Example:
        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.solvers.solve import solve
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> operator = SimpleNamespace(
        ...     shape=(2, 2), dtype=A.dtype, device=A.device, multiply=lambda rows: rows @ A
        ... )
        >>> solve(operator, torch.tensor([3.0, 3.0]), method="dense").value.round(decimals=3)
        tensor([1., 1.])

    References:
        Golub, Van Loan, "Matrix computations", 2013, section 4.2.
    """

    no_preconditioner = "a factorization needs none. Leave it out."

    def run(
        self, products: Rows, start: Start, precondition: Rows | None, tolerance: Tensor, max_steps: int
    ) -> Run:
        """Solve for every row."""
        _, x, r = start
        refuse_half('solve(..., method="dense")', r.dtype)
        status = begun(r, tolerance)
        matrices = matrices_of(products, r)
        are_sound = is_finite(matrices.flatten(1))
        status = torch.where(are_sound, status, RESULTS.index(Result.NON_FINITE))
        identity = torch.eye(r.shape[1], dtype=r.dtype, device=r.device)
        symmetric = torch.where(are_sound[:, None, None], (matrices + matrices.mT) / 2, identity)
        factors, info = linalg.cholesky_ex(symmetric)
        status = fill(status, info != 0, Result.NEGATIVE_CURVATURE)
        factors = torch.where((info == 0)[:, None, None], factors, identity)
        moves = status == RUNNING
        x = x + torch.cholesky_solve(torch.where(moves[:, None], r, 0.0)[..., None], factors)[..., 0]
        status = fill(status, moves, Result.CONVERGED)
        return Run(x, moves.long(), status, torch.zeros_like(r), r, r.shape[1])


def matrices_of(products: Rows, b: Tensor) -> Tensor:
    """Compute the matrix of a map, ``[1, n, n]``, or the matrices of the rows of ``b``, ``[k, n, n]``."""
    identity = torch.eye(b.shape[1], dtype=b.dtype, device=b.device)
    if not isinstance(products, SeparateMatrices):
        return products(identity)[None]
    return torch.stack([products(row.expand_as(b)) for row in identity], -1)
