"""The Lanczos process with full reorthogonalisation, for one system or for rows of systems."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from metagrad.core._torch import to_list
from metagrad.curvature.linear_map import LinearMap, checked_products
from metagrad.curvature.rows import inner, scaled_norm
from metagrad.curvature.solvers.iteration import divide


class LanczosState(NamedTuple):
    """Orthonormal bases of Krylov spaces, and the operator's tridiagonal projections on them.

    Attributes:
        basis: Orthonormal rows, in the operator's dtype, shape [num_starts, steps, n]; zero after a breakdown.
        diagonal: The diagonals of the projections, float64 on the CPU, shape [num_starts, steps].
        off_diagonal: The off-diagonals, likewise; the last column is the norm of what the last product adds.
        sizes: The dimensions of the Krylov spaces: ``steps``, or fewer after a breakdown.
        scales: The largest norm of a product, for each start: a lower bound of the operator's norm.
        first: The operator times the first row of each basis, shape [num_starts, n]; differentiable where
            products are.
        matvecs: The number of products.
    """

    basis: Tensor
    diagonal: Tensor
    off_diagonal: Tensor
    sizes: list[int]
    scales: Tensor
    first: Tensor
    matvecs: int


def lanczos(
    operator: LinearMap, starts: Tensor, *, steps: int, call: str = "lanczos(operator, ...)"
) -> LanczosState:
    r"""Project a symmetric operator on the Krylov spaces of some vectors.

    .. math:: A Q^T = Q^T T + \beta_m q_{m+1} e_m^T, \quad q_1 = z / \|z\|, \quad Q Q^T = I,
        \quad T = \mathrm{tridiag}(\beta, \alpha, \beta)

    Each start has its own space; the products of all are taken together. Every new vector is orthogonalised
    against the two before it, and then against all. When a space is invariant before ``steps`` are taken (a
    breakdown), its process ends there and its ``size`` says so. The bases and projections are constants for
    derivatives.

    Args:
        operator: A symmetric map of n-vectors. Symmetry is checked: full orthogonalisation computes every
            coefficient of the projection twice.
        starts: Rows, not zero, shape [num_starts, n].
        steps: How many products for each start; more than n are not taken.
        call: What errors name.

    Returns:
        Bases and projections. The bases hold ``num_starts * steps * n`` elements.

    Raises:
        ValueError: ``steps`` is less than 1, ``starts`` do not fit the operator or are zero, a product is not
            finite, or the operator is not symmetric.

    Example:
        Two steps from (1, 1) see both eigenvalues of diag(1, 3), around their mean:

        >>> from metagrad.curvature.spectrum.lanczos import lanczos
        >>> class Diagonal:
        ...     shape, dtype, device = (2, 2), torch.float64, torch.device("cpu")
        ...     def multiply(self, vectors):
        ...         return vectors * torch.tensor([1.0, 3.0], dtype=torch.float64)
        >>> state = lanczos(Diagonal(), torch.ones(1, 2).double(), steps=2)
        >>> state.diagonal, state.off_diagonal[:, :1]
        (tensor([[2., 2.]], dtype=torch.float64), tensor([[1.]], dtype=torch.float64))

    References:
        Golub, Van Loan, "Matrix Computations", 4th ed., section 10.1 and 10.3; Giraud, Langou, Rozloznik,
        "The loss of orthogonality in the Gram-Schmidt orthogonalization process", Comput. Math. Appl. 50, 2005
        (twice is enough; the first time, all other parts are rounding errors).
    """
    if steps < 1:
        raise ValueError(f"{call}: steps must be at least 1, got {steps}.")
    n = operator.shape[0]
    if starts.dim() != 2 or starts.shape[1] != n or starts.shape[0] == 0:
        raise ValueError(f"{call}: starts must be rows, shape [num_starts, {n}], got {list(starts.shape)}.")
    lengths = scaled_norm(starts)
    if not bool((lengths > 0).all()):
        raise ValueError(f"{call}: a start is zero or not finite; start from a vector that is neither.")
    return _run(operator, starts / lengths.unsqueeze(1), min(steps, n), call)


def _run(operator: LinearMap, starts: Tensor, steps: int, call: str) -> LanczosState:
    count = len(starts)
    basis = pad(starts.detach()[:, None], (0, 0, 0, steps - 1))
    diagonal, off_diagonal = (torch.zeros(count, steps, dtype=torch.float64) for _ in range(2))
    scales = torch.zeros(count, dtype=torch.float64)
    state = LanczosState(basis, diagonal, off_diagonal, [steps] * count, scales, starts, 0)
    for j in range(steps):
        active = [i for i, size in enumerate(state.sizes) if size > j]
        if not active:
            break
        state = _step(operator, state, j, active, call)
    return state


def _step(operator: LinearMap, state: LanczosState, j: int, active: list[int], call: str) -> LanczosState:
    """Multiply the j-th vectors; fill in column j of the projections and the vectors after, in place."""
    products = checked_products(call, operator, state.basis[active, j])
    images = torch.zeros_like(state.basis[:, j])
    images[active] = products.detach()
    rest, parts = orthogonalise(images, state.basis[:, : j + 1], 2)
    alpha = parts[:, -1].clone()
    parts[:, -1] = 0  # and the others are zero if A is symmetric
    if j > 0:
        parts[:, -2] -= state.off_diagonal[:, j - 1].to(parts)
    lengths = [scaled_norm(images), scaled_norm(rest), scaled_norm(parts)]
    report = torch.stack([*lengths, alpha]).cpu().double()
    scales = torch.maximum(state.scales, report[0])
    check_symmetric(report[2], scales, operator.dtype, call)
    state.diagonal[:, j] = report[3]
    state.off_diagonal[:, j] = torch.where(report[1] > negligible(operator.dtype) * scales, report[1], 0.0)
    goes_on = state.off_diagonal[:, j] > 0
    if j + 1 < state.basis.shape[1]:
        where = goes_on.to(rest.device).unsqueeze(1)
        state.basis[:, j + 1] = divide(rest, lengths[1].unsqueeze(1), where)
    ends = zip(state.sizes, to_list(goes_on), strict=True)
    sizes = [size if moves else min(size, j + 1) for size, moves in ends]
    first = products if j == 0 else state.first
    return state._replace(sizes=sizes, scales=scales, first=first, matvecs=state.matvecs + len(active))


def orthogonalise(vectors: Tensor, rows: Tensor, near: int) -> tuple[Tensor, Tensor]:
    """Take from vectors [k, n] their parts in orthonormal rows [k, m, n]; return the rest, and the parts [k, m].

    Only the parts in the last rows, ``near`` of them, are large, and are taken first. What is left in all is then
    rounding.
    """
    large, rest = _without(rows[:, -near:], vectors.unsqueeze(1))
    parts, rest = _without(rows, rest)
    parts[:, :, -large.shape[2] :] += large
    return rest.squeeze(1), parts.squeeze(1)


def _without(rows: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    parts = inner(vectors, rows)
    return parts, torch.baddbmm(vectors, parts, rows, alpha=-1)


def negligible(dtype: torch.dtype) -> float:
    """Return the part of a product below which what orthogonalisation leaves of it is rounding alone."""
    return 10 * torch.finfo(dtype).eps


def check_symmetric(mismatch: Tensor, scale: Tensor, dtype: torch.dtype, call: str) -> None:
    """Compare the coefficients above the diagonal with those below; finite differences may be off by some."""
    worst = float((mismatch - torch.finfo(dtype).eps ** 0.25 * scale).max())
    if worst > 0:
        relative = float((mismatch / torch.where(scale == 0, 1.0, scale)).max())
        raise ValueError(
            f"{call}: the operator is not symmetric: <u, A v> and <v, A u> differ by {relative:.1g} of its norm. "
            "Pass a symmetric operator whose products do not change from call to call (no dropout, no shuffling)."
        )
