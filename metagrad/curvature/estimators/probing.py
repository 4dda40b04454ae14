"""The probes of one call and their products: drawn, multiplied, checked and counted, up to a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.checks import check_choice, check_count, check_positive, check_type
from metagrad.core.tree import widened
from metagrad.curvature.estimators.estimate import Estimate
from metagrad.curvature.estimators.probes import (
    Distribution,
    draw_for,
    piece_sizes,
    rows_in_chunk,
)
from metagrad.curvature.linear_map import LinearMap, checked_products, checked_size

FIRST = 16  # products before the interval is first checked, because the spread of fewer samples is unreliable
LEVEL = 0.95  # confidence level of the interval that rtol bounds
PROBES = 64  # default number of products
MOST_PROBES = 1024  # default maximum number of products if rtol is given


class ProbeSampler:
    """A linear map and the random probes that are multiplied with it.

    Attributes:
        n: Size of the map.
        budget: Maximum number of products.
        rtol: Relative error that ends the products earlier. None if the whole budget is spent.
        matvecs: Number of products so far.
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
        check_choice(f"{call}: distribution", distribution, Distribution)
        check_type(f"{call}: generator", generator, torch.Generator, optional=True)
        self.call = call
        self.operator = operator
        self.n: int = checked_size(call, operator)
        self.distribution: Distribution = distribution
        self.generator = generator
        # A probe, its product, the result of both, and memory to join them.
        self.rows: int = rows_in_chunk(call, chunk, 4 * self.n, operator.dtype)
        self.budget = budget
        self.rtol = rtol
        self.matvecs: int = 0

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros in the dtype and on the device of the map."""
        return torch.zeros(shape, dtype=self.operator.dtype, device=self.operator.device)

    def draw(self, count: int) -> Tensor:
        """Draw the next probes, [count, n]."""
        return draw_for(self.operator, count, self.distribution, self.generator)

    def multiply(self, vectors: Tensor) -> Tensor:
        """Multiply rows. Raise ``ValueError`` if products are not finite or have another shape."""
        found = checked_products(self.call, self.operator, vectors)
        self.matvecs += len(vectors)
        return found

    def pieces(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw and multiply ``count`` probes, in the pieces of :func:`piece_sizes`."""
        for size in piece_sizes(self.operator, count, self.rows):
            probes = self.draw(size)
            yield probes, self.multiply(probes)

    def reduced(self, count: int, reduce: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Apply ``reduce`` to pieces of ``count`` probes and their products, and concatenate the results."""
        return torch.cat([reduce(probes, widened(products)) for probes, products in self.pieces(count)])

    def rounding(self, norm: Tensor) -> Tensor:
        """Return the size of rounding errors in a trace, given the Frobenius norm of the map."""
        return torch.finfo(self.operator.dtype).eps * self.n**0.5 * norm.detach()


class Estimator(Protocol):
    """An estimate that improves with every product."""

    name: ClassVar[str]
    least: ClassVar[int] = 1
    """Minimum number of products."""
    has_subspace: ClassVar[bool] = True
    """Whether probes are projected, so that the sphere is the default distribution."""

    def extend(self, products: int) -> None:
        """Spend ``products`` more products, or fewer if further products add no information."""
        ...

    def estimate(self) -> Estimate:
        """Estimate from all products so far."""
        ...


def checked_budget(call: str, probes: int | None, rtol: float | None, least: int = 1) -> int:
    """Return the maximum number of products."""
    check_positive(f"{call}: rtol", rtol, optional=True)
    check_count(f"{call}: probes", probes, least, optional=True)
    if probes is not None:
        return probes
    return PROBES if rtol is None else MOST_PROBES


def spend(estimator: Estimator, budget: int, rtol: float | None, least: int = 1) -> Estimate:
    """Spend the budget, or with ``rtol`` as much of it as is needed.

    Batches make the total 16, 24, 36, ... Each batch grows the total by half, so at most a third of the
    products are unnecessary. The interval is checked only a few times, because each check is a chance to stop
    too early. A batch has at least ``least`` products.
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
    """Return whether the half-width at 95 % is within rtol times the value, by Euclidean norms."""
    value = estimate.value.detach()
    half_width = estimate.interval(LEVEL)[1].detach() - value
    return bool(linalg.vector_norm(half_width) <= rtol * linalg.vector_norm(value))


def _batches(budget: int, least: int) -> Iterator[int]:
    """Yield batches that sum to the budget.

    The last batch includes a remainder that is too small for its own batch.
    """
    spent = 0
    while spent < budget:
        batch = min(max(FIRST if not spent else spent // 2, least), budget - spent)
        if budget - spent - batch < least:
            batch = budget - spent
        yield batch
        spent += batch
