"""The optimizers, as one table: adding an optimizer means adding a row, and every shared invariant holds for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metagrad.optim.shells.adahessian import AdaHessian
from metagrad.optim.shells.first_order import Lion, Muon, SparseAdagrad, SparseAdam
from metagrad.optim.shells.kronecker import SOAP, Shampoo
from metagrad.optim.shells.sophia import SophiaG, SophiaH


@dataclass(frozen=True)
class Case:
    """An optimizer, and settings at which it descends on the three problems."""

    make: type[torch.optim.Optimizer]
    quadratic: dict[str, Any]
    rosenbrock: dict[str, Any]
    network: dict[str, Any]
    negative: tuple[str, ...] = ("lr", "eps", "weight_decay")  # hyper-parameters refused below zero
    curvature: bool = False
    elementwise: bool = True  # takes parameters of any shape, and sparse gradients
    exact_over_micro_batches: bool = True  # the gradient and curvature of a batch are the sums of its parts'
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.make.__name__


SOPHIA = {"negative": ("lr", "gamma", "eps", "weight_decay"), "curvature": True}
CASES = [
    Case(
        AdaHessian,
        quadratic={"lr": 0.5},
        rosenbrock={"lr": 1.0},
        network={"lr": 0.1},
        negative=("lr", "eps", "weight_decay", "hessian_power"),
        curvature=True,
    ),
    Case(
        SophiaH,
        quadratic={"lr": 0.05, "curvature_every": 2},
        rosenbrock={"lr": 0.01, "curvature_every": 2},
        network={"lr": 0.02, "curvature_every": 3},
        **SOPHIA,
    ),
    Case(
        SophiaG,
        quadratic={"lr": 0.05, "curvature_every": 2},
        rosenbrock={"lr": 0.05, "curvature_every": 2},
        network={"lr": 0.02, "curvature_every": 3},
        exact_over_micro_batches=False,
        **SOPHIA,
    ),
    Case(Lion, {"lr": 0.05}, {"lr": 0.01}, {"lr": 0.01}, negative=("lr", "weight_decay")),
    Case(
        Muon,
        {"lr": 0.1, "weight_decay": 0.0},
        {"lr": 0.02, "weight_decay": 0.0},
        {"lr": 0.02},
        negative=("lr", "weight_decay", "momentum", "eps"),
        elementwise=False,
        options={"ns_dtype": None},
    ),
    Case(SparseAdam, {"lr": 0.05}, {"lr": 0.2}, {"lr": 0.02}, negative=("lr", "eps")),
    Case(SparseAdagrad, {"lr": 0.5}, {"lr": 1.0}, {"lr": 0.1}, negative=("lr", "eps", "lr_decay")),
    Case(
        Shampoo,
        {"lr": 0.3},
        {"lr": 0.1},
        {"lr": 0.1},
        negative=("lr", "momentum", "decay", "eps", "weight_decay", "graft_decay", "graft_eps"),
        elementwise=False,
        options={"root_every": 2},
    ),
    Case(
        SOAP,
        {"lr": 0.05, "weight_decay": 0.0},
        {"lr": 0.1},
        {"lr": 0.02},
        negative=("lr", "eps", "weight_decay", "shift"),
        elementwise=False,
        options={"basis_every": 2, "shift": 1e-2},
    ),
]

every = pytest.mark.parametrize("case", CASES, ids=str)
every_elementwise = pytest.mark.parametrize("case", [c for c in CASES if c.elementwise], ids=str)
every_with_curvature = pytest.mark.parametrize("case", [c for c in CASES if c.curvature], ids=str)


def quadratic(w: Tensor) -> Tensor:
    """A convex quadratic of condition number 25, as least squares; its minimum is 0, at 1."""
    scales = torch.tensor([[1.0, 5.0]], dtype=w.dtype)
    return F.mse_loss(scales * w, scales, reduction="sum")


def rosenbrock(w: Tensor) -> Tensor:
    """The banana, as least squares; its minimum is 0, at (1, 1)."""
    x, y = w.flatten()
    residuals = torch.stack([1 - x, 10 * (y - x**2)])
    return F.mse_loss(residuals, torch.zeros_like(residuals), reduction="sum")


class Network(nn.Module):
    """A classifier whose parameters are matrices, so that every optimizer takes it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False, dtype=dtype)
        self.second = nn.Linear(8, 3, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def network(dtype: torch.dtype = torch.float32) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network(dtype)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 4, generator=generator).to(dtype)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def classification(model: nn.Module, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    x, y = batch(dtype)
    return lambda: F.cross_entropy(model(x), y)


def closure_of(opt: torch.optim.Optimizer, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Write the closure that everybody writes."""

    def closure() -> Tensor:
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    return closure


def run(opt: torch.optim.Optimizer, loss_of: Callable[[], Tensor], steps: int) -> list[float]:
    """Take steps by a closure, and return the losses before each."""
    return [float(opt.step(closure_of(opt, loss_of))) for _ in range(steps)]


def optimizer(case: Case, params: Any, **options: Any) -> Any:
    return case.make(params, **{**case.options, **case.network, **options})


def snapshot(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
