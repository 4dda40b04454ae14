"""Spending a budget of products: at once, or in growing batches until the interval is tight enough."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Protocol

import torch

from metagrad.curvature.estimators.estimate import Estimate
from metagrad.curvature.estimators.probing import check_probes

FIRST = 16  # products before the first look at the interval: fewer samples know little of their own spread
LEVEL = 0.95  # of the interval that rtol bounds
PROBES = 64  # the default
MOST_PROBES = 1024  # the default maximum where rtol decides


class Estimator(Protocol):
    """An estimate that gets better with every product."""

    def extend(self, products: int) -> None:
        """Spend so many more products, or fewer where more would add nothing."""
        ...

    def estimate(self) -> Estimate:
        """Estimate from all the products so far."""
        ...


def checked_budget(call: str, probes: int | None, rtol: float | None, least: int = 1) -> int:
    """Return how many products may be spent."""
    if rtol is not None:
        if isinstance(rtol, bool) or not isinstance(rtol, (int, float)):
            raise TypeError(f"{call}: rtol must be a number or None, got {rtol!r}.")
        if not (math.isfinite(rtol) and rtol > 0):
            raise ValueError(f"{call}: rtol must be positive and finite, such as 0.02, got {rtol}.")
    if probes is None:
        return PROBES if rtol is None else MOST_PROBES
    return check_probes(call, probes, least)


def spend(estimator: Estimator, budget: int, rtol: float | None, least: int = 1) -> Estimate:
    """Spend the budget, or with ``rtol`` as much of it as is needed.

    Batches make the total 16, 24, 36, ...: each adds a half, so at most a third of the products were not needed, and
    few looks at the interval were chances to stop too early. ``least`` products are the least of a batch.
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
    """Say whether the half-width at 95 % is within rtol times the value; by Euclidean norms, where it is a vector."""
    value = estimate.value.detach()
    half_width = estimate.interval(LEVEL)[1].detach() - value
    return bool(torch.linalg.vector_norm(half_width) <= rtol * torch.linalg.vector_norm(value))


def _batches(budget: int, least: int) -> Iterator[int]:
    """Yield batches that sum to the budget; the last takes what is too little for one of its own."""
    spent = 0
    while spent < budget:
        batch = min(max(FIRST if not spent else spent // 2, least), budget - spent)
        if budget - spent - batch < least:
            batch = budget - spent
        yield batch
        spent += batch
