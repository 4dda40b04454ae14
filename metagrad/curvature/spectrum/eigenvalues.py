"""A few eigenvalues of an operator, with their vectors and bounds on their errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from metagrad.core.checks import is_integer
from metagrad.curvature.estimators.probes import check_drawing
from metagrad.curvature.linear_map import LinearMap, checked_products, checked_size
from metagrad.curvature.rows import scaled_norm
from metagrad.curvature.spectrum.first_order import first_order
from metagrad.curvature.spectrum.thick_restart import Subspace, Which, ranking, thick_restart_lanczos


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    r"""Approximate eigenvalues and eigenvectors of a symmetric operator.

    Within ``residuals[i]`` of ``values[i]`` there is an eigenvalue. Where the next one is farther away, the value is
    much nearer than that (within the square of the residual over the distance), and the vector's angle to the
    eigenvector is about the residual over the distance.

    Attributes:
        values: Rayleigh quotients :math:`\lambda = v^T A v`, shape [k]; on the tape where products are.
        vectors: Unit vectors, rows, shape [k, n]; constants. None where they were not asked for.
        residuals: :math:`\|A v - \lambda v\|` from a last product, and what rounding may add to it; shape [k].
        matvecs: How many products were spent.
        converged: Whether every residual is at most ``rtol`` times the operator's norm (and what rounding may add),
            and the search for copies, if there was one, was finished.

    Example:
        >>> from metagrad.curvature.spectrum.eigenvalues import Eigenpairs
        >>> Eigenpairs(torch.tensor([3.0, 1.0]), None, torch.tensor([1e-6, 1e-5]), 30, True)
        2 eigenvalues from 1 to 3, +- at most 1e-05 (30 products)
    """

    values: Tensor
    vectors: Tensor | None
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
    which: Which = "largest",
    rtol: float = 1e-5,
    max_matvecs: int | None = None,
    max_basis: int | None = None,
    copies: bool = True,
    vectors: bool = True,
    generator: torch.Generator | None = None,
) -> Eigenpairs:
    r"""Compute k eigenvalues at the ends of the spectrum, with vectors and bounds.

    .. math:: A v_i = \lambda_i v_i + r_i, \quad \min_j |\lambda_i - \lambda_j(A)| \le \|r_i\|

    =========== ==================================== ====================================================
    which       which k eigenvalues                  order
    =========== ==================================== ====================================================
    "largest"   the algebraically largest            descending
    "smallest"  the algebraically smallest           ascending: the most negative first
    "both"      the :math:`\lceil k/2 \rceil`        descending
                largest, and the other :math:`k/2`
                smallest
    "magnitude" the largest in absolute value        by absolute value, descending
    =========== ==================================== ====================================================

    The method is thick-restart Lanczos, with a search for missed copies of repeated eigenvalues after it has
    converged; it keeps ``max_basis`` vectors, and 2 k at the end.

    Eigenvalues inside the spectrum cannot be had this way; see :func:`metagrad.curvature.spectral_density`. A tight
    cluster (as the smallest eigenvalues of an overparameterised model, all about zero) converges slowly or not.

    Where products are differentiable, so are the values, once: :math:`d\lambda = v^T \, dA \, v`, right for an
    eigenvalue that is not repeated, and for the sum over all copies of one that is. The second derivative is
    refused.

    Args:
        operator: A symmetric map of n-vectors.
        k: How many, from 1 to n.
        which: Which.
        rtol: Stop when every residual is this times the operator's norm (the largest product with a unit vector or
            Ritz value seen) or less. Below about 10 times the dtype's ``eps`` it cannot be met.
        max_matvecs: The most products to spend, those for the residuals included; 2000 or 20 n, whichever is less,
            but never less than a start takes, by default. What is reached then is returned, with
            ``converged=False``.
        max_basis: The most vectors that Lanczos keeps, from k + 2: more of them need fewer products. By default
            2 k + 1 or 40, whichever is more, but at most n. From n on, nothing is approximate.
        copies: Search for missed copies of repeated eigenvalues, which takes two thirds as many products again.
            Without the search one value may stand for several copies of an eigenvalue, and the values after it are
            then not the next ones; where no eigenvalue is repeated, as at the ends of the spectrum of a network's
            Hessian, both find the same.
        vectors: Return the vectors, too.
        generator: Draws the starts.

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
    n = _checked_size(operator, k, which, rtol, generator)
    max_basis = min(n, max(2 * k + 1, 40) if max_basis is None else max_basis)
    if max_basis < min(n, k + 2):
        raise ValueError(f"{_CALL}: max_basis must be at least k + 2 = {k + 2}, got {max_basis}.")
    found = thick_restart_lanczos(
        operator,
        k,
        which=which,
        rtol=rtol,
        max_matvecs=_budget(max_matvecs, n, k),
        max_basis=max_basis,
        copies=copies,
        generator=generator,
        call=_CALL,
    )
    pairs = _with_residuals(operator, found, which, rtol)
    return pairs if vectors else replace(pairs, vectors=None)


_CALL = "eigenvalues(operator, k)"


def _checked_size(operator: LinearMap, k: int, which: str, rtol: float, generator: object) -> int:
    n = checked_size(_CALL, operator)
    check_drawing(_CALL, "normal", generator)
    if not is_integer(k):
        raise TypeError(f"{_CALL}: k must be an int, got {type(k).__name__}.")
    if not 1 <= k <= n:
        raise ValueError(f"{_CALL}: the operator is {n} x {n}, so k must be from 1 to {n}, got {k}.")
    if which not in get_args(Which):
        raise ValueError(f"{_CALL}: which must be one of {', '.join(get_args(Which))}, got {which!r}.")
    if not 0 <= rtol < 1:
        raise ValueError(f"{_CALL}: rtol must be at least 0 and less than 1, got {rtol}.")
    return n


def _budget(max_matvecs: int | None, n: int, k: int) -> int:
    """Return how many products the iteration may take: the last k are for the residuals."""
    if max_matvecs is None:
        return max(min(2000, 20 * n), 2 * k) - k
    if max_matvecs < 2 * k:
        raise ValueError(f"{_CALL}: max_matvecs must be at least {2 * k} for k = {k}, got {max_matvecs}.")
    return max_matvecs - k


def _with_residuals(operator: LinearMap, found: Subspace, which: Which, rtol: float) -> Eigenpairs:
    """Multiply once more: the only product that is kept on the tape."""
    vectors = found.vectors / scaled_norm(found.vectors).unsqueeze(1)
    images = checked_products(_CALL, operator, vectors)
    quotients = (vectors * images).sum(1, dtype=torch.float64).to(vectors.dtype)
    constants = quotients.detach()
    rest = images.detach() - constants.unsqueeze(1) * vectors
    rounding = 4 * torch.finfo(vectors.dtype).eps * max(found.scale, float(constants.abs().max()))
    residuals = scaled_norm(rest) + rounding
    order = ranking(constants, "largest" if which == "both" else which)
    return Eigenpairs(
        first_order(quotients, _CALL)[order],
        vectors[order],
        residuals[order],
        found.matvecs + len(order),
        found.settled and bool((residuals <= rtol * found.scale + rounding).all()),
    )
