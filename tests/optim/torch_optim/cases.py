"""The table of optimizers. A new optimizer needs a new row, and the shared tests check it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metagrad.optim import (
    KFAC,
    LBFGS,
    SOAP,
    AdaHessian,
    GaussNewton,
    Lion,
    Muon,
    NewtonCG,
    Shampoo,
    SophiaG,
    SophiaH,
    SparseAdam,
)

Trait = Literal[
    "sparse",  # supports row-sparse gradients of tables. Other optimizers raise an error
    "matrices",  # supports only matrices, and raises an error for other parameters
    "model",  # takes a model and hooks its layers, with a warning for unsupported modules
    "backward",  # has `opt.backward(loss)` and `opt.recording()`, which see the graph of the loss
    "told",  # needs one of these without a closure. A step after `loss.backward()` raises an error
    "known loss",  # needs a loss of known form, computed in a closure or within `opt.recording()`
    "drawn labels",  # samples labels for each backward pass, so micro-batches have another curvature
    "twice",  # uses second derivatives, and raises an error if the graph has wrong ones
    "seed",  # draws random numbers of its own
    "calls again",  # as torch.optim.LBFGS does: closures return the loss, and write the gradients of others again
    "one vector",  # a group has one dtype. A parameter that joins later resets the group
]


@dataclass(frozen=True)
class Case:
    """An optimizer with its traits, and its settings for a network."""

    make: type[Any]
    traits: frozenset[Trait]
    network: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)  # in all settings
    by_hand: dict[str, Any] = field(default_factory=dict)  # needed for steps without a closure
    variant: str = ""
    like: str = ""  # the row of the same loops and states, which stands for this one

    @property
    def name(self) -> str:
        return self.make.__name__

    def __str__(self) -> str:
        return self.name + self.variant

    def of(
        self, model: nn.Module, params: Iterable[Any] | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """Make the optimizer for a model, or for some parameters or groups of it, with no settings but these."""
        if "model" in self.traits:
            return self.make(model, params=params, **options)
        return self.make(model.parameters() if params is None else params, **options)


def traits(*names: Trait) -> frozenset[Trait]:
    return frozenset(names)


SEED = {"seed": 0}
DIAGONAL = traits("backward", "told", "seed")
LAYERS = traits("model", "backward")
INVERSES = {"curvature_every": 1, "inverse_every": 2}
NEWTON = traits("backward", "told", "twice", "one vector")
NEWTON_OF_KNOWN_LOSSES = NEWTON | traits("known loss")
FIXED_DAMPING = {"adapt": False, "damping": 0.5}

CASES = [
    Case(AdaHessian, DIAGONAL | traits("twice"), {"lr": 0.1}, options=SEED),
    Case(
        SophiaH,
        DIAGONAL | traits("twice"),
        {"lr": 0.02, "curvature_every": 3},
        options=SEED,
    ),
    Case(
        SophiaG,
        DIAGONAL | traits("known loss", "drawn labels"),
        {"lr": 0.02, "curvature_every": 3},
        options=SEED,
    ),
    Case(Lion, traits(), {"lr": 0.01}),
    Case(
        Muon,
        traits("matrices"),
        {"lr": 0.02},
        options={"ns_dtype": None, "weight_decay": 0.0},
        like="Lion",
    ),
    Case(SparseAdam, traits("sparse"), {"lr": 0.02}, like="Lion"),
    Case(Shampoo, traits(), {"lr": 0.1}, options={"root_every": 2}),
    Case(
        SOAP,
        traits(),
        {"lr": 0.02},
        options={"basis_every": 2, "shift": 1e-2, "weight_decay": 0.0},
        like="Shampoo",
    ),
    Case(KFAC, LAYERS, {"lr": 0.1}, options={"curvature_every": 2, "inverse_every": 4}),
    Case(KFAC, LAYERS, {"lr": 0.1}, options={**INVERSES, "eigen": True}, variant="-eigen", like="KFAC"),
    Case(
        KFAC,
        LAYERS | traits("told", "known loss", "drawn labels", "seed"),
        {"lr": 0.1},
        options={**INVERSES, "fisher": "sampled", **SEED},
        variant="-sampled",
    ),
    Case(NewtonCG, NEWTON, {"warm_start": 0.5}, by_hand=FIXED_DAMPING),
    Case(
        GaussNewton,
        NEWTON_OF_KNOWN_LOSSES,
        {"damping": 1.0, "warm_start": 0.5},
        by_hand=FIXED_DAMPING,
    ),
    Case(
        LBFGS,
        traits("backward", "one vector", "calls again"),
        {},
        options={"max_iter": 1, "max_eval": 25, "tolerance_change": 0.0, "history_size": 5},
        by_hand={"line_search_fn": None, "lr": 0.3},
    ),
]


def of_cases(holds: Callable[[Case], bool]) -> pytest.MarkDecorator:
    """Run a test for some rows, without rows that are like another one."""
    rows = [case for case in CASES if holds(case) and not case.like]
    return pytest.mark.parametrize("case", rows, ids=str)


def having(*names: Trait) -> pytest.MarkDecorator:
    """Run a test for the rows that have all of some traits."""
    return of_cases(lambda case: case.traits.issuperset(names))


def lacking(*names: Trait) -> pytest.MarkDecorator:
    """Run a test for the rows that have none of some traits."""
    return of_cases(lambda case: case.traits.isdisjoint(names))


every = lacking()
every_one = pytest.mark.parametrize("case", CASES, ids=str)


def layer(*values: float) -> nn.Linear:
    """Make a layer whose weight is a row of numbers."""
    made = nn.Linear(max(1, len(values)), 1, bias=False)
    made.weight.data = torch.tensor([values])
    return made


def values_of(one: nn.Linear) -> list[float]:
    return one.weight.flatten().tolist()


def quadratic(one: nn.Linear) -> Tensor:
    """Return a convex quadratic of condition number 25, as least squares. Its minimum is 0, at 1."""
    x = torch.diag(torch.tensor([1.0, 5.0], dtype=one.weight.dtype))
    return F.mse_loss(one(x), x.sum(1, keepdim=True), reduction="sum")


def rosenbrock(one: nn.Linear) -> Tensor:
    """Return Rosenbrock's function, as least squares. Its minimum is 0, at (1, 1)."""
    x, y = one(torch.eye(2)).flatten()
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


