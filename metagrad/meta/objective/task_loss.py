"""The loss of a model as a pure function of its parameters, for one task or for vectorized tasks."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metagrad.core import _torch
from metagrad.core._torch import named_modules
from metagrad.core.checks import refuse
from metagrad.core.tree import LossFn, Params, tree_map
from metagrad.meta.objective.norms import NormPass
from metagrad.meta.objective.structured import Nested, restored, structured
from metagrad.meta.objective.tasks import num_tasks, stacked
from metagrad.meta.objective.vmap import (
    RESULT,
    Values,
    call_with,
    forward_stacked,
    losses_stacked,
    values_for,
)

Loss = Callable[..., tuple[Tensor, Nested]]
"""Maps parameters, inputs, targets and optionally a :class:`NormPass` to losses and predictions."""

_ELEMENTWISE: tuple[object, ...] = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits),
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss),
)
"""Losses that compare predictions with targets elementwise: functions, and classes of modules."""


_FLOAT_TARGETS: tuple[object, ...] = (
    *(F.huber_loss, nn.HuberLoss, F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss),
)
"""Losses that do not convert integer targets to floating point."""


class LabelBounds(NamedTuple):
    """The bounds of the class labels in a batch."""

    lowest: int
    highest: int
    leave_out_examples: bool = False
    """Whether an example has the label that the loss ignores, as padding does."""


@dataclass(frozen=True)
class TaskLoss:
    """``loss_fn(model(x), y)`` as a function of the model's parameters.

    Attributes:
        model: The module. Its parameters are never written to.
        loss_fn: ``loss_fn(prediction, target) -> scalar``, for the examples of one task.
        labels: The bounds of the labels, to be compared with the predictions. Compiled code would contain them as
            constants, so they are checked outside.
        rows: Indices of the rows that the value of each table holds, ``[R]``.
        norms: The policy of normalization layers. None means that the modules decide.
        name: Name of the algorithm in errors.
        tables: Names of the tables that all tasks share and that have row-sparse gradients.
        by_copy: True if a copy of the model is called, because the model runs again in a backward pass.
    """

    model: nn.Module
    loss_fn: LossFn
    labels: LabelBounds | None = None
    rows: Params = field(default_factory=dict)
    norms: NormPass | None = None
    name: str = "MAML"
    tables: tuple[str, ...] = ()
    by_copy: bool = False

    def __post_init__(self) -> None:
        if self.labels is not None and self.labels.leave_out_examples:
            _check_padding(self.name, self.model, self.norms)

    def single(
        self, params: Params, x: Nested, y: Nested, norms: NormPass | None = None
    ) -> tuple[Tensor, Nested]:
        """Return the loss (a scalar) and the prediction ``[n, ...]`` of one task."""
        prediction = self.under(norms).call(params, x)
        self._check_examples(prediction, y, num_axes=0)
        loss = self.loss_fn(prediction, restored(y))
        self.check_loss(loss, num_axes=0)
        return loss, structured(prediction, RESULT)

    def stacked(
        self, params: Params, x: Nested, y: Nested, norms: NormPass | None = None
    ) -> tuple[Tensor, Nested]:
        """Return the losses ``[tasks]`` and predictions ``[tasks, n, ...]`` of vectorized tasks."""
        predictions = self.under(norms).call_stacked(params, x)
        self._check_examples(predictions, y, num_axes=1)
        losses = losses_stacked(self.loss_fn, predictions, y)
        self.check_loss(losses, num_axes=1)
        return losses, predictions

    def predict(self, params: Params, x: Nested, chunk: int) -> Nested:
        """Return the predictions ``[tasks, n, ...]`` of tasks. A ``chunk`` of 1 means a Python loop."""
        if chunk != 1:
            return self.call_stacked(params, x)
        predictions = []
        for i in range(num_tasks(x)):
            rows, own, inputs = tree_map(operator.itemgetter(i), (self.rows, params, x))
            norms = None if self.norms is None else self.norms.of_task(i)
            prediction = dataclasses.replace(self, rows=rows, norms=norms).call(own, inputs)
            predictions.append(structured(prediction, RESULT))
        return stacked(predictions)

    def under(self, norms: NormPass | None) -> TaskLoss:
        """Return the loss with another pass of the norms."""
        return self if norms is None else dataclasses.replace(self, norms=norms)

    def call(self, params: Params, x: Nested) -> Any:
        """Return the output of the model for one task."""
        return call_with(self.model, self._values(params), x, self.norms, by_copy=self.by_copy)

    def call_stacked(self, params: Params, x: Nested) -> Nested:
        """Return the predictions ``[tasks, n, ...]`` of vectorized tasks."""
        return forward_stacked(self.model, self._values(params), x, self.norms)

    def _values(self, params: Params) -> Values:
        return values_for(self.model, params, self.rows, self.tables)

    def check_predictions(self, shape: Sequence[int]) -> None:
        """Raise if a label is not a class of predictions with this shape."""
        check_labels(self.labels, shape)

    def _check_examples(self, prediction: object, y: Nested, num_axes: int) -> None:
        """Raise if labels or targets do not fit the predictions."""
        function = _function_of(self.loss_fn)
        if not isinstance(prediction, Tensor):
            kind, name = type(function), getattr(function, "__name__", "")
            if getattr(nn, kind.__name__, None) is kind or getattr(F, name, None) is function:
                found: Any = prediction
                raise TypeError(
                    f"{self.name}(model, loss_fn): the model returns a {type(restored(found)).__name__}, and the "
                    "loss takes a tensor. Select it in loss_fn, such as lambda out, y: F.mse_loss(out[0], y)."
                )
            return
        shape = prediction.shape[num_axes:]
        if not torch.compiler.is_compiling():
            check_labels(self.labels, shape)
        if not isinstance(y, Tensor) or torch.compiler.is_compiling():
            return
        targets = y.shape[num_axes:]
        if function in _ELEMENTWISE or type(function) in _ELEMENTWISE:
            if shape != targets:
                raise ValueError(
                    f"{self.name}(batch): the model returns {tuple(shape)} for the examples of a task, their targets "
                    f"are {tuple(targets)}; torch would broadcast one to the other. Give both the same shape."
                )
            if not y.is_floating_point() and (function in _FLOAT_TARGETS or type(function) in _FLOAT_TARGETS):
                refuse(f"{self.name}(batch)", "targets in floating point, as y.float()", y.dtype, TypeError)
        elif ignored_label(self.loss_fn) is not None and not (y.is_floating_point() and shape == targets):
            _check_classes(f"{self.name}(batch)", y.dtype, targets, shape)

    def check_loss(self, loss: object, num_axes: int = 0) -> None:
        """Raise unless ``loss_fn`` returned one floating-point number per task."""
        if not isinstance(loss, Tensor):
            refuse(f"{self.name}(model, loss_fn)", "a tensor from loss_fn", type(loss).__name__, TypeError)
        if loss.ndim != num_axes:
            raise ValueError(
                f"{self.name}(model, loss_fn): loss_fn must return a scalar for each task, got shape "
                f"{tuple(loss.shape[num_axes:])}. Reduce it, for instance by its mean."
            )
        if not loss.is_floating_point():
            refuse(f"{self.name}(model, loss_fn)", "a real loss in floating point", loss.dtype, TypeError)


def _check_classes(call: str, dtype: torch.dtype, targets: torch.Size, predictions: torch.Size) -> None:
    """Raise unless the targets of a task are class labels for its predictions."""
    if targets == predictions and len(targets) > 1:
        raise TypeError(
            f"{call}: the labels have the shape of the predictions, {tuple(targets)}, as one-hot vectors have. Pass "
            "classes, y.argmax(-1), or probabilities, y.float()."
        )
    expected = predictions[:1] + predictions[2:]
    if len(predictions) > 1 and targets != expected:
        refuse(f"{call}: labels", f"one class per example, {tuple(expected)} per task", tuple(targets))
    if dtype not in (torch.int64, torch.uint8):
        raise TypeError(f"{call}: labels must be int64, got {dtype}. Pass y.long().")


def label_bounds(loss_fn: LossFn, *targets: Nested) -> LabelBounds | None:
    """Return the bounds of the class labels, or None if the loss has no class labels."""
    index = ignored_label(loss_fn)
    labels = [target for target in targets if isinstance(target, Tensor) and not target.is_floating_point()]
    if index is None or len(labels) < len(targets):
        return None
    ignored = [target == index for target in labels]
    bounds = [torch.aminmax(torch.where(out, 0, target)) for out, target in zip(ignored, labels, strict=True)]
    leaves_out = any(bool(out.any()) for out, target in zip(ignored, labels, strict=True) if target.ndim == 2)
    return LabelBounds(int(min(low for low, _ in bounds)), int(max(high for _, high in bounds)), leaves_out)


def ignored_label(loss_fn: LossFn) -> int | None:
    """Return the label that a loss ignores, or None if the loss has no class labels."""
    keywords = loss_fn.keywords if isinstance(loss_fn, functools.partial) else {}
    function = _function_of(loss_fn)
    if function in (F.cross_entropy, F.nll_loss) or isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return keywords.get("ignore_index", getattr(function, "ignore_index", -100))
    return None


def _check_padding(name: str, model: nn.Module, norms: NormPass | None) -> None:
    """Raise if batch statistics would contain examples that the loss ignores."""
    for path, module in named_modules(model):
        of_batch = module.training or (norms is not None and norms.is_of_sets)
        if isinstance(module, _torch.BatchNorm) and (of_batch or module.running_mean is None):
            raise ValueError(
                f"{name}(batch): some labels are ignored by the loss, as padding is, but these examples would count "
                f"in the batch statistics of {path or 'the model'} ({type(module).__name__}), so that the loss of a "
                "padded task would not be that of the task alone. Use GroupNorm, or tasks of equal size."
            )


def _function_of(loss_fn: LossFn) -> LossFn:
    return loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn


def check_labels(labels: LabelBounds | None, prediction_shape: Sequence[int]) -> None:
    """Raise if a label is not a class of predictions ``[n, ...]``."""
    if labels is None:
        return
    classes = prediction_shape[1] if len(prediction_shape) > 1 else prediction_shape[0]
    if labels.lowest < 0 or labels.highest >= classes:
        raise ValueError(
            f"MAML(batch): labels must lie in 0..{classes - 1}, since the model returns {classes} values for "
            f"each example, but they reach from {labels.lowest} to {labels.highest}. Relabel the classes of "
            "each task, or give the model more outputs."
        )
