"""Thick-restart Lanczos: a few eigenvectors in bounded memory."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metagrad.core._torch import from_numpy
from metagrad.curvature.linear_map import LinearMap, shaped_products
from metagrad.curvature.rows import safe_norm
from metagrad.curvature.spectrum.lanczos import lanczos_step, orthogonalize

SpectrumEnd = Literal["largest", "smallest", "both", "magnitude"]


class KrylovSpace(NamedTuple):
    """A space that grows by one product at a time, and the operator in it.

    Attributes:
        basis: Orthonormal rows, shape [capacity + 1, n]: ``size`` rows, and the vector to multiply next.
        projected: The operator in the first ``size`` rows, float64, shape [capacity + 1, capacity + 1].
            Row ``size`` couples the next vector to the space.
        size: Number of rows that were multiplied.
        coupled: Number of trailing rows that the operator couples to the next vector, including the vector itself.
        scale: Largest norm of a product or Ritz value so far, a lower bound of the operator's norm.
        matvecs: Total number of products.
    """

    basis: Tensor
    projected: np.ndarray
    size: int
    coupled: int
    scale: float
    matvecs: int


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


class RitzPairs(NamedTuple):
    r"""Approximate eigenpairs in a :class:`KrylovSpace`.

    Attributes:
        values: Shape [size].
        coordinates: The vectors, columns in the coordinates of the basis, shape [size, size].
        residuals: :math:`|A y - \theta y|` for each pair, shape [size].
    """

    values: np.ndarray
    coordinates: np.ndarray
    residuals: np.ndarray


def thick_restart_lanczos(
    operator: LinearMap,
    k: int,
    *,
    which: SpectrumEnd,
    rtol: float,
    max_matvecs: int,
    max_basis: int,
    generator: torch.Generator | None,
    call: str,
) -> Subspace:
    r"""Find k eigenvectors at an end of the spectrum, by the Lanczos method with thick restarts.

    The Krylov space of one random vector has only one direction in each eigenspace, so it shows a repeated eigenvalue
    once.

    References:
        Wu, Simon, "Thick-restart Lanczos method for large symmetric eigenvalue problems", SIAM J. Matrix Anal.
        Appl. 22, 2000.
    """
    space = _start(operator, max_basis, generator)
    every = max(1, max_basis // 16)  # each check solves a small dense problem
    while True:
        space = _extend(operator, space, generator, call)
        exhausted, full = space.matvecs >= max_matvecs, space.size == max_basis
        if not exhausted and not full and (space.size < k or space.matvecs % every):
            continue
        pairs = ritz_pairs(space)
        space = space._replace(scale=max(space.scale, float(np.abs(pairs.values).max())))
        ranks = ranking(pairs.values, which)
        wanted, is_whole = ranks[:k], space.size == operator.shape[0]
        converged = len(wanted) == k and bool((pairs.residuals[wanted] <= rtol * space.scale).all())
        if is_whole or exhausted or (converged and max_basis < operator.shape[0]):
            break
        if full:
            space = _restart(space, pairs, ranks, k)
    vectors = _combine(space.basis[: space.size], pairs.coordinates[:, wanted])
    settled = converged or is_whole
    return Subspace(pairs.values[wanted], vectors, space.scale, space.matvecs, settled, is_whole)


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


def ritz_pairs(space: KrylovSpace) -> RitzPairs:
    """Solve the projected problem."""
    values, coordinates = np.linalg.eigh(space.projected[: space.size, : space.size])
    # Only the newest row is coupled to vectors outside the space.
    residuals = np.abs(space.projected[space.size, space.size - 1] * coordinates[-1])
    return RitzPairs(values, coordinates, residuals)


def _start(operator: LinearMap, max_basis: int, generator: torch.Generator | None) -> KrylovSpace:
    basis = torch.zeros(max_basis + 1, operator.shape[0], dtype=operator.dtype, device=operator.device)
    basis[0] = random_unit(basis[:0], generator)
    projected = np.zeros((max_basis + 1, max_basis + 1))
    return KrylovSpace(basis, projected, size=0, coupled=1, scale=0.0, matvecs=0)


def random_unit(basis: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw a direction orthogonal to orthonormal rows, uniformly."""
    device = basis.device if generator is None else generator.device
    vector = torch.randn(basis.shape[1], dtype=basis.dtype, device=device, generator=generator)
    vectors = orthogonalize(vector.to(basis.device)[None], basis[None], near=len(basis))[0]
    return (vectors / safe_norm(vectors))[0]


def _extend(
    operator: LinearMap, space: KrylovSpace, generator: torch.Generator | None, call: str
) -> KrylovSpace:
    """Multiply the next vector. The next vector is the direction that the product adds to the space."""
    basis, j = space.basis, space.size
    images = shaped_products(call, operator, basis[j : j + 1].clone()).detach()
    norms, scales = lanczos_step(
        images,
        basis[None],
        space.projected[None],
        j,
        np.array([space.scale]),
        coupled=space.coupled,
        call=call,
    )
    if j + 1 == basis.shape[1]:  # the whole space
        space.projected[j, j + 1] = space.projected[j + 1, j] = 0.0
    elif not norms[0]:
        basis[j + 1] = random_unit(basis[: j + 1], generator)
    return space._replace(size=j + 1, coupled=2, scale=float(scales[0]), matvecs=space.matvecs + 1)


def _restart(space: KrylovSpace, pairs: RitzPairs, ranks: np.ndarray, k: int) -> KrylovSpace:
    """Restart from the wanted pairs and a quarter of all other pairs."""
    size = space.size
    kept = ranks[: min(k + (size - k) // 4, size - 1)]
    count = len(kept)
    coupling = space.projected[size, size - 1] * pairs.coordinates[-1, kept]
    _rotate(space.basis, pairs.coordinates[:, kept])
    space.basis[count] = space.basis[size]
    space.projected[:] = 0.0
    space.projected[range(count), range(count)] = pairs.values[kept]
    space.projected[count, :count] = space.projected[:count, count] = coupling
    return space._replace(size=count, coupled=count + 1)


def _rotate(basis: Tensor, coordinates: np.ndarray) -> None:
    """Replace the first rows by combinations of rows, in place and in pieces of columns to save memory."""
    size, kept = coordinates.shape
    for piece in basis.split(2**16, dim=1):
        piece[:kept] = _combine(piece[:size], coordinates)


def _combine(rows: Tensor, coordinates: np.ndarray) -> Tensor:
    return from_numpy(coordinates).t().to(rows) @ rows
