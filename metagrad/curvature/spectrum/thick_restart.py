"""Thick-restart Lanczos: a few eigenvectors in bounded memory, and a search for copies of repeated eigenvalues."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.curvature.linear_map import LinearMap
from metagrad.curvature.rows import scaled_norm
from metagrad.curvature.spectrum.lanczos import lanczos_step, orthogonalize

SpectrumEnd = Literal["largest", "smallest", "both", "magnitude"]

MISS = 0.01
"""Approximate probability that a copy of a repeated eigenvalue is missed because of an unlucky start vector."""


class KrylovSpace(NamedTuple):
    """A space that grows by one product at a time, and the operator in it.

    Attributes:
        basis: Orthonormal rows, shape [capacity + 1, n]: ``size`` rows, and the vector to multiply next.
        projected: The operator in the first ``size`` rows, float64 on the CPU, shape [capacity + 1, capacity + 1].
            Row ``size`` couples the next vector to the space.
        size: Number of rows that were multiplied.
        locked: Number of leading rows that are locked Ritz vectors. They do not change, and the other rows are
            orthogonal to them. The wanted pairs, which have converged, come first.
        coupled: Number of trailing rows that the operator couples to the next vector, including the vector itself.
        scale: Largest norm of a product or Ritz value so far, a lower bound of the operator's norm.
        steps: Number of products since the last random start vector.
        matvecs: Total number of products.
    """

    basis: Tensor
    projected: Tensor
    size: int
    locked: int
    coupled: int
    scale: float
    steps: int
    matvecs: int


class Subspace(NamedTuple):
    """Approximate eigenvectors, without their residuals.

    Attributes:
        vectors: Approximately orthonormal rows, shape [k, n]. Constants.
        scale: A lower bound of the operator's norm, as in :class:`KrylovSpace`.
        matvecs: Number of products.
        settled: False if the budget ended the search.
    """

    vectors: Tensor
    scale: float
    matvecs: int
    settled: bool


class RitzPairs(NamedTuple):
    r"""Approximate eigenpairs in a :class:`KrylovSpace`. Locked pairs come first.

    Attributes:
        values: Shape [size].
        coordinates: The vectors, columns in the coordinates of the basis, shape [size, size].
        residuals: :math:`|A y - \theta y|` for each pair, shape [size].
    """

    values: Tensor
    coordinates: Tensor
    residuals: Tensor


def thick_restart_lanczos(
    operator: LinearMap,
    k: int,
    *,
    which: SpectrumEnd,
    rtol: float,
    max_matvecs: int,
    max_basis: int,
    copies: bool,
    generator: torch.Generator | None,
    call: str,
) -> Subspace:
    r"""Find k eigenvectors at an end of the spectrum, by the Lanczos method with thick restarts.

    The Krylov space of one random vector has only one direction in each eigenspace, so it shows a repeated eigenvalue
    once. When the wanted pairs have converged they are locked. The search then continues from a new random vector
    orthogonal to them. Directions that the first vector missed are orthogonal to all Ritz vectors. Therefore the next
    pairs are also locked, up to half of the basis. The spectrum that remains is smaller, so its end takes fewer
    products to see. These pairs are unlocked if a copy is found.

    The search ends when the new vector would have shown a missed eigenvector. Suppose its component along one with a
    wanted eigenvalue :math:`\lambda` is :math:`\delta / \sqrt{n}`. After j steps, the largest Ritz value
    :math:`\theta` would satisfy

    .. math:: \lambda - \theta \le (\lambda - \lambda_{\min})
        \Big( \frac{\sqrt{n} / \delta}{T_{j-1}(1 + 2 \gamma)} \Big)^2,
        \quad \gamma = \frac{\lambda - \theta}{\theta - \lambda_{\min}}

    (T: Chebyshev polynomials). The search ends when it does not. Without ``copies`` there is no search.

    References:
        Wu, Simon, "Thick-restart Lanczos method for large symmetric eigenvalue problems", SIAM J. Matrix Anal.
        Appl. 22, 2000; Saad, "Numerical methods for large eigenvalue problems", 2011, section 6.6 (the bound).
    """
    space = _start(operator, max_basis, generator)
    found = False
    every = max(1, max_basis // 16)  # a small dense problem is solved each time
    while True:
        space = _extend(operator, space, generator, call)
        exhausted, full = space.matvecs >= max_matvecs, space.size == max_basis
        if not exhausted and not full and (space.size < k or space.steps % every):
            continue
        pairs = ritz_pairs(space)
        space = space._replace(scale=max(space.scale, float(pairs.values.abs().max())))
        tolerance = rtol * space.scale
        ranks = ranking(pairs.values, which, tolerance * (torch.arange(space.size) < min(space.locked, k)))
        wanted = ranks[:k]
        # Two converged copies that were locked separately may double each other's residual.
        residual = tolerance / 2 if copies else tolerance
        converged = len(wanted) == k and bool((pairs.residuals[wanted] <= residual).all())
        locked = converged and bool((wanted < space.locked).all())
        settled = nothing_missed(space, pairs, k, which, tolerance) if copies and locked else False
        settled = settled or (converged and not copies) or space.size == operator.shape[0]
        if settled or exhausted:
            break
        if space.locked > k and not bool((wanted < k).all()):
            found, space = True, _lock(space, pairs, torch.arange(k), generator)
        elif converged and not locked:
            # If the basis may become the whole space, the projection on it has to stay exact.
            more = 0 if found or max_basis >= operator.shape[0] else max_basis // 2 - k
            space = _lock(space, pairs, ranks[: k + max(more, 0)], generator)
        elif full:
            space = _restart(space, pairs, ranks, k)
    vectors = _combine(space.basis[: space.size], pairs.coordinates[:, wanted])
    return Subspace(vectors, space.scale, space.matvecs, settled)


def ranking(values: Tensor, which: SpectrumEnd, bonus: Tensor | float = 0.0) -> Tensor:
    """Return indices from the most wanted to the least wanted value.

    For "both", the ends alternate, the largest first. ``bonus`` breaks near ties.
    """
    if which == "magnitude":
        return torch.argsort(values.abs() + bonus, descending=True, stable=True)
    down = torch.argsort(values + bonus, descending=True, stable=True)
    up = torch.argsort(values - bonus, stable=True)
    if which == "both":
        turns = torch.stack([down, up], 1).flatten()  # the ends meet in the middle, so each index comes twice
        return torch.tensor(list(dict.fromkeys(turns.tolist())), dtype=torch.long)
    return down if which == "largest" else up


def ritz_pairs(space: KrylovSpace) -> RitzPairs:
    """Solve the projected problem."""
    locked, size = space.locked, space.size
    values = space.projected.diagonal()[:size].clone()
    coordinates = torch.eye(size, dtype=torch.float64)
    values[locked:], coordinates[locked:, locked:] = linalg.eigh(space.projected[locked:size, locked:size])
    # Only the newest row, which is never locked, is coupled to vectors outside the space.
    residuals = (space.projected[size, size - 1] * coordinates[-1]).abs()
    return RitzPairs(values, coordinates, residuals)


def nothing_missed(
    space: KrylovSpace, pairs: RitzPairs, k: int, which: SpectrumEnd, tolerance: float
) -> bool:
    """Return whether the search in addition to the k wanted pairs would have shown another wanted one."""
    locked, others = pairs.values[:k], pairs.values[space.locked :]
    residuals = pairs.residuals[space.locked :]
    return others.numel() > 0 and all(
        _end_is_seen(space, sign * others, residuals, threshold, tolerance)
        for sign, threshold in _wanted_ends(locked, which)
    )


def _wanted_ends(wanted: Tensor, which: SpectrumEnd) -> list[tuple[int, float]]:
    """Return the wanted ends of the spectrum as pairs (sign, threshold): sign * eigenvalue is above the threshold."""
    if which == "magnitude":
        return [(sign, float(wanted.abs().min())) for sign in (1, -1)]
    ordered = wanted[ranking(wanted, which)]
    top, bottom = {
        "largest": (ordered, ordered[:0]),
        "smallest": (ordered[:0], ordered),
        "both": (ordered[0::2], ordered[1::2]),
    }[which]
    return [(sign, float((sign * end).min())) for sign, end in ((1, top), (-1, bottom)) if len(end)]


def _end_is_seen(
    space: KrylovSpace, values: Tensor, residuals: Tensor, threshold: float, tolerance: float
) -> bool:
    largest, smallest = int(values.argmax()), int(values.argmin())
    rest = float(residuals[largest])
    # One product of a large operator may be small although a vector was missed. Two more products would show it.
    if rest == 0 or (rest <= tolerance and space.steps > 2):
        return float(values[largest]) <= threshold + tolerance
    edge = float(values[largest]) + rest
    floor = float(values[smallest] - residuals[smallest])
    gap = threshold - edge
    if gap <= 0:
        return False
    amplification = (space.steps - 1) * math.acosh(1 + 2 * gap / (edge - floor)) - math.log(2)
    component = 0.5 * math.log(space.basis.shape[1]) - math.log(MISS)
    return math.log(threshold - floor) + 2 * (component - amplification) < math.log(gap)


def _start(operator: LinearMap, max_basis: int, generator: torch.Generator | None) -> KrylovSpace:
    basis = torch.zeros(max_basis + 1, operator.shape[0], dtype=operator.dtype, device=operator.device)
    basis[0] = random_unit(basis[:0], generator)
    projected = torch.zeros(max_basis + 1, max_basis + 1, dtype=torch.float64)
    return KrylovSpace(basis, projected, size=0, locked=0, coupled=1, scale=0.0, steps=0, matvecs=0)


def random_unit(basis: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw a direction orthogonal to orthonormal rows, uniformly."""
    device = basis.device if generator is None else generator.device
    vector = torch.randn(basis.shape[1], dtype=basis.dtype, device=device, generator=generator)
    vectors = orthogonalize(vector.to(basis.device)[None], basis[None], near=len(basis))[0]
    return (vectors / scaled_norm(vectors))[0]


