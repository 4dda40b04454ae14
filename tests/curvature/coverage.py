"""How often intervals cover, and how far estimates are off."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from metagrad.curvature.estimators.estimate import Estimate


def coverage(
    estimate: Callable[[torch.Generator], Estimate], truth: Tensor, repeats: int, level: float = 0.9
) -> float:
    """The share of intervals, over repeats and elements, that hold the truth."""
    held = []
    for seed in range(repeats):
        low, high = estimate(torch.Generator().manual_seed(seed)).interval(level)
        held.append(((low <= truth) & (truth <= high)).double().mean())
    return torch.stack(held).mean().item()


def covers(
    estimate: Callable[[torch.Generator], Estimate], truth: Tensor, repeats: int, level: float = 0.9
) -> bool:
    """Whether independent intervals hold a number as often as they say, within four standard errors."""
    least = level - 4 * math.sqrt(level * (1 - level) / repeats)
    return least <= coverage(estimate, truth, repeats, level) < 1


def median_error(estimate: Callable[[torch.Generator], Estimate], truth: Tensor, repeats: int) -> float:
    """The median over repeats of the relative error."""
    values = torch.stack([estimate(torch.Generator().manual_seed(seed)).value for seed in range(repeats)])
    return ((values - truth) / truth).abs().median().item()