def run(opt: Any, loss_of: Callable[[], Tensor], steps: int) -> list[float]:
    """Take steps by a closure, and return the losses before each."""
    return [float(opt.step(closure_of(opt, loss_of))) for _ in range(steps)]


def steps_of(case: Case, number: int) -> int:
    """Return the number of steps of a test. Newton's method needs few, and they are expensive."""
    return number // 5 if "one vector" in case.traits else number


def backward(case: Case, opt: Any, loss_of: Callable[[], Tensor]) -> None:
    """Take the gradient in a loop without a closure, as each kind of optimizer has it."""
    if "known loss" in case.traits:
        with opt.recording():
            loss_of().backward()
    elif "backward" in case.traits:
        opt.backward(loss_of())
    else:
        loss_of().backward()


def optimizer(case: Case, model: nn.Module, params: Iterable[Any] | None = None, **options: Any) -> Any:
    """Make the optimizer with the settings for a network."""
    return case.of(model, params, **{**case.options, **case.network, **options})


def warning_of_modules(case: Case) -> contextlib.AbstractContextManager[Any]:
    """Expect the warning of an optimizer that is made of a model with modules that it does not know."""
    if "model" in case.traits:
        return pytest.warns(UserWarning, match="moved along the plain gradient")
    return contextlib.nullcontext()


def snapshot(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def tensors_of(opt: torch.optim.Optimizer) -> list[Tensor]:
    """List the tensors in the state of an optimizer. Steps replace these tensors."""
    kept = [value for state in opt.state.values() for value in state.values()]
    return [value for value in kept if isinstance(value, Tensor)]


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_near(
    one: Iterable[Tensor], other: Iterable[Tensor], *, rtol: float = 1e-7, atol: float = 1e-10
) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
