"""Gradients of metrics and of single training examples, at one state of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from metagrad.core.checks import progress, refuse
from metagrad.core.modules import called_on
from metagrad.core.tree import Params, tree_map
from metagrad.curvature import jacobian
from metagrad.curvature.influence import measurement_gradients
from metagrad.training import Trained
from metagrad.training.losses import example_losses
from metagrad.training.step import State
from metagrad.training.training import Metrics

_BLOCK = 256
"""Number of examples whose gradients are computed together."""


def metric_gradients(trained: Trained, state: State, metrics: Metrics) -> Tensor:
    """Return the gradient of each metric with respect to all parameters, ``[k, P]``."""
    bound = trained.training.model.bound
    call = "attribute(trained, metrics)"
    return measurement_gradients(call, state.params, lambda params: metrics(bound(params, state.buffers)))


def example_gradients(trained: Trained, state: State) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the losses of training examples, ``[b]``, and their gradients, ``[b, P]``, in evaluation mode."""
    training, examples = trained.training, trained.trajectory.inputs.examples
    if trained.weights.ndim > 1:
        refuse("attribute(trained, method)", "weights [n], except for Replay", list(trained.weights.shape))

    def loss(params: Params, x: Any, y: Any) -> Tensor:
        x, y = (tree_map(lambda t: t.unsqueeze(0), part) for part in (x, y))
        output = called_on(training.model.bound(params, state.buffers), x)
        return example_losses(training.step.loss_fn, output, y, 1, whole=None).mean()

    params = {name: p.detach() for name, p in state.params.items()}
    for rows in progress(torch.arange(examples.size).split(_BLOCK), "gradients of examples"):
        found = jacobian(loss, params, examples.batch(rows))
        yield found.values, found.rows()
