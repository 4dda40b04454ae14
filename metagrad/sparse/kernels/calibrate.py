"""Measure the density above which dense products are faster than sparse products on this machine."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

from metagrad.sparse.kernels import products
from metagrad.sparse.pattern import Pattern
from metagrad.sparse.policy import WIDE, SparsePolicy, seconds, use_policy

SIZES = (256, 512, 1024)
LEAST_DENSITY = 1 / 512
BISECTIONS = 5  # of the logarithm of the density, which gives it to 20 %

SPARSE = SparsePolicy(threshold=math.inf)
DENSE = SparsePolicy(threshold=0.0, min_nnz=0)


def calibrate(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> SparsePolicy:
    """Measure the density above which dense products are faster on a device. This takes about a second.

    A gradient consists of products and sampled products. Both are timed with random matrices of three sizes and with
    width 32. Bisection finds the density where both take equally long. The threshold is
    the median over the three sizes.

    Args:
        device: Device to measure on.
        dtype: Data type of the values.

    Returns:
        A policy with this threshold. Its other settings are the defaults. The threshold is ``math.inf`` if
        dense is never faster.

    Example:
        >>> policy = metagrad.sparse.calibrate()
        >>> policy.threshold > 0
        True
    """
    device = torch.device(device)
    return SparsePolicy(threshold=statistics.median(_crossover(size, device, dtype) for size in SIZES))


def _crossover(size: int, device: torch.device, dtype: torch.dtype) -> float:
    if not _dense_wins(size, 1.0, device, dtype):
        return math.inf
    low, high = math.log(LEAST_DENSITY), 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _dense_wins(size, math.exp(middle), device, dtype) else (middle, high)
    return math.exp(high)


def _dense_wins(size: int, density: float, device: torch.device, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    pattern = Pattern.from_mask((torch.rand(size, size, generator=generator) < density).to(device))
    values = torch.ones(pattern.nnz, device=device, dtype=dtype)
    dense = torch.ones(size, WIDE, device=device, dtype=dtype)
    return _both(pattern, values, dense, DENSE) < _both(pattern, values, dense, SPARSE)


def _both(pattern: Pattern, values: Tensor, dense: Tensor, policy: SparsePolicy) -> float:
    """Time what one gradient takes: a product and a sampled product."""

    def run() -> None:
        products.matmul(pattern, values, dense)
        products.sample(pattern, dense, dense)

    with use_policy(policy):
        return seconds(run)
