"""The randomized Nystrom approximation of a positive semi-definite operator: an inverse and a preconditioner."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.checks import check_count, check_number, check_scalar, refuse
from metagrad.curvature.estimators.probes import draw_for
from metagrad.curvature.linear_map import LinearMap, Rows, checked_products, checked_size, refuse_half
from metagrad.curvature.rows import inner, orthonormal

FIRST_RANK, LARGEST_RANK = 8, 256  # of the adaptive choice


@dataclass(frozen=True, eq=False, repr=False)
class Nystrom:
    r"""A low-rank approximation :math:`\hat A = U \Lambda U^T \preceq A`. Made by :func:`nystrom`.

    Attributes:
        basis: Orthonormal rows, the columns of U, [rank, n].
        eigenvalues: :math:`\Lambda`, descending, [rank].
        matvecs: Number of products.
    """

    basis: Tensor
    eigenvalues: Tensor
    matvecs: int

    def __repr__(self) -> str:
        least, greatest = self.eigenvalues.aminmax()
        return f"Nystrom(rank {len(self.basis)}, eigenvalues {least:.4g} to {greatest:.4g}, {self.matvecs} products)"

    def inverse(self, damping: float | Tensor) -> Rows:
        r"""Return the map :math:`v \mapsto (\hat A + \mu I)^{-1} v` of rows. It costs two products with U.

        Its error relative to :math:`(A + \mu I)^{-1}` is at most :math:`|E| / (\mu (\mu + |E|))`, where E is the
        error of the approximation (Frangella, Tropp, Udell, proposition 3.1).

        Args:
            damping: The number :math:`\mu`, above 0. It may require grad.

        Raises:
            ValueError: ``damping`` is not above 0, so the approximation has no inverse.
        """
        call = "Nystrom.inverse(damping)"
        if not check_scalar(call, damping, 0):
            refuse(call, "a number above 0, because a matrix of low rank is singular", damping)

        def solve(rows: Tensor) -> Tensor:
            inside = self._scaled(rows, 1 / (self.eigenvalues + damping))
            if len(self.basis) == self.basis.shape[1]:
                return inside
            # Projected twice, because division by a small damping amplifies rounding errors along U.
            outside = rows - self._scaled(rows, torch.ones_like(self.eigenvalues))
            outside = outside - self._scaled(outside, torch.ones_like(self.eigenvalues))
            return inside + outside / damping

        return solve

    def preconditioner(self, damping: float | Tensor = 0.0) -> Rows:
        r"""Return the preconditioner of :math:`A + \mu I`, a map of rows.

        .. math:: P^{-1} = (\lambda_r + \mu) \, U (\Lambda + \mu I)^{-1} U^T + I - U U^T

        If the rank is at least twice the effective dimension :math:`\mathrm{tr} A (A + \mu I)^{-1}`, the expected
        condition number of the preconditioned operator is below 28, and CG needs few steps.

        Args:
            damping: The number :math:`\mu`, 0 or more. With 0, directions of eigenvalue 0 do not change.
        """
        damped = self.eigenvalues + damping
        positive = damped > 0  # outside of the subspace the operator is unknown, and vectors do not change
        level = torch.where(positive, damped, torch.inf).min()
        gain = torch.where(positive, level / torch.where(positive, damped, 1.0) - 1, 0.0)
        return lambda rows: rows + self._scaled(rows, gain)

    def _scaled(self, rows: Tensor, factors: Tensor) -> Tensor:
        return (inner(rows, self.basis) * factors) @ self.basis


def nystrom(
    operator: LinearMap,
    rank: int | None = None,
    *,
    damping: float = 0.0,
    generator: torch.Generator | None = None,
) -> Nystrom:
    r"""Approximate a positive semi-definite operator by a low-rank operator, from products with random vectors.

    .. math:: \hat A = (A \Omega) (\Omega^T A \Omega)^{\dagger} (A \Omega)^T

    :math:`\Omega` is normal and orthonormalized, n by rank. A shift of the size of rounding errors gives stability.
    The approximation is exact for an operator of this rank or less. It is close to the best approximation if
    eigenvalues decay.

    Args:
        operator: A positive semi-definite map of n-vectors.
        rank: Number of products, from 1 to n. None doubles it from 8 until the smallest eigenvalue found is at most
            ten times ``damping``, or is a rounding error, or the rank is 256.
        damping: The intended damping. It affects only the choice of the rank.
        generator: Draws the vectors.

    Returns:
        The approximation. Eigenvalues below rounding errors of the largest are 0.

    Raises:
        ValueError: ``rank`` is not from 1 to n, ``damping`` is negative, a product is not finite, or the operator is
            not positive semi-definite.

    Note:
        The approximation is a constant for derivatives. This is exact for a preconditioner, but not for an inverse.

    Example:
        An operator of rank 1 is found exactly:

        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.solvers.nystrom import nystrom
        >>> A = torch.ones(4, 4)
        >>> operator = SimpleNamespace(
        ...     shape=(4, 4), dtype=A.dtype, device=A.device, multiply=lambda rows: rows @ A
        ... )
        >>> found = nystrom(operator, 2, generator=torch.Generator().manual_seed(0))
        >>> found.eigenvalues.round(decimals=3)
        tensor([4., 0.])

    References:
        Frangella, Tropp, Udell, "Randomized Nystrom preconditioning", SIAM J. Matrix Anal. Appl. 44(2), 2023,
        algorithms 2.1 and 5.1, theorem 5.1; Tropp, Yurtsever, Udell, Cevher, "Fixed-rank approximation of a
        positive-semidefinite matrix from streaming data", NeurIPS 2017, algorithm 3 (the shift).
    """
    n = checked_size("nystrom(operator)", operator)
    refuse_half("nystrom(operator)", operator.dtype)
    check_count("nystrom(operator, rank)", rank, optional=True)
    if rank is not None and rank > n:
        raise ValueError(f"nystrom(operator, rank): expected 1 to n = {n}, or None, got {rank}.")
    check_number("nystrom(..., damping)", damping, 0)
    most = min(LARGEST_RANK, n)
    size = min(FIRST_RANK, most) if rank is None else rank
    omega = y = torch.zeros(0, n, dtype=operator.dtype, device=operator.device)
    with torch.no_grad():
        while True:
            omega, y = _more(operator, omega, y, size, generator)
            found = _approximation(omega, y)
            is_enough = float(found.eigenvalues[-1]) <= 10 * damping
            if rank is not None or is_enough or len(omega) == most:
                return found
            size = min(len(omega), most - len(omega))


def _more(
    operator: LinearMap, omega: Tensor, y: Tensor, count: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Add random vectors orthogonal to the rows of omega, and their products."""
    fresh = draw_for(operator, count, "normal", generator)
    for _ in range(2):  # two passes are enough (Kahan, Parlett)
        fresh = fresh - inner(fresh, omega) @ omega
    fresh = orthonormal(fresh)[0].contiguous()
    products = checked_products("nystrom(operator)", operator, fresh).detach()
    return torch.cat([omega, fresh]), torch.cat([y, products])


def _approximation(omega: Tensor, y: Tensor) -> Nystrom:
    """Compute the approximation by algorithm 2.1, in rows."""
    eps = torch.finfo(y.dtype).eps
    size = linalg.matrix_norm(y)
    shift = (eps * y.shape[1] ** 0.5 * size).clamp_min(torch.finfo(y.dtype).tiny)
    core = inner(omega, y) + shift * torch.eye(len(omega), dtype=y.dtype, device=y.device)
    factor, info = linalg.cholesky_ex((core + core.t()) / 2)
    if int(info):
        raise ValueError(
            "nystrom(operator): the operator is not positive semi-definite: a random vector v has v^T A v < 0. "
            "Take the Gauss-Newton or Fisher operator."
        )
    rows = linalg.solve_triangular(factor, y + shift * omega, upper=False)
    orthogonal, lower = orthonormal(rows)
    singular, turn = linalg.svd(lower)[1:]
    eigenvalues = singular.square() - shift
    return Nystrom(turn @ orthogonal, torch.where(eigenvalues > 10 * shift, eigenvalues, 0.0), len(omega))
