"""A network, the characters that it learns to tell apart, and the optimizer that trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import metagrad as mg
from experiments.studies import characters
from experiments.studies.curvature import problem
from experiments.studies.landscape.schema import Method
from metagrad.tasks.omniglot.splits import NUM_DRAWERS

if TYPE_CHECKING:
    from experiments.studies.landscape.schema import Characters, LandscapeConfig, RunConfig


@dataclass(frozen=True)
class Problem(problem.Problem):
    """The squared error of a network on training images, its curvature, and how often it is right."""

    model: nn.Module
    test: tuple[Tensor, Tensor]

    @torch.no_grad()
    def accuracies(self) -> dict[str, float]:
        """Return the percentage of images whose largest output is that of their class."""
        parts = {"train": (self.x, self.y), "test": self.test}
        return {
            f"accuracy/{part}": 100 * (self.model(x).argmax(1) == y.argmax(1)).float().mean().item()
            for part, (x, y) in parts.items()
        }


def build(config: LandscapeConfig, seed: int) -> Problem:
    """Return the problem of a seed, the same for all runs: its characters, and the network before training."""
    train, test = images(config.data, seed)
    torch.manual_seed(seed)
    model = mg.models.MLP([train[0].shape[1], *config.hidden, config.data.count], nn.Tanh)

    def predict(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, dict(params), (x,))

    return Problem(dict(model.named_parameters()), predict, F.mse_loss, *train, model, test)


def images(config: Characters, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return training and test images as vectors, centred and scaled by the training set, and classes as 0 and 1.

    Raises:
        ValueError: The files are not there, or have fewer characters.
    """
    levels = characters.load(
        "small1",
        config.count,
        generator=torch.Generator().manual_seed(seed),
        key="landscape: data.count",
        size=config.size,
        resize="area",
    )
    train, test = characters.by_drawers(levels.flatten(2), config.shots, NUM_DRAWERS - config.shots)
    mean, deviation, classes = train.x.mean(), train.x.std(), torch.eye(config.count)
    return tuple(((part.x - mean) / deviation, classes[part.y]) for part in (train, test))  # type: ignore[reportReturnType]


def optimizer_of(run: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of a run."""
    if run.method is Method.kfac:
        return mg.optim.KFAC(model, run.lr, **run.options)
    make = {Method.gd: torch.optim.SGD, Method.adam: torch.optim.Adam, Method.soap: mg.optim.SOAP}[run.method]
    return make(model.parameters(), run.lr, **run.options)


def objective(run: RunConfig, problem: Problem) -> Tensor:
    """Evaluate what a run descends: the loss, its neighbour uphill, or the loss and a sample of its trace."""
    if run.rho:
        return mg.optim.sharpness_aware(problem.loss, problem.params, problem.x, problem.y, rho=run.rho)
    loss = problem.loss_fn(problem.model(problem.x), problem.y)
    if not run.penalty:
        return loss
    with mg.hessian(loss, problem.params, create_graph=True) as H:
        return loss + run.penalty * H.trace(method="hutchinson", probes=1).value


def stepper(run: RunConfig, problem: Problem, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    """Return what takes a step on all examples, and returns what it descends before it."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(run, problem)
        value.backward()
        return value

    return lambda: optimizer.step(closure).item()  # type: ignore[reportArgumentType, reportAttributeAccessIssue]
