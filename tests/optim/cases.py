"""The table of rules. Every row is tested for every invariant, so a new rule needs only a new row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from metagrad.optim import rules

SHAPES = {"w": (3, 2), "b": (2,), "scale": ()}
MATRICES = {"w": (3, 2), "v": (2, 4)}


@dataclass(frozen=True)
class Case:
    """A rule, with hyperparameters to be given as numbers, tensors and whatever else they may be."""

    make: Callable[..., Any]
    hyper: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    counterpart: Callable[..., torch.optim.Optimizer] | None = None  # takes hyper and flags as they are
    as_counterpart: dict[str, Any] = field(default_factory=dict)  # flags that make it equal
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    smooth: dict[str, Any] = field(default_factory=dict)  # hyperparameters and flags for finite differences
    for_all: tuple[str, ...] = ()  # hyperparameters that are not by parameter
    no_elements: tuple[str, ...] = ()  # those that have no value for each element
    by_step: bool = True  # whether hyperparameters may have a value for each step, or each parameter

    def rule(self, form: Callable[[Any], Any] = lambda value: value, **more: Any) -> Any:
        """Make the rule, with its hyperparameters in a form."""
        return self.make(**formed({**self.hyper, **more}, form), **self.flags)

    def smooth_hyper(self) -> dict[str, Any]:
        """Return the hyperparameters for finite differences."""
        return {**self.hyper, **{k: v for k, v in self.smooth.items() if type(v) is float}}

    def smooth_flags(self) -> dict[str, Any]:
        """Return the flags that go with them."""
        return {**self.flags, **{k: v for k, v in self.smooth.items() if type(v) is not float}}

    def params(self, dtype=torch.float64, seed=0, tasks=()):
        """Draw parameters that require grad."""
        return {key: p.requires_grad_() for key, p in draw(self.shapes, dtype, seed, tasks).items()}

    def grads(self, dtype=torch.float64, seed=1, tasks=()):
        """Draw gradients."""
        return draw(self.shapes, dtype, seed, tasks)

    def loss(self, p):
        """Return a smooth loss that uses all parameters."""
        if self.shapes is MATRICES:
            return torch.tanh(p["w"] @ p["v"]).pow(2).sum() + p["w"].pow(4).sum() / 4
        return (torch.tanh(p["w"] + p["b"]) * p["scale"]).pow(2).sum() + p["b"].pow(4).sum()


def formed(hyper, form):
    """Apply a form to every number, and to both betas."""
    return {k: tuple(map(form, v)) if isinstance(v, tuple) else form(v) for k, v in hyper.items()}


def draw(shapes, dtype=torch.float64, seed=0, tasks=()):
    """Sample a tensor for each shape, at least 0.1 from zero, where derivatives have kinks."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        key: torch.randn((*tasks, *shape), generator=generator, dtype=torch.float64)
        for key, shape in shapes.items()
    }
    return {key: (p + 0.1 * p.sign()).to(dtype) for key, p in drawn.items()}


def steps(rule, params, gradients):
    """Update the parameter ``w`` with each gradient in turn."""
    state = rule.init(params)
    for g in gradients:
        params, state = rule.update({"w": g}, state, params)
    return params["w"], state


def scalar(value, dtype=torch.float64):
    """Make a number a tensor that requires grad."""
    return torch.tensor(value, dtype=dtype, requires_grad=True)


@dataclass(frozen=True)
class Decay:
    """A schedule that can be pickled."""

    start: Any

    def __call__(self, step):
        return self.start * 0.5**step


def is_vector(name):
    return name != "w"


def clipped(lr, max_norm):
    return rules.chain(rules.clip_by_norm(max_norm), rules.sgd(lr, momentum=0.9))


def scheduled(lr, momentum):
    return rules.schedule(rules.rmsprop(momentum=0.5, eps=1e-2), lr=Decay(lr), momentum=Decay(momentum))


def masked(lr, other_lr):
    return rules.mask(rules.adam(lr, eps=1e-2), is_vector, other=rules.sgd(other_lr, momentum=0.5))


def mixed(lr, max_norm):
    """Matrices by one rule and the rest by another, under a clip."""
    hidden = rules.muon(lr, ns_dtype=None, ns_steps=1, eps=1e-2)
    both = rules.mask(hidden, ["w"], other=rules.adamw(lr, eps=1e-2))
    return rules.chain(rules.clip_by_norm(max_norm), both)


def muon_of_torch(params, **options):
    optimizer = getattr(torch.optim, "Muon", None)
    return pytest.skip("torch has Muon from 2.9 on") if optimizer is None else optimizer(params, **options)


