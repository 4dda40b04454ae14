"""The Lanczos process with full reorthogonalization, for several start vectors at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metagrad.core._torch import from_numpy
from metagrad.core.checks import progress
from metagrad.curvature.linear_map import LinearMap, refuse_nonfinite, shaped_products
from metagrad.curvature.rows import inner, safe_norm

_hypot: Any = np.hypot  # its squares neither overflow nor vanish


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


def lanczos(
    operator: LinearMap, starts: Tensor, *, steps: int, call: str = "lanczos(operator, ...)"
) -> LanczosState:
    r"""Project a symmetric operator on the Krylov spaces of some vectors.

    .. math:: A Q^T = Q^T T + \beta_m q_{m+1} e_m^T, \quad q_1 = z / \|z\|, \quad Q Q^T = I,
        \quad T = \mathrm{tridiag}(\beta, \alpha, \beta)

    Each start has its own space. The products of all starts are computed together. A process ends early if its space
    is invariant (a breakdown). It then multiplies zeros until all have ended. Bases and projections are constants for
    derivatives.

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
    basis[:, 0] = starts.detach() / safe_norm(starts).unsqueeze(1)
    projected, scales = np.zeros((count, steps, steps)), np.zeros(count)
    sizes, first, matvecs = [steps] * count, starts, 0
    for j in progress(range(steps), call):
        products = shaped_products(call, operator, basis[:, j].clone())
        first, matvecs = first if j else products, matvecs + count
        norms, scales = lanczos_step(products.detach(), basis, projected, j, scales, call=call)
        sizes = [size if norm else min(size, j + 1) for size, norm in zip(sizes, norms, strict=True)]
        if not norms.any():
            break
    return LanczosState(basis, from_numpy(projected), sizes, first, matvecs)


def lanczos_step(
    images: Tensor,
    basis: Tensor,
    projected: np.ndarray,
    j: int,
    scales: np.ndarray,
    *,
    coupled: int = 2,
    call: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Write the next row of each basis, and row and column ``j`` of the projections.

    Full orthogonalization computes every off-diagonal coefficient twice, so symmetry is checked at no cost. Small
    matrices are arrays, because an operation of torch takes longer than one of NumPy.

    Args:
        images: Products of row ``j`` of each basis, shape [num_starts, n]. Zero where a process ended.
        basis: Orthonormal rows, shape [num_starts, capacity, n]. The next row is zero if a space is invariant.
        projected: The operator in each basis, float64, shape [num_starts, size, size].
        j: Number of rows that were multiplied before.
        scales: Largest norm of a product so far, float64, shape [num_starts].
        coupled: Number of trailing rows that the product may have a large part in.
        call: Name of the caller in errors.

    Returns:
        Norms of the parts that the products add to the spaces, and the new scales, float64, shape [num_starts].

    References:
        Giraud, Langou, Rozloznik, "The loss of orthogonality in the Gram-Schmidt orthogonalization process", Comput.
        Math. Appl. 50, 2005 (twice is enough).
    """
    rest, parts = orthogonalize(images, basis[:, : j + 1], coupled)
    length = safe_norm(rest).unsqueeze(1)
    report = torch.cat([parts, length], 1).double().cpu().numpy()
    scales = np.maximum(scales, _hypot.reduce(report, axis=1))  # the basis is orthonormal
    if not np.isfinite(scales).all():
        refuse_nonfinite(call, images)
    eps = torch.finfo(images.dtype).eps
    mismatch = np.abs(report[:, :j] - projected[:, j, :j])
    if (mismatch > eps**0.25 * scales[:, None]).any():  # allows products by finite differences
        relative = (mismatch / np.maximum(scales, np.finfo(float).tiny)[:, None]).max()
        raise ValueError(
            f"{call}: the operator is not symmetric: <u, A v> and <v, A u> differ by {relative:.1g} of its norm. "
            "Pass a symmetric operator whose products do not change from call to call (no dropout, no shuffling)."
        )
    # A shorter rest is the rounding of its orthogonalization.
    norms = np.where(report[:, -1] > 10 * eps * scales, report[:, -1], 0.0)
    projected[:, j, j] = report[:, j]
    if j + 1 < projected.shape[1]:
        projected[:, j, j + 1] = projected[:, j + 1, j] = norms
        torch.div(rest, length, out=basis[:, j + 1])
        if not norms.all():
            basis[from_numpy(norms == 0.0).to(basis.device), j + 1] = 0.0
    return norms, scales


def orthogonalize(vectors: Tensor, rows: Tensor, near: int) -> tuple[Tensor, Tensor]:
    """Make vectors [k, n] orthogonal to orthonormal rows [k, m, n].

    Args:
        vectors: Shape [k, n].
        rows: Orthonormal rows for each vector, shape [k, m, n].
        near: Number of last rows with large coefficients, whose components are subtracted first.

    Returns:
        The orthogonal vectors, shape [k, n], and the subtracted coefficients, shape [k, m].
    """
    large, rest = _without(rows[:, -near:], vectors.unsqueeze(1))
    parts, rest = _without(rows, rest)
    parts[:, :, -large.shape[2] :] += large
    return rest.squeeze(1), parts.squeeze(1)


def _without(rows: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    parts = inner(vectors, rows)
    return parts, torch.baddbmm(vectors, parts, rows, alpha=-1)
