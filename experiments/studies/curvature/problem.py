"""What the curvature is of: parameters, predictions as a function of them, and a loss on data that stays the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call

from experiments.run import build
from experiments.run.schema import MLP
from experiments.studies.curvature.schema import CurvatureConfig, Matrix, Objective
from metagrad.curvature import Operator, fisher, ggn, hessian

if TYPE_CHECKING:
    from experiments.run.build import Parts
    from metagrad.tasks import Batch, TaskDistribution

Params = Mapping[str, Tensor]
LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """A loss, `loss_fn(predict(params, x), y)`, at a point."""

    params: dict[str, Tensor]
    predict: Callable[[Params, Tensor], Tensor]
    loss_fn: LossFn
    x: Tensor
    y: Tensor

    def loss(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss, one number."""
        return self.loss_fn(self.predict(params, x), y)

    def operator(self, matrix: Matrix) -> Operator:
        """Return a curvature matrix; to be used in a `with` block, which frees its graph."""
        data = (self.x, self.y)
        if matrix is Matrix.hessian:
            return hessian(self.loss, self.params, data)
        make = ggn if matrix is Matrix.ggn else fisher
        return make(self.predict, self.loss_fn, self.params, data)  # type: ignore[reportArgumentType]


def tasks_to_measure(config: CurvatureConfig, tasks: TaskDistribution, device: torch.device) -> Batch:
    """Draw the tasks that curvature is measured on: one where the model itself is trained, on its support."""
    number = 1 if config.objective is Objective.supervised else config.measure.tasks
    return as_vectors(
        config, tasks.sample(number, generator=build.generator(config.seed, "validation")).to(device=device)
    )


def as_vectors(config: CurvatureConfig, batch: Batch) -> Batch:
    """Give an MLP its inputs as vectors, pictures too: [tasks, examples, features]."""
    if not isinstance(config.model, MLP):
        return batch
    return batch._replace(
        support=batch.support._replace(x=batch.support.x.flatten(2)),
        query=batch.query._replace(x=batch.query.x.flatten(2)),
    )


def problem(objective: Objective, parts: Parts, loss_fn: LossFn, batch: Batch) -> Problem:
    """Return the problem of an objective, at the parameters that the model has now."""
    make = {Objective.meta: meta, Objective.adapted: adapted, Objective.supervised: supervised}[objective]
    return make(parts, loss_fn, batch)


def meta(parts: Parts, loss_fn: LossFn, batch: Batch) -> Problem:
    """The MAML objective: the mean query loss after adaptation, as a function of the initialisation."""

    def predict(params: Params, x: Tensor) -> Tensor:
        moved = batch._replace(query=batch.query._replace(x=x))
        return functional_call(parts.module, dict(params), (moved,)).query_outputs.flatten(0, 1)

    return Problem(_params(parts), predict, loss_fn, batch.query.x, batch.query.y.flatten(0, 1))


def adapted(parts: Parts, loss_fn: LossFn, batch: Batch) -> Problem:
    """The query losses of adapted models: their mean over tasks, as a function of one shift of all their parameters.

    At shift zero its Hessian is the mean of the tasks' Hessians, each at its own adapted parameters.
    """
    with torch.no_grad():
        models = parts.algorithm.adapt(batch.support)

    def predict(shift: Params, x: Tensor) -> Tensor:
        params = {name: p + shift[f"model.{name}"] for name, p in models.params.items()}
        return replace(models, params=params)(x).flatten(0, 1)

    shift = {f"model.{name}": torch.zeros_like(p[0]) for name, p in models.params.items()}
    return Problem(shift, predict, loss_fn, batch.query.x, batch.query.y.flatten(0, 1))


def supervised(parts: Parts, loss_fn: LossFn, batch: Batch) -> Problem:
    """The training loss of the model itself, on the support examples of one task."""

    def predict(params: Params, x: Tensor) -> Tensor:
        own = {name.removeprefix("model."): value for name, value in params.items()}
        return functional_call(parts.model, own, (x,))

    return Problem(_params(parts), predict, loss_fn, batch.support.x[0], batch.support.y[0])


def _params(parts: Parts) -> dict[str, Tensor]:
    return dict(parts.module.named_parameters())
