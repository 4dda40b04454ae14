"""Generators, and tensors of normal random numbers. The same shape and seed give the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw in float64, then convert."""
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return draw(*shape, seed=seed, dtype=dtype).requires_grad_()


def randn(*shape: int) -> Tensor:
    """Draw in float64 from torch's own generator."""
    return torch.randn(shape, dtype=torch.float64)
