"""A few eigenvalues of an operator, with eigenvectors and error bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metagrad.core.checks import check_choice, check_count, check_number, check_type
from metagrad.curvature.linear_map import LinearMap, checked_products, checked_size
from metagrad.curvature.rows import inner, safe_norm
from metagrad.curvature.spectrum.first_order import first_order
from metagrad.curvature.spectrum.thick_restart import SpectrumEnd, Subspace, ranking, thick_restart_lanczos


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    r"""Approximate eigenvalues and eigenvectors of a symmetric operator.

    There is an eigenvalue within ``residuals[i]`` of ``values[i]``. If the distance to the next eigenvalue is
    larger, the error of the value is at most the squared residual divided by this distance. The angle between the
    vector and the eigenvector is then about the residual divided by the distance.

    Attributes:
        values: Rayleigh quotients :math:`\lambda = v^T A v`, shape [k]. Differentiable if products are.
        vectors: Unit vectors, rows, shape [k, n]. Constants.
        residuals: :math:`\|A v - \lambda v\|` from a final product, plus possible rounding errors, shape [k].
        matvecs: Number of products.
        converged: Whether every residual is at most ``rtol`` times the operator's norm, up to rounding, and the
            search for repeated eigenvalues was completed.

    Example:
        >>> from metagrad.curvature.spectrum.eigenvalues import Eigenpairs
        >>> Eigenpairs(torch.tensor([3.0, 1.0]), torch.eye(2), torch.tensor([1e-6, 1e-5]), 30, True)
        2 eigenvalues from 1 to 3, +- at most 1e-05 (30 products)
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    matvecs: int
    converged: bool

    def __repr__(self) -> str:
        values = self.values.detach()
        status = "" if self.converged else ", not converged"
        return (
            f"{len(values)} eigenvalues from {values.min().item():.6g} to {values.max().item():.6g}, +- at most "
            f"{self.residuals.max().item():.2g} ({self.matvecs} products{status})"
        )


def eigenvalues(
    operator: LinearMap,
    k: int,
    *,
    which: SpectrumEnd = "largest",
    rtol: float = 1e-5,
    max_matvecs: int | None = None,
    max_basis: int | None = None,
    copies: bool = False,
    generator: torch.Generator | None = None,
) -> Eigenpairs:
    r"""Compute k eigenvalues at the ends of the spectrum, with vectors and bounds.

    .. math:: A v_i = \lambda_i v_i + r_i, \quad \min_j |\lambda_i - \lambda_j(A)| \le \|r_i\|

    =========== ==================================== ====================================================
    which       k eigenvalues                        order
    =========== ==================================== ====================================================
    "largest"   the algebraically largest            descending
    "smallest"  the algebraically smallest           ascending: the most negative first
    "both"      the :math:`\lceil k/2 \rceil`        descending
                largest and the :math:`k/2` smallest
    "magnitude" the largest in absolute value        by absolute value, descending
    =========== ==================================== ====================================================

    The method is thick-restart Lanczos, which shows a repeated eigenvalue once unless ``copies`` is set. It stores
    ``max_basis`` vectors, and 2 k at the end.

    Eigenvalues inside the spectrum are not available this way, see :func:`metagrad.curvature.spectral_density`. A
    tight cluster converges slowly or not at all, such as the smallest eigenvalues of an overparameterized model near
    zero.

    If products are differentiable, values have first derivatives: :math:`d\lambda = v^T \, dA \, v`. They are
    correct for a simple eigenvalue, and for the sum over all copies of a repeated eigenvalue. A second derivative
    raises.

    Args:
        operator: A symmetric map of n-vectors.
        k: Number of eigenvalues, from 1 to n.
        which: A row of the table.
        rtol: Stop if every residual is at most ``rtol`` times the operator's norm (the largest product with a unit
            vector or Ritz value seen). Values below about 10 times the dtype's ``eps`` cannot be met.
        max_matvecs: Maximum number of products, including the final k. The default is 2000 or 20 n,
            whichever is smaller, but enough for a start. If it is reached, the result has ``converged=False``.
        max_basis: Maximum number of vectors that Lanczos stores, from k + 2. More vectors need fewer products. The
            default is the larger of 2 k + 1 and 40, but at most n. With n or more, the result is exact.
        copies: Search for copies of repeated eigenvalues. The search ends if the next orthogonal eigenvector does
            not belong to the k requested eigenvalues. The search about doubles the number of products. Without the
            search, a repeated eigenvalue may appear once, and later values then skip its copies. If no eigenvalue is
            repeated, as is typical at the ends of the spectrum of a network's Hessian, both results are equal.
        generator: Draws the start vectors.

    Returns:
        The eigenpairs.

    Raises:
        ValueError: An argument is out of its range, a product is not finite, or the operator is not symmetric.

    Example:
        diag(1, 2, ..., 50):

        >>> from metagrad.curvature.spectrum.eigenvalues import eigenvalues
        >>> class Diagonal:
        ...     shape, dtype, device = (50, 50), torch.float64, torch.device("cpu")
        ...     def multiply(self, vectors):
        ...         return vectors * torch.arange(1.0, 51.0, dtype=torch.float64)
        >>> pairs = eigenvalues(Diagonal(), 3, which="both")
        >>> pairs.values.round(decimals=6)
        tensor([50., 49.,  1.], dtype=torch.float64)

    References:
        Parlett, "The symmetric eigenvalue problem", 1998, chapter 4 (residual bounds) and 13; Wu, Simon,
        "Thick-restart Lanczos method for large symmetric eigenvalue problems", 2000; Magnus, "On differentiating
        eigenvalues and eigenvectors", 1985.
    """
    n = checked_size(_CALL, operator)
    check_type(f"{_CALL}: generator", generator, torch.Generator, optional=True)
    check_count(f"{_CALL}: k", k)
    if k > n:
        raise ValueError(f"{_CALL}: the operator is {n} x {n}, so k must be from 1 to {n}, got {k}.")
    check_choice(f"{_CALL}: which", which, SpectrumEnd)
    check_number(f"{_CALL}: rtol", rtol, 0, below=1)
    check_count(f"{_CALL}: max_basis", max_basis, min(n, k + 2), optional=True)
    check_count(f"{_CALL}: max_matvecs", max_matvecs, 2 * k, optional=True)
    max_basis = min(n, max(2 * k + 1, 40) if max_basis is None else max_basis)
    budget = max(min(2000, 20 * n), 2 * k) if max_matvecs is None else max_matvecs
    search = partial(
        thick_restart_lanczos, which=which, rtol=rtol, max_basis=max_basis, generator=generator, call=_CALL
    )
    budget -= k  # the last k products compute the residuals
    found = search(operator, k, max_matvecs=budget)
    while copies and found.settled and not found.is_whole:
        rest, count = _deflated(operator, found, which), 2 if which == "both" else 1
        other = search(rest, count, max_matvecs=max(1, budget - found.matvecs))
        values = np.concatenate([found.values, other.values])
        vectors = torch.cat([found.vectors, other.vectors])
        tie = rtol * found.scale * (np.arange(len(values)) < k)
        best = ranking(values, which, tie)[:k]
        found = found._replace(
            values=values[best],
            vectors=vectors[best],
            matvecs=found.matvecs + other.matvecs,
            settled=other.settled,
        )
        if (best < k).all():
            break
    return _with_residuals(operator, found, which, rtol)


