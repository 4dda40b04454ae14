"""The Lanczos process with full reorthogonalisation, for one system or for rows of systems."""

from __future__ import annotations

from collections.abc import Sequence
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
        ...     def products(self, vectors):
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
    vectors = LanczosVectors(starts, capacity=steps)
    diagonal, off_diagonal = (torch.zeros(count, steps, dtype=torch.float64) for _ in range(2))
    scales = torch.zeros(count, dtype=torch.float64)
    state = LanczosState(vectors.buffer, diagonal, off_diagonal, [steps] * count, scales, starts, 0)
    for j in range(steps):
        active = [i for i, size in enumerate(state.sizes) if size > j]
        if not active:
            break
        state = _step(operator, vectors, state, j, active, call)
    return state


def _step(
    operator: LinearMap, vectors: LanczosVectors, state: LanczosState, j: int, active: list[int], call: str
) -> LanczosState:
    """Multiply the j-th vectors; fill in column j of the projections and the vectors after, in place."""
    products = checked_products(call, operator, vectors.last[active])
    images = torch.zeros_like(vectors.last)
    images[active] = products.detach()
    rest, large, above = orthogonalise(images, vectors.rows)
    alpha = large[:, 0, -1] + above[:, 0, -1]
    above[:, 0, -1] = 0  # and the others are zero if A is symmetric
    if j > 0:
        above[:, 0, -2] += large[:, 0, 0] - state.off_diagonal[:, j - 1].to(large)
    lengths = [scaled_norm(images), scaled_norm(rest), scaled_norm(above[:, 0])]
    report = torch.stack([*lengths, alpha]).cpu().double()
    scales = torch.maximum(state.scales, report[0])
    check_symmetric(report[2], scales, operator.dtype, call)
    state.diagonal[:, j] = report[3]
    state.off_diagonal[:, j] = torch.where(report[1] > negligible(operator.dtype) * scales, report[1], 0.0)
    ends = to_list(state.off_diagonal[:, j] == 0)
    if j + 1 < state.basis.shape[1]:
        vectors.append(rest, lengths[1], [not end for end in ends])
    sizes = [min(size, j + 1) if end else size for size, end in zip(state.sizes, ends, strict=True)]
    first = products if j == 0 else state.first
    return state._replace(sizes=sizes, scales=scales, first=first, matvecs=state.matvecs + len(active))


class LanczosVectors:
    r"""Orthonormal vectors of Krylov spaces, of which each row has its own, by the recurrence of Lanczos.

    .. math:: \beta_j q_{j+1} = A q_j - \alpha_j q_j - \beta_{j-1} q_{j-1}

    :func:`orthogonalise` computes the right side, without what rounding leaves along earlier vectors. Off the tape
    the vectors are in a buffer, since a copy at each step would cost as much as a product.

    Attributes:
        rows: The vectors, [k, m, n]; zero from where a row has ended.
        last: The last of them, [k, n].
        buffer: The rows, and zeros in the places of those to come.
    """

    def __init__(self, first: Tensor, capacity: int = 1) -> None:
        self.buffer: Tensor = pad(first[:, None], (0, 0, 0, capacity - 1))
        self.rows, self.last = self.buffer[:, :1], first

    def append(self, rest: Tensor, lengths: Tensor, alive: Sequence[bool]) -> None:
        """Add a vector to each row: what a product adds to the space, divided by its length."""
        self.last, size = divided(rest, lengths, alive), self.rows.shape[1]
        if self.last.requires_grad or self.rows.requires_grad:
            self.rows = torch.cat([self.rows, self.last[:, None]], 1)
            return
        if size == self.buffer.shape[1]:
            self.buffer = pad(self.buffer, (0, 0, 0, size))
        self.buffer[:, size] = self.last
        self.rows = self.buffer[:, : size + 1]


def divided(rows: Tensor, lengths: Tensor, alive: Sequence[bool]) -> Tensor:
    """Divide rows by their lengths; those that have ended become 0."""
    if all(alive):
        return rows / lengths[:, None]
    return divide(rows, lengths[:, None], where=torch.tensor(alive, device=rows.device)[:, None])


def orthogonalise(vectors: Tensor, rows: Tensor, near: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Take from vectors [k, n] their parts in orthonormal rows [k, m, n], on the tape if there is one.

    Returns:
        The rest; the parts in the last rows, [k, 1, near], which alone are large and were taken first; and what was
        then left in all, [k, 1, m].
    """
    large, rest = _without(rows[:, -near:], vectors.unsqueeze(1))
    left, rest = _without(rows, rest)
    return rest.squeeze(1), large, left


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