sgd, adam, adamw, rmsprop, adagrad = rules.sgd, rules.adam, rules.adamw, rules.rmsprop, rules.adagrad
SGD, Adam, AdamW, RMSprop, Adagrad = (
    getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")
)
EPS = {"eps": 1e-2}
of_sgd = partial(Case, sgd, counterpart=SGD)
of_adam = partial(Case, adam, counterpart=Adam, smooth=EPS)
of_adamw = partial(Case, adamw, counterpart=AdamW, smooth=EPS)
of_adagrad = partial(Case, adagrad, counterpart=Adagrad, smooth=EPS)
of_rmsprop = partial(Case, rmsprop, counterpart=RMSprop, smooth=EPS)
of_muon = partial(
    Case,
    rules.muon,
    counterpart=muon_of_torch,
    as_counterpart={"ns_dtype": torch.bfloat16},
    shapes=MATRICES,
    no_elements=("eps",),
)
CASES = {
    "sgd": of_sgd({"lr": 0.05}),
    "sgd, options": of_sgd({"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd, nesterov": of_sgd({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}, {"nesterov": True}),
    "adam": of_adam({"lr": 0.05}),
    "adam, options": of_adam(
        {"lr": 0.05, "eps": 1e-3, "betas": (0.9, 0.5), "weight_decay": 0.1}, {"amsgrad": True}
    ),
    "adamw": of_adamw({"lr": 0.05, "weight_decay": 0.2, "betas": (0.8, 0.9), "eps": 1e-3}),
    "adagrad": of_adagrad({"lr": 0.05, "lr_decay": 0.2, "eps": 1e-3, "weight_decay": 0.1}),
    "rmsprop": of_rmsprop({"lr": 0.05}),
    "rmsprop, options": of_rmsprop(
        {"lr": 0.05, "alpha": 0.5, "eps": 1e-3, "momentum": 0.5, "weight_decay": 0.1}, {"centered": True}
    ),
    "lion": Case(rules.lion, {"lr": 0.05, "betas": (0.5, 0.6), "weight_decay": 0.1}),
    "muon": of_muon({"lr": 0.05}, smooth={**EPS, "ns_dtype": None, "ns_steps": 2}),
    "muon, options": of_muon(
        {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.2, "eps": 1e-6},
        {
            "nesterov": False,
            "ns_steps": 3,
            "adjust_lr_fn": "match_rms_adamw",
            "ns_coefficients": (2.0, -1.5, 0.5),
        },
        smooth={**EPS, "ns_dtype": None, "ns_steps": 1},
    ),
    "shampoo": Case(rules.shampoo, {"lr": 0.05, "eps": 1e-2}, no_elements=("eps",)),
    "shampoo, options": Case(
        rules.shampoo,
        {"lr": 0.05, "eps": 1e-2, "momentum": 0.5, "decay": 0.9, "weight_decay": 0.1, "graft_eps": 1e-2},
        {"graft": True, "block_size": 2, "root_every": 2},
        no_elements=("decay", "eps"),
    ),
    "soap": Case(
        rules.soap,
        {"lr": 0.05, "shift": 1e-2},
        {"basis_every": 1},
        smooth=EPS,
        shapes=MATRICES,
        no_elements=("shift",),
    ),
    "soap, options": Case(
        rules.soap,
        {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1, "shift": 1e-2, "eps": 1e-3},
        {"basis_every": 2, "precondition_1d": True},
        smooth=EPS,
        no_elements=("betas", "eps", "shift"),
    ),
    "clip": Case(clipped, {"lr": 0.05, "max_norm": 0.5}, for_all=("max_norm",)),
    "schedule": Case(scheduled, {"lr": 0.05, "momentum": 0.5}, by_step=False),
    "mask": Case(masked, {"lr": 0.05, "other_lr": 0.1}, for_all=("lr", "other_lr")),
    "all at once": Case(mixed, {"lr": 0.05, "max_norm": 0.5}, for_all=("lr", "max_norm")),
}
over_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
OF_TORCH = {name: case for name, case in CASES.items() if case.counterpart} | {
    "sgd, momentum": of_sgd({"lr": 0.05, "momentum": 0.9}),
    "adam, betas": of_adam({"lr": 0.05, "betas": (0.5, 0.6)}),
    "adamw, amsgrad": of_adamw({"lr": 0.05}, {"amsgrad": True, "maximize": True}),
    "adagrad, start": of_adagrad({"lr": 0.05}, {"initial_accumulator_value": 0.3}),
    "rmsprop, momentum": of_rmsprop({"lr": 0.05, "momentum": 0.9}),
}
