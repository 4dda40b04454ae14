"""The losses that Newton's method and its relatives are tested on."""

from __future__ import annotations

import torch
from torch import Tensor

A = torch.tensor([[3.0, 1.0, 0.5], [1.0, 2.0, -0.3], [0.5, -0.3, 1.5]], dtype=torch.float64)
B = torch.tensor([1.0, -2.0, 0.7], dtype=torch.float64)
C = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
START = torch.tensor([1.0, -2.0, 0.7], dtype=torch.float64)
I3 = torch.eye(3, dtype=torch.float64)


def quartic(w: Tensor) -> Tensor:
    """w A w / 2 - b w + sum c w^4 / 12, of three parameters in the last dimension."""
    return ((w @ A) * w).sum(-1) / 2 - (B * w).sum(-1) + (C * w**4).sum(-1) / 12


def quartic_gradient(w: Tensor) -> Tensor:
    return A @ w - B + C * w**3 / 3


def quartic_hessian(w: Tensor) -> Tensor:
    return A + torch.diag(C * w**2)


def rosenbrock(w: Tensor) -> Tensor:
    """More, Garbow, Hillstrom, problem 21. In two dimensions it is Rosenbrock's."""
    x, y = w[::2], w[1::2]
    return (100 * (y - x**2) ** 2 + (1 - x) ** 2).sum()


def classic_start(n: int) -> Tensor:
    return torch.tensor([-1.2, 1.0] * (n // 2), dtype=torch.float64)


def fit_data() -> tuple[Tensor, Tensor]:
    """Points of 2 exp(-1.3 x) + 0.5, with noise."""
    x = torch.linspace(0, 3, 20, dtype=torch.float64)
    noise = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, 2 * torch.exp(-1.3 * x) + 0.5 + 0.05 * noise


def fit_residuals(w: Tensor) -> Tensor:
    x, y = fit_data()
    return w[..., :1] * torch.exp(w[..., 1:2] * x) + w[..., 2:] - y


def logistic_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(60, generator=generator, dtype=torch.float64)
    return x, (x @ B + noise > 0).double()
