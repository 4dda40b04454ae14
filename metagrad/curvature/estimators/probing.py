"""The probes of one call and their products: drawn, multiplied, checked and counted, up to a budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.checks import is_a, is_integer
from metagrad.core.tree import widened
from metagrad.curvature.estimators.estimate import Estimate
from metagrad.curvature.estimators.probes import (
    Distribution,
    check_drawing,
    draw_for,
    piece_sizes,
    rows_in_chunk,
)
from metagrad.curvature.linear_map import FACTORISED, LinearMap, checked_products, checked_size

FIRST = 16  # products before the interval is first checked: the spread of fewer samples is unreliable
LEVEL = 0.95  # of the interval that rtol bounds
PROBES = 64  # the default
MOST_PROBES = 1024  # the default maximum where rtol decides


class Probing:
    """A linear map, and the random probes that are multiplied with it.

    Attributes:
        n: Size of the map.
        budget: How many products may be spent.
        rtol: At which relative error they end earlier.
        matvecs: How many products were made.
    """

    def __init__(
        self,
        call: str,
        operator: LinearMap,
        distribution: Distribution,
        generator: torch.Generator | None,
        chunk: str | int | float,
        budget: int = MOST_PROBES,
        rtol: float | None = None,
    ) -> None:
        check_drawing(call, distribution, generator)
        self.call = call
        self.operator = operator
        self.n: int = checked_size(call, operator)
        self.distribution: Distribution = distribution
        self.generator = generator
        # A probe, its product, what is made of both, and memory to join them.
        self.rows: int = rows_in_chunk(call, chunk, 4 * self.n, operator.dtype)
        self.budget = budget
        self.rtol = rtol
        self.matvecs: int = 0

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros in the dtype of the map, on its device."""
        return torch.zeros(shape, dtype=self.operator.dtype, device=self.operator.device)

    def draw(self, count: int) -> Tensor:
        """Draw the next probes, [count, n]."""
        return draw_for(self.operator, count, self.distribution, self.generator)

    def multiply(self, vectors: Tensor) -> Tensor:
        """Multiply rows; refuse products that are not finite or of another shape."""
        found = checked_products(self.call, self.operator, vectors)
        self.matvecs += len(vectors)
        return found

    def pieces(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw and multiply ``count`` probes, in the pieces of :func:`piece_sizes`."""
        for size in piece_sizes(self.operator, count, self.rows):
            probes = self.draw(size)
            yield probes, self.multiply(probes)

    def reduced(self, count: int, reduce: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return ``reduce`` of ``count`` probes and their products, joined along the first dimension."""
        return torch.cat([reduce(probes, widened(products)) for probes, products in self.pieces(count)])

    def rounding(self, norm: Tensor) -> Tensor:
        """Return the size of rounding errors in a trace, for a map of this Frobenius norm."""
        return torch.finfo(self.operator.dtype).eps * self.n**0.5 * norm.detach()


def check_probes(call: str, probes: object, least: int = 1) -> int:
    """Check a number of probes."""
    if not is_integer(probes):
        raise TypeError(f"{call}: probes must be an integer, got {probes!r}.")
    if probes < least:
        raise ValueError(f"{call}: probes must be at least {least}, got {probes}.")
    return probes


def check_factorised(call: str, method: str, dtype: torch.dtype) -> None:
    """Check that torch can factorise matrices of a dtype."""
    if dtype not in FACTORISED:
        raise TypeError(
            f'{call}: method="{method}" needs an orthonormal basis, which torch makes in float32 and float64, got '
            f'{dtype}. Take method="hutchinson", or an operator of another dtype.'
        )


class Estimator(Protocol):
    """An estimate that improves with every product; an estimator of the trace is found by its name."""

    name: ClassVar[str]
    least: ClassVar[int] = 1
    """The fewest products that it needs."""
    has_subspace: ClassVar[bool] = True
    """Whether probes are projected, so that the distribution on the sphere is the default."""

    def extend(self, products: int) -> None:
        """Spend so many more products, or fewer where more would add nothing."""
        ...

    def estimate(self) -> Estimate:
        """Estimate from all the products so far."""
        ...


def checked_budget(call: str, probes: int | None, rtol: float | None, least: int = 1) -> int:
    """Return how many products may be spent."""
    if rtol is not None:
        if isinstance(rtol, bool) or not is_a(rtol, int, float):
            raise TypeError(f"{call}: rtol must be a number or None, got {rtol!r}.")
        if not (math.isfinite(rtol) and rtol > 0):
            raise ValueError(f"{call}: rtol must be positive and finite, such as 0.02, got {rtol}.")
    if probes is None:
        return PROBES if rtol is None else MOST_PROBES
    return check_probes(call, probes, least)


def spend(estimator: Estimator, budget: int, rtol: float | None, least: int = 1) -> Estimate:
    """Spend the budget, or with ``rtol`` as much of it as is needed.

    Batches make the total 16, 24, 36, ...: each adds a half, so at most a third of the products were not needed, and
    the interval is checked only a few times, each a chance to stop too early. A batch has at least ``least``
    products.
    """
    if rtol is None:
        estimator.extend(budget)
        return estimator.estimate()
    estimate = None
    for batch in _batches(budget, least):
        estimator.extend(batch)
        estimate = estimator.estimate()
        if is_tight(estimate, rtol):
            return estimate
    assert estimate is not None
    return dataclasses.replace(estimate, converged=False)


def is_tight(estimate: Estimate, rtol: float) -> bool:
    """Return whether the half-width at 95 % is within rtol times the value, by Euclidean norms for vectors."""
    value = estimate.value.detach()
    half_width = estimate.interval(LEVEL)[1].detach() - value
    return bool(linalg.vector_norm(half_width) <= rtol * linalg.vector_norm(value))


def _batches(budget: int, least: int) -> Iterator[int]:
    """Yield batches that sum to the budget; a rest that is too small for a batch is added to the last."""
    spent = 0
    while spent < budget:
        batch = min(max(FIRST if not spent else spent // 2, least), budget - spent)
        if budget - spent - batch < least:
            batch = budget - spent
        yield batch
        spent += batch
