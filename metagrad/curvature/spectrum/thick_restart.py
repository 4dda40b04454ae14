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

    def __init__(
        self, operator: LinearMap, max_basis: int, generator: torch.Generator | None, call: str
    ) -> None:
        self.operator, self.generator, self.call = operator, generator, call
        shape = max_basis + 1, operator.shape[0]
        self.basis: Tensor = torch.zeros(shape, dtype=operator.dtype, device=operator.device)
        self.projected: np.ndarray = np.zeros((max_basis + 1, max_basis + 1))
        self.size, self.coupled, self.matvecs = 0, 1, 0
        self.scale: np.ndarray = np.zeros(1)
        self.basis[0] = self._random_unit(0)

    def extend(self) -> None:
        """Multiply the next vector. The next vector is the direction that the product adds to the space."""
        j, basis, projected = self.size, self.basis, self.projected
        images = shaped_products(self.call, self.operator, basis[j : j + 1].clone()).detach()
        norms, self.scale = lanczos_step(
            images, basis[None], projected[None], j, self.scale, coupled=self.coupled, call=self.call
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
        for piece in self.basis.split(2**16, dim=1):
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
    call: str,
) -> Subspace:
    r"""Find k eigenvectors at an end of the spectrum, by the Lanczos method with thick restarts.

    The Krylov space of one random vector has only one direction in each eigenspace, so it shows a repeated eigenvalue
    once.

    References:
        Wu, Simon, "Thick-restart Lanczos method for large symmetric eigenvalue problems", SIAM J. Matrix Anal.
        Appl. 22, 2000.
    """
    space = KrylovSpace(operator, max_basis, generator, call)
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
    """Return combinations of rows, given by the columns of their coordinates."""
    return from_numpy(coordinates).t().to(rows) @ rows