def _extend(
    operator: LinearMap, space: KrylovSpace, generator: torch.Generator | None, call: str
) -> KrylovSpace:
    """Multiply the next vector. The direction that the product adds to the space is the vector after it."""
    basis, projected, j = space.basis, space.projected, space.size
    scale = torch.tensor([space.scale], dtype=torch.float64)
    step = lanczos_step(
        operator, basis[None], projected[None], j, [0], scale,
        locked=space.locked, coupled=space.coupled, call=call,
    )  # fmt: skip
    basis[j + 1] = step.directions[0]
    if j + 1 == basis.shape[1]:  # the whole space
        projected[j, j + 1] = projected[j + 1, j] = 0.0
    elif not float(step.norms):
        basis[j + 1] = random_unit(basis[: j + 1], generator)
    return space._replace(
        size=j + 1, coupled=2, scale=float(step.scales), steps=space.steps + 1, matvecs=space.matvecs + 1
    )


def _restart(space: KrylovSpace, pairs: RitzPairs, ranks: Tensor, k: int) -> KrylovSpace:
    """Restart from the locked pairs, the wanted pairs, and a quarter of all other pairs."""
    locked, size = space.locked, space.size
    candidates = ranks[ranks >= locked]
    needed = max(k - locked, 1)
    keep = candidates[: min(needed + (len(candidates) - needed) // 4, len(candidates) - 1)]
    kept = torch.cat([torch.arange(locked), keep])
    coupling = space.projected[size, size - 1] * pairs.coordinates[-1, kept]
    _rotate(space.basis, pairs.coordinates[:, kept])
    space.basis[len(kept)] = space.basis[size]
    _project(space, pairs.values[kept])
    space.projected[len(kept), locked : len(kept)] = coupling[locked:]
    space.projected[locked : len(kept), len(kept)] = coupling[locked:]
    return space._replace(size=len(kept), coupled=len(kept) - locked + 1)


def _lock(
    space: KrylovSpace, pairs: RitzPairs, keep: Tensor, generator: torch.Generator | None
) -> KrylovSpace:
    """Lock some pairs, the wanted ones first, and continue from a new random vector."""
    _rotate(space.basis, pairs.coordinates[:, keep])
    _project(space, pairs.values[keep])
    k = len(keep)
    space.basis[k] = random_unit(space.basis[:k], generator)
    return space._replace(size=k, locked=k, coupled=1, steps=0)


def _project(space: KrylovSpace, values: Tensor) -> None:
    space.projected.zero_()
    space.projected.diagonal()[: len(values)] = values


def _rotate(basis: Tensor, coordinates: Tensor) -> None:
    """Replace the first rows by combinations of rows, in place and in pieces of columns to save memory."""
    size, kept = coordinates.shape
    for piece in basis.split(2**16, dim=1):
        piece[:kept] = _combine(piece[:size], coordinates)


def _combine(rows: Tensor, coordinates: Tensor) -> Tensor:
    return coordinates.t().to(rows) @ rows
