"""The loss of a model as a pure function of its parameters, for one task or for a batch of tasks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metagrad.meta.calling import call_with, values_for
from metagrad.meta.stacked import forward_stacked, losses_stacked
from metagrad.optim.rules import Params

LossFn = Callable[[Tensor, Tensor], Tensor]


_ELEMENTWISE = {F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits}


class Labels(NamedTuple):
    """The bounds of the class labels in a batch."""

    lowest: int
    highest: int


@dataclass(frozen=True)
class Objective:
    """``loss_fn(model(x), y)`` as a function of the model's parameters.

    Attributes:
        model: The module; its own parameters are never written to.
        loss_fn: ``loss_fn(prediction, target)``, a scalar for the examples of one task.
        rows: Which rows of a table its value holds, by the name of the table.
    """

    model: nn.Module
    loss_fn: LossFn
    rows: Params = field(default_factory=dict)

    def single(self, params: Params, x: Tensor, y: Tensor, labels: Labels | None) -> tuple[Tensor, Tensor]:
        """Return the loss (a scalar) and the prediction ``[n, ...]`` of one task."""
        prediction = self.predict(params, x)
        check_labels(labels, prediction.shape)
        self._check_shapes(prediction.shape, y.shape)
        loss = self.loss_fn(prediction, y)
        self._check_loss(loss, prediction, y, num_axes=0)
        return loss, prediction

    def stacked(self, params: Params, x: Tensor, y: Tensor, labels: Labels | None) -> tuple[Tensor, Tensor]:
        """Return the losses ``[tasks]`` and predictions ``[tasks, n, ...]`` of stacked parameters."""
        predictions = self.predict_stacked(params, x)
        check_labels(labels, predictions.shape[1:])
        self._check_shapes(predictions.shape[1:], y.shape[1:])
        losses = losses_stacked(self.loss_fn, predictions, y)
        self._check_loss(losses, predictions, y, num_axes=1)
        return losses, predictions

    def predict(self, params: Params, x: Tensor) -> Tensor:
        """Return the prediction ``[n, ...]`` of one task."""
        return call_with(self.model, values_for(self.model, params, self.rows), x)

    def predict_stacked(self, params: Params, x: Tensor) -> Tensor:
        """Return the predictions ``[tasks, n, ...]`` of stacked parameters, all tasks at once."""
        return forward_stacked(self.model, params, x, self.rows)

    def predict_each(self, params: Params, x: Tensor) -> Tensor:
        """Return the predictions ``[tasks, n, ...]`` of stacked parameters, task by task."""
        predictions = []
        for i in range(x.shape[0]):
            task = replace(self, rows={name: rows[i] for name, rows in self.rows.items()})
            predictions.append(task.predict({name: p[i] for name, p in params.items()}, x[i]))
        return torch.stack(predictions)

    def _check_shapes(self, prediction: torch.Size, target: torch.Size) -> None:
        if _function_of(self.loss_fn) in _ELEMENTWISE and prediction != target:
            raise ValueError(
                f"MAML(batch): the model returns {tuple(prediction)} for the examples of a task, their targets are "
                f"{tuple(target)}; torch would broadcast one to the other. Give both the same shape."
            )

    def _check_loss(self, loss: Tensor, prediction: Tensor, y: Tensor, num_axes: int) -> None:
        if loss.ndim != num_axes:
            raise ValueError(
                f"MAML(model, loss_fn): loss_fn must return a scalar for each task, got shape "
                f"{tuple(loss.shape[num_axes:])}; a prediction is {tuple(prediction.shape[num_axes:])}, a target "
                f"{tuple(y.shape[num_axes:])}. Reduce it, for instance by its mean."
            )

    def label_bounds(self, *targets: Tensor) -> Labels | None:
        """Read the bounds of the class labels; None if the loss does not take any."""
        keywords = self.loss_fn.keywords if isinstance(self.loss_fn, functools.partial) else {}
        loss_fn = _function_of(self.loss_fn)
        takes_classes = loss_fn in (F.cross_entropy, F.nll_loss) or isinstance(
            loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)
        )
        if not takes_classes or any(target.is_floating_point() for target in targets):
            return None
        ignored = keywords.get("ignore_index", getattr(loss_fn, "ignore_index", -100))
        bounds = [torch.aminmax(torch.where(target == ignored, 0, target)) for target in targets]
        return Labels(int(min(low for low, _ in bounds)), int(max(high for _, high in bounds)))


def _function_of(loss_fn: LossFn) -> LossFn:
    return loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn


def check_labels(labels: Labels | None, prediction_shape: Sequence[int]) -> None:
    """Refuse labels that are no class of predictions ``[n, ...]``."""
    if labels is None:
        return
    classes = prediction_shape[1] if len(prediction_shape) > 1 else prediction_shape[0]
    if labels.lowest < 0 or labels.highest >= classes:
        raise ValueError(
            f"MAML(batch): labels must lie in 0..{classes - 1}, since the model returns {classes} values for "
            f"each example, but they reach from {labels.lowest} to {labels.highest}. Relabel the classes of "
            "each task, or give the model more outputs."
        )
