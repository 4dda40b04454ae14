"""Gradients of metrics and of single training examples at a state of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from metagrad.core.tree import Params, tree_map
from metagrad.training import Trained
from metagrad.training.losses import example_losses
from metagrad.training.step import State

Metrics: TypeAlias = "Callable[[Callable[..., Any]], Tensor]"
"""Function of a callable model that returns the metrics, ``[k]``."""

_BLOCK = 256
"""Number of examples whose gradients are computed together."""


def metric_gradients(trained: Trained, state: State, metrics: Metrics) -> Tensor:
    """Return the gradient of each metric with respect to all parameters, ``[k, P]``."""
    params = {name: p.detach().requires_grad_() for name, p in state.params.items()}
    values = metrics(trained.training.model.bound(params, state.buffers))
    rows = (
        torch.autograd.grad(value, list(params.values()), retain_graph=True, materialize_grads=True)
        for value in values
    )
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def example_gradients(trained: Trained, state: State) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the losses of training examples, ``[b]``, and their gradients, ``[b, P]``, in evaluation mode."""
    training = trained.training
    examples = trained.trajectory.inputs.examples

    def loss(params: Params, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        x, y = (tree_map(lambda t: t.unsqueeze(0), part) for part in (x, y))
        output = training.model.bound(params, state.buffers)(x)
        value = example_losses(training.step.loss_fn, output, y, 1, whole=True).mean()
        return value, value

    gradient = torch.func.grad(loss, has_aux=True)
    params = {name: p.detach() for name, p in state.params.items()}
    for rows in torch.split(torch.arange(examples.size), _BLOCK):
        x, y = examples.batch(rows)
        grads, losses = torch.func.vmap(gradient, in_dims=(None, 0, 0), randomness="different")(params, x, y)
        yield losses.detach(), torch.cat([g.detach().flatten(1) for g in grads.values()], 1)
