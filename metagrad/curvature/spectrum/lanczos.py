"""The Lanczos process with full reorthogonalization, for several start vectors at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.core._torch import to_list
from metagrad.curvature.linear_map import LinearMap, checked_products
from metagrad.curvature.rows import inner, scaled_norm
from metagrad.curvature.solvers.iteration import divide


class LanczosState(NamedTuple):
    """Orthonormal bases of Krylov spaces, and the projections of the operator on them.

    Attributes:
        basis: Orthonormal rows, in the operator's dtype, shape [num_starts, steps, n]. Rows after a breakdown are
            zero.
        projected: The operator in each basis, float64 on the CPU, shape [num_starts, steps, steps]. Tridiagonal.
        sizes: Dimension of each Krylov space: ``steps``, or less after a breakdown.
        first: The operator times the first row of each basis, shape [num_starts, n]. Differentiable if products are.
        matvecs: Number of products.
    """

    basis: Tensor
    projected: Tensor
    sizes: list[int]
    first: Tensor
    matvecs: int


class LanczosStep(NamedTuple):
    """One product for each Krylov space, and the direction that it adds.

    Attributes:
        products: Products of the active rows, shape [num_active, n]. Differentiable if the operator's products are.
        directions: Unit vectors orthogonal to the bases, shape [num_starts, n]. Zero if a space is invariant.
        norms: Norms of the parts that the products add to the spaces, float64 on the CPU, shape [num_starts].
        scales: Largest norm of a product so far, float64 on the CPU, shape [num_starts].
    """

    products: Tensor
    directions: Tensor
    norms: Tensor
    scales: Tensor


def lanczos(
    operator: LinearMap, starts: Tensor, *, steps: int, call: str = "lanczos(operator, ...)"
) -> LanczosState:
    r"""Project a symmetric operator on the Krylov spaces of some vectors.

    .. math:: A Q^T = Q^T T + \beta_m q_{m+1} e_m^T, \quad q_1 = z / \|z\|, \quad Q Q^T = I,
        \quad T = \mathrm{tridiag}(\beta, \alpha, \beta)

    Each start has its own space. The products of all starts are computed together. A process ends early if its space
    is invariant (a breakdown). Bases and projections are constants for derivatives.

    Args:
        operator: A symmetric map of n-vectors.
        starts: Rows, not zero, shape [num_starts, n].
        steps: Number of products for each start, at most n.
        call: Name of the caller in errors.

    Returns:
        Bases and projections. The bases hold ``num_starts * steps * n`` elements.

    Raises:
        ValueError: A product is not finite, or the operator is not symmetric.

    References:
        Golub, Van Loan, "Matrix Computations", 4th ed., section 10.1 and 10.3.
    """
    count, steps = len(starts), min(steps, operator.shape[0])
    basis = starts.new_zeros(count, steps, starts.shape[1])
    basis[:, 0] = starts.detach() / scaled_norm(starts.detach()).unsqueeze(1)
    projected = torch.zeros(count, steps, steps, dtype=torch.float64)
    scales = torch.zeros(count, dtype=torch.float64)
    sizes, active, first, matvecs = [steps] * count, list(range(count)), starts, 0
    for j in range(steps):
        step = lanczos_step(operator, basis, projected, j, active, scales, call=call)
        scales, first = step.scales, first if j else step.products
        matvecs += len(active)
        if j + 1 < steps:
            basis[:, j + 1] = step.directions
            for i in active:
                sizes[i] = steps if to_list(step.norms)[i] else j + 1
            active = [i for i in active if sizes[i] == steps]
        if not active:
            break
    return LanczosState(basis, projected, sizes, first, matvecs)


def lanczos_step(
    operator: LinearMap,
    basis: Tensor,
    projected: Tensor,
    j: int,
    active: list[int],
    scales: Tensor,
    *,
    coupled: int = 2,
    call: str,
) -> LanczosStep:
    """Multiply row ``j`` of each active basis, and fill in row and column ``j`` of the projections in place.

    Full orthogonalization computes every off-diagonal coefficient twice, so symmetry is checked at no cost.

    Args:
        operator: A symmetric map of n-vectors.
        basis: Orthonormal rows, shape [num_starts, at least j + 1, n].
        projected: The operator in each basis, shape [num_starts, size, size].
        j: Number of rows that were multiplied before.
        active: Indices of the starts to multiply.
        scales: Largest norm of a product so far, shape [num_starts].
        coupled: Number of trailing rows that the product may have a large part in.
        call: Name of the caller in errors.

    References:
        Giraud, Langou, Rozloznik, "The loss of orthogonality in the Gram-Schmidt orthogonalization process", Comput.
        Math. Appl. 50, 2005 (twice is enough).
    """
    products = checked_products(call, operator, basis[active, j])
    images = torch.zeros_like(basis[:, j])
    images[active] = products.detach()
    rest, parts = orthogonalize(images, basis[:, : j + 1], coupled)
    length = scaled_norm(rest).unsqueeze(1)
    report = torch.cat([parts, length, scaled_norm(images).unsqueeze(1)], 1).cpu().double()
    scales = torch.maximum(scales, report[:, -1])
    if j:
        mismatch = (report[:, :j] - projected[:, j, :j]).abs().amax(1)
        _check_symmetric(mismatch, scales, operator.dtype, call)
    rounding = 10 * torch.finfo(operator.dtype).eps * scales  # of a product that is orthogonalized
    norms = torch.where(report[:, -2] > rounding, report[:, -2], 0.0)
    projected[:, j, j] = report[:, j]
    if j + 1 < projected.shape[1]:
        projected[:, j, j + 1] = projected[:, j + 1, j] = norms
    directions = divide(rest, length, (norms > 0).to(rest.device).unsqueeze(1))
    return LanczosStep(products, directions, norms, scales)


def orthogonalize(vectors: Tensor, rows: Tensor, near: int) -> tuple[Tensor, Tensor]:
    """Subtract from vectors [k, n] their parts in orthonormal rows [k, m, n].

    Args:
        vectors: Shape [k, n].
        rows: Orthonormal rows for each vector, shape [k, m, n].
        near: Number of trailing rows in which the parts are large. These parts are subtracted first.

    Returns:
        The rest, shape [k, n], and the parts, shape [k, m].
    """
    large, rest = _without(rows[:, -near:], vectors.unsqueeze(1))
    parts, rest = _without(rows, rest)
    parts[:, :, -large.shape[2] :] += large
    return rest.squeeze(1), parts.squeeze(1)


def _without(rows: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    parts = inner(vectors, rows)
    return parts, torch.baddbmm(vectors, parts, rows, alpha=-1)


def _check_symmetric(mismatch: Tensor, scales: Tensor, dtype: torch.dtype, call: str) -> None:
    """Raise ``ValueError`` if the operator is not symmetric. The tolerance allows products by finite differences."""
    if bool((mismatch > torch.finfo(dtype).eps ** 0.25 * scales).any()):
        relative = float((mismatch / torch.where(scales == 0, 1.0, scales)).max())
        raise ValueError(
            f"{call}: the operator is not symmetric: <u, A v> and <v, A u> differ by {relative:.1g} of its norm. "
            "Pass a symmetric operator whose products do not change from call to call (no dropout, no shuffling)."
        )