_CALL = "eigenvalues(operator, k)"


def _deflated(operator: LinearMap, found: Subspace, which: SpectrumEnd) -> Any:
    """Return the operator with the found eigenvectors moved away from the wanted ends of the spectrum."""
    inside = {"largest": -found.scale, "smallest": found.scale, "magnitude": 0.0}
    value = inside.get(which, float(found.values[-2:].mean()))  # for "both", between the two ends

    def multiply(rows: Tensor) -> Tensor:
        own = inner(rows, found.vectors) @ found.vectors
        images = operator.multiply(rows - own).detach()
        return images - inner(images, found.vectors) @ found.vectors + value * own

    return SimpleNamespace(
        shape=operator.shape, dtype=operator.dtype, device=operator.device, multiply=multiply
    )


def _with_residuals(operator: LinearMap, found: Subspace, which: SpectrumEnd, rtol: float) -> Eigenpairs:
    """Multiply once more. Only this product is differentiable."""
    vectors = found.vectors / safe_norm(found.vectors).unsqueeze(1)
    # A map with num_together measures its first products, which takes longer than a few in turn.
    size = 1 if hasattr(operator, "num_together") else len(vectors)
    pieces = [vectors[i : i + size] for i in range(0, len(vectors), size)]
    images = torch.cat([checked_products(_CALL, operator, rows) for rows in pieces])
    quotients = (vectors * images).sum(1, dtype=torch.float64).to(vectors.dtype)
    constants = quotients.detach()
    rest = images.detach() - constants.unsqueeze(1) * vectors
    rounding = 4 * torch.finfo(vectors.dtype).eps * max(found.scale, float(constants.abs().max()))
    residuals = safe_norm(rest) + rounding
    order = ranking(constants.cpu().double().numpy(), "largest" if which == "both" else which)
    return Eigenpairs(
        first_order(quotients, _CALL)[order],
        vectors[order],
        residuals[order],
        found.matvecs + len(order),
        found.settled and bool((residuals <= rtol * found.scale + rounding).all()),
    )
