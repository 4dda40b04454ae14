"""Measurements of the machine: where dense products overtake sparse ones, and how fast dense ones are."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from metagrad.sparse.kernels import numbers as kernels
from metagrad.sparse.matrix.pattern import Pattern
from metagrad.sparse.policies.policy import WIDE, SparsePolicy, use_policy

SIZES = (256, 512, 1024)
LEAST_DENSITY = 1 / 512
BISECTIONS = 5  # of a range of 512 on a logarithmic scale: to 20 %
REPEATS = 5

SPARSE = SparsePolicy(threshold=math.inf)
DENSE = SparsePolicy(threshold=0.0, min_nnz=0)


def crossover(device: torch.device, dtype: torch.dtype) -> float:
    """Return the density from which products of width ``WIDE`` are faster when dense."""
    return statistics.median(_crossover(size, device, dtype) for size in SIZES)


@lru_cache
def dense_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the multiplications a second of a dense product of two 512 x 512 matrices."""
    matrix = torch.ones(512, 512, device=device, dtype=dtype)
    return 512**3 / _seconds(lambda: matrix @ matrix)


def clock() -> float:
    """Return the seconds now, after the work that CUDA was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


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
        kernels.matmul(pattern, values, dense)
        kernels.sample(pattern, dense, dense)

    with use_policy(policy):
        return _seconds(run)


def _seconds(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        start = clock()
        run()
        times.append(clock() - start)
    return statistics.median(times)
