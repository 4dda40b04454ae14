"""A few eigenvalues of an operator, with eigenvectors and error bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metagrad.core._torch import from_numpy
from metagrad.core.checks import check_choice, check_count, check_number, check_type
from metagrad.curvature.linear_map import LinearMap, checked_products, checked_size, shaped_products
from metagrad.curvature.rows import inner, safe_norm
from metagrad.curvature.solvers.implicit import first_order
from metagrad.curvature.spectrum.lanczos import lanczos_step, orthogonalize

SpectrumEnd = Literal["largest", "smallest", "both", "magnitude"]
_CALL = "eigenvalues(operator, k)"


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
    search = partial(thick_restart_lanczos, which=which, rtol=rtol, max_basis=max_basis, generator=generator)
    budget -= k  # the last k products compute the residuals
    found = search(operator, k, max_matvecs=budget)
    while copies and found.settled and not found.is_whole:
        rest, count = _deflated(operator, found, which), 2 if which == "both" else 1
        other = search(rest, count, max_matvecs=max(1, budget - found.matvecs), scale=found.scale)
        values = np.concatenate([found.values, other.values])
        vectors = torch.cat([found.vectors, other.vectors])
        tie = rtol * found.scale * (np.arange(len(values)) < k)
        best = ranking(values, which, tie)[:k]
        total = found.matvecs + other.matvecs
        found = found._replace(
            values=values[best], vectors=vectors[best], matvecs=total, settled=other.settled
        )
        if (best < k).all():
            break
    return _with_residuals(operator, found, which, rtol)


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


class Subspace(NamedTuple):
    """Approximate eigenpairs, without their residuals.

    Attributes:
        values: Ritz values, float64, shape [k].
        vectors: Approximately orthonormal rows, shape [k, n]. Constants.
        scale: A lower bound of the operator's norm, as in :class:`KrylovSpace`.
        matvecs: Number of products.
        settled: False if the budget ended the search.
        is_whole: True if the basis was the whole space, so no eigenvector is missing.
    """

    values: np.ndarray
    vectors: Tensor
    scale: float
    matvecs: int
    settled: bool
    is_whole: bool


class KrylovSpace:
    """A space that grows by one product at a time, and the operator in it.

    Attributes:
        basis: Orthonormal rows, shape [capacity + 1, n]: ``size`` rows, and the vector to multiply next.
        projected: The operator in the first ``size`` rows, float64, shape [capacity + 1, capacity + 1].
            Row ``size`` couples the next vector to the space.
        size: Number of rows that were multiplied.
        coupled: Number of trailing rows that the operator couples to the next vector, including the vector itself.
        scale: Largest norm of a product or Ritz value so far, a lower bound of the operator's norm, shape [1].
        matvecs: Total number of products.
    """

    def __init__(self, operator: LinearMap, max_basis: int, generator: torch.Generator | None) -> None:
        self.operator, self.generator = operator, generator
        shape = max_basis + 1, operator.shape[0]
        self.basis: Tensor = torch.zeros(shape, dtype=operator.dtype, device=operator.device)
        self.projected: np.ndarray = np.zeros((max_basis + 1, max_basis + 1))
        self.size, self.coupled, self.matvecs = 0, 1, 0
        self.scale: np.ndarray = np.zeros(1)
        self.basis[0] = self._random_unit(0)

    def extend(self) -> None:
        """Multiply the next vector. The next vector is the direction that the product adds to the space."""
        j, basis, projected = self.size, self.basis, self.projected
        images = shaped_products(_CALL, self.operator, basis[j : j + 1].clone()).detach()
        norms, self.scale = lanczos_step(
            images, basis[None], projected[None], j, self.scale, coupled=self.coupled, call=_CALL
        )
        if j + 1 == basis.shape[1]:  # the whole space
            projected[j, j + 1] = projected[j + 1, j] = 0.0
        elif not norms[0]:
            basis[j + 1] = self._random_unit(j + 1)
        self.size, self.coupled, self.matvecs = j + 1, 2, self.matvecs + 1

    def ritz_pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        r"""Solve the projected problem.

        Returns:
            Ritz values, shape [size], vectors as columns in the coordinates of the basis, shape [size, size], and
            :math:`|A y - \theta y|` for each pair, shape [size].
        """
        values, coordinates = np.linalg.eigh(self.projected[: self.size, : self.size])
        self.scale = np.maximum(self.scale, np.abs(values).max())
        # Only the newest row is coupled to vectors outside the space.
        return values, coordinates, np.abs(self.projected[self.size, self.size - 1] * coordinates[-1])

    def restart(self, values: np.ndarray, coordinates: np.ndarray) -> None:
        """Restart from some pairs. Rows are combined in place, in pieces of columns to save memory."""
        size, count = self.size, len(values)
        coupling = self.projected[size, size - 1] * coordinates[-1]
        for start in range(0, self.basis.shape[1], 2**16):
            piece = self.basis[:, start : start + 2**16]
            piece[:count] = combined(piece[:size], coordinates)
        self.basis[count] = self.basis[size]
        self.projected[:] = 0.0
        self.projected[range(count), range(count)] = values
        self.projected[count, :count] = self.projected[:count, count] = coupling
        self.size, self.coupled = count, count + 1

    def _random_unit(self, size: int) -> Tensor:
        """Draw a direction orthogonal to the first rows, uniformly."""
        basis, generator = self.basis[:size], self.generator
        device = basis.device if generator is None else generator.device
        vector = torch.randn(1, basis.shape[1], dtype=basis.dtype, device=device, generator=generator)
        rest = orthogonalize(vector.to(basis.device), basis[None], near=size)[0]
        return rest[0] / safe_norm(rest[0])


def thick_restart_lanczos(
    operator: LinearMap,
    k: int,
    *,
    which: SpectrumEnd,
    rtol: float,
    max_matvecs: int,
    max_basis: int,
    generator: torch.Generator | None,
    scale: float = 0.0,
) -> Subspace:
    r"""Find k eigenvectors at an end of the spectrum, by the Lanczos method with thick restarts.

    The Krylov space of one random vector has only one direction in each eigenspace, so it shows a repeated eigenvalue
    once. ``scale`` is a lower bound of the norm, below which rounding errors are small.

    References:
        Wu, Simon, "Thick-restart Lanczos method for large symmetric eigenvalue problems", SIAM J. Matrix Anal.
        Appl. 22, 2000.
    """
    space = KrylovSpace(operator, max_basis, generator)
    space.scale[:] = scale
    every = max(1, max_basis // 16)  # each check solves a small dense problem
    while True:
        space.extend()
        exhausted, full = space.matvecs >= max_matvecs, space.size == max_basis
        if not exhausted and not full and (space.size < k or space.matvecs % every):
            continue
        values, coordinates, residuals = space.ritz_pairs()
        ranks, is_whole = ranking(values, which), space.size == operator.shape[0]
        converged = len(values) >= k and bool((residuals[ranks[:k]] <= rtol * space.scale).all())
        if is_whole or exhausted or (converged and max_basis < operator.shape[0]):
            break
        if full:
            kept = ranks[: min(k + (space.size - k) // 4, space.size - 1)]  # a quarter of all other pairs
            space.restart(values[kept], coordinates[:, kept])
    vectors = combined(space.basis[: space.size], coordinates[:, ranks[:k]])
    settled, scale = converged or is_whole, float(space.scale[0])
    return Subspace(values[ranks[:k]], vectors, scale, space.matvecs, settled, is_whole)


def ranking(values: np.ndarray, which: SpectrumEnd, bonus: np.ndarray | float = 0.0) -> np.ndarray:
    """Return indices from the most wanted to the least wanted value.

    For "both", the ends alternate, the largest first. ``bonus`` breaks near ties.
    """
    if which == "magnitude":
        return np.argsort(-np.abs(values) - bonus, kind="stable")
    down = np.argsort(-values - bonus, kind="stable")
    up = np.argsort(values - bonus, kind="stable")
    if which == "both":
        turns = np.stack([down, up], 1).flatten()  # the ends meet in the middle, so each index comes twice
        return np.array(list(dict.fromkeys(turns.tolist())))
    return down if which == "largest" else up


def combined(rows: Tensor, coordinates: np.ndarray) -> Tensor:
    """Return linear combinations of rows. Each column holds the coefficients of one combination."""
    return from_numpy(coordinates).t().to(rows) @ rows
