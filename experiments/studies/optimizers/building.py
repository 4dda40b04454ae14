"""From an optimizer's config to one that takes steps on a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.run.build import build_optimizer
from experiments.run.optimizer_schemas import OfCurvature, OfMatrices, OfModel
from experiments.run.schema import Optimizer
from experiments.studies.characters import Examples
from experiments.studies.optimizers.workload import Problem

Step = Callable[[Examples], Tensor]


class Stepper:
    """Take a step on a batch, and return the loss before it.

    Args:
        config: The optimizer.
        problem: Its model and loss.
        allow: Packages of the user's that it may be of.

    Raises:
        ValueError: The optimizer does not fit the model, or refuses its arguments.

    Attributes:
        work: Calls of the closure and products with curvature so far.
    """

    def __init__(self, config: Optimizer, problem: Problem, allow: Sequence[str] = ()) -> None:
        self._optimizer = _built(config, problem.model, allow)
        self._problem = problem
        self._size = config.curvature_batch if isinstance(config, OfCurvature) else None
        self.work = 0

    def __call__(self, examples: Examples) -> Tensor:
        """Take the step."""
        closure = self._closure_of(examples)
        if self._size is None:
            loss = self._optimizer.step(closure)
        else:
            part = Examples(examples.x[: self._size], examples.y[: self._size])
            loss = self._optimizer.step(closure, curvature=self._closure_of(part))
        self.work += getattr(self._optimizer, "stats", {}).get("products", 0)
        return loss

    def _closure_of(self, examples: Examples) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            self.work += 1
            self._optimizer.zero_grad()
            loss = self._problem.loss(examples)
            loss.backward()
            return loss

        return closure


class Together:
    """Optimizers of different parameters, which step together."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def zero_grad(self) -> None:
        """Reset all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        """Take gradients once, and a step of each."""
        loss = closure()
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.detach()


def _built(config: Optimizer, model: nn.Module, allow: Sequence[str]) -> Any:
    if isinstance(config, OfModel):
        return build_optimizer(config, model)
    if isinstance(config, OfMatrices):
        matrices, rest = split_for_muon(model)
        return Together([build_optimizer(config, matrices), build_optimizer(config.rest, rest)])
    return build_optimizer(config, model.parameters(), allow)


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of all layers but the last, and all other parameters.

    Raises:
        ValueError: There are no such matrices.
    """
    params = list(model.parameters())
    last = next(p for p in reversed(params) if p.ndim > 1)
    matrices = [p for p in params if p.ndim == 2 and p is not last]
    if not matrices:
        raise ValueError(
            f"optimizers: muon moves matrices of hidden layers, and {type(model).__name__} has none. Take another "
            "optimizer for this workload."
        )
    return matrices, [p for p in params if all(p is not matrix for matrix in matrices)]
