"""Base class of algorithms with a shared embedding and a head that is fitted to each task."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metagrad.core._torch import to_list
from metagrad.core.checks import check_choice
from metagrad.core.reach import placed
from metagrad.core.substitution import sole_use, tensor_places
from metagrad.core.tree import LossFn, Params, widened
from metagrad.meta.algorithm import AdaptedModel, MetaOutput
from metagrad.meta.execution.executor import TaskExecutor
from metagrad.meta.execution.nonfinite import Nonfinite
from metagrad.meta.execution.vectorization import Vectorization
from metagrad.meta.inner.loop import Adaptation, Evaluation, InnerLoop, phase
from metagrad.meta.maml import check_arguments
from metagrad.meta.objective.norms import Norm, NormPass, Norms, check_norm
from metagrad.meta.objective.structured import Nested, restored
from metagrad.meta.objective.task_loss import LabelBounds, TaskLoss, ignored_label
from metagrad.meta.objective.tasks import (
    BatchLike,
    ExamplesLike,
    Tasks,
    read_batch,
    read_support,
    with_task_axis,
)
from metagrad.meta.objective.vmap import call_with, forward_stacked
from metagrad.meta.options import refuse_unknown
from metagrad.optim.rules import Rule, sgd

_NO_STEPS = sgd(lr=0.0)


class HeadAlgorithm(nn.Module):
    """Base class of algorithms that embed with a shared model and fit a head to the support embeddings of each task.

    The model is called once for the support examples of all tasks, and once for their query examples. Its weights are
    not copied. Batch normalization uses separate statistics for each task, and for support and query
    examples.

    A subclass implements :meth:`fit` and :meth:`logits` for the embeddings of many tasks.

    Args:
        model: The embedding. It returns a tensor ``[examples, ...]``, whose other axes are features. All its
            parameters that require grad are meta-learned. It is called as in :class:`metagrad.MAML`.
        loss_fn: ``loss_fn(logits, target) -> scalar``, for the query examples of one task.
        task_chunk: How many tasks run in one vectorized pass. ``None`` means all tasks, ``1`` means a Python loop.
        norm: The statistics of normalization layers, as in :class:`metagrad.MAML`. ``"per_step"`` is not supported.
        nonfinite: The treatment of NaN and Inf, as in :class:`metagrad.MAML`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        task_chunk: int | None = None,
        norm: Norm | None = None,
        nonfinite: Nonfinite = "raise",
        **unknown: Any,
    ) -> None:
        super().__init__()
        refuse_unknown(self._name, unknown, ("task_chunk", "norm", "nonfinite"))
        self.model = model
        self.loss_fn = loss_fn
        self.task_chunk = task_chunk
        self.norm: Norm | None = norm
        self.nonfinite: Nonfinite = nonfinite
        self._check()

    def fit(self, features: Tensor, labels: Tensor) -> Params:
        """Fit the head of each task.

        Args:
            features: Support embeddings ``[tasks, shots, features]`` in single or double precision.
            labels: One-hot classes ``[tasks, shots, ways]`` of the same dtype. The features and labels of padding
                examples are zeros.

        Returns:
            The parameters of the heads for :meth:`logits`, ``[tasks, ...]`` each.
        """
        raise NotImplementedError

    def logits(self, fitted: Params, features: Tensor) -> Tensor:
        """Return the logits ``[tasks, n, ways]`` of embeddings ``[tasks, n, features]``."""
        raise NotImplementedError

    def forward(self, batch: BatchLike, *, steps: int | None = None) -> MetaOutput:
        """Fit the head to the support examples of every task, and evaluate it on the query examples.

        Args:
            batch: A batch in any form that :class:`metagrad.MAML` accepts. The targets of support examples are
                classes from 0 on, ``[tasks, shots]``. Classes may differ in their number of shots. The label -100
                marks padding. The logits of classes that a task does not have are minus infinity.
                For such tasks, a learned temperature in the loss would have no derivative. Use
                ``ProtoNet(scale=)`` or R2D2.
            steps: None, since there are no inner steps.

        Raises:
            ValueError: If the batch is empty, its task axes differ, or a task has no support example of a class. It
                is also raised if batch statistics would contain padding, or ``steps`` is given.
            TypeError: If the batch has another form, labels are not integers, or the model returns no tensor.
            FloatingPointError: As in :class:`metagrad.MAML`.
        """
        call = f"{self._name}(batch)"
        tasks = read_batch(batch, call)
        with sole_use(self):
            found, skipped, _ = self._executor(tasks, call, steps).run(tasks)
        assert isinstance(found, Evaluation)
        losses, logits = found.query_losses, restored(found.predictions)
        counted = losses[~skipped] if self.nonfinite == "skip" else losses
        return MetaOutput(counted.mean(), losses, logits, found.losses, found.used, skipped, self.norm)

    def adapt(self, support: ExamplesLike, *, steps: int | None = None) -> AdaptedModel:
        """Fit the head to the support examples of every task. The result holds the parameters of the heads.

        Raises:
            ValueError: As in :meth:`forward`. The other errors of :meth:`forward` are also raised.
        """
        call = f"{self._name}.adapt(support)"
        tasks = read_support(support, call)
        with sole_use(self):
            executor = self._executor(tasks, call, steps)
            results, skipped, chunk = executor.run(tasks)
        assert isinstance(results, Adaptation)
        objective, shared = executor.query_loop(tasks).objective, tensor_places(self)

        def predict(fitted: Params, x: Nested) -> Nested:
            with placed(shared):  # also after a ``functional_call`` has ended
                return objective.predict(fitted, x, chunk)

        return AdaptedModel(results.params, results.losses, results.used, skipped, predict)

    def extra_repr(self) -> str:
        """Return the constructor arguments that are not submodules."""
        return f"task_chunk={self.task_chunk}, norm={self.norm!r}, nonfinite={self.nonfinite!r}"

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _executor(self, tasks: Tasks, call: str, steps: int | None) -> TaskExecutor:
        """Make an executor for a batch from the current values of the attributes."""
        self._check()
        if steps is not None:
            raise ValueError(
                f"{call[:-1]}, steps): the head is fitted in closed form, so there are no inner steps to choose, got "
                f"{steps!r}. Leave steps out."
            )
        classes = read_classes(call, tasks, self.loss_fn)
        norms = None if self.norm is None else NormPass(Norms(self.model, self.norm))
        objective = _HeadObjective(
            self.model, self.loss_fn, classes.labels, name=self._name, norms=norms, head=self
        )
        loop = _HeadLoop(objective, _NO_STEPS, steps=0, order=2, memory="full", classes=classes)
        return _HeadExecutor(loop, {}, (), self.nonfinite, self._vectorization, self._name)

    def _check(self) -> None:
        """Raise for attributes that are out of range or have another type."""
        check_arguments(self.model, 0, 2, self.task_chunk, self._name)
        check_choice(f"{self._name}(..., nonfinite)", self.nonfinite, Nonfinite)
        check_norm(self.model, self.norm, 0, name=self._name)
        vectorization = self.__dict__.get("_vectorization")
        if vectorization is None or vectorization.task_chunk != self.task_chunk:
            self._vectorization = Vectorization(self.task_chunk, self._name)


@dataclass(frozen=True)
class _HeadObjective(TaskLoss):
    """The loss of a head as a function of its parameters. All tasks share the embedding."""

    head: HeadAlgorithm = field(kw_only=True)

    def call(self, params: Params, x: Nested) -> Tensor:
        """Return the logits ``[n, ways]`` of one task."""
        return self._logits(with_task_axis(params), self.features(x, is_stacked=False)).squeeze(0)

    def call_stacked(self, params: Params, x: Nested) -> Tensor:
        """Return the logits ``[tasks, n, ways]``."""
        return self._logits(params, self.features(x, is_stacked=True))

    def features(self, x: Nested, *, is_stacked: bool) -> Tensor:
        """Return the embeddings ``[tasks, n, features]`` in single or double precision."""
        if is_stacked:
            embedded = forward_stacked(self.model, {}, x, self.norms)
        else:
            embedded = with_task_axis(call_with(self.model, {}, x, self.norms, by_copy=self.by_copy))
        if not isinstance(embedded, Tensor) or not embedded.is_floating_point() or embedded.ndim < 3:
            raise TypeError(
                f"{self.name}(model, ...): the model must return a floating tensor [examples, ...], its embedding, "
                f"got {described(embedded)}."
            )
        return widened(embedded.flatten(2))

    def fitted(self, features: Tensor, y: Tensor, classes: Classes) -> Params:
        """Fit the heads. If tasks differ in their number of classes, the result has a mask ``classes``."""
        if classes.is_padded:
            features = features.masked_fill((y.long() == PADDING).unsqueeze(-1), 0.0)
        labels = one_hot(y, classes.ways)
        with without_autocast(features):
            fitted = self.head.fit(features, labels.to(features.dtype))
        return {**fitted, "classes": labels.any(1)} if classes.differ else fitted

    def _logits(self, params: Params, features: Tensor) -> Tensor:
        with without_autocast(features):
            logits = self.head.logits(params, features)
        if "classes" not in params:
            return logits
        return logits.masked_fill(~params["classes"].unsqueeze(1), -math.inf)


@dataclass(frozen=True)
class _HeadLoop(InnerLoop):
    """A loop without steps, which fits the head once."""

    classes: Classes = field(kw_only=True)

    def run(
        self, params: Params, tasks: Tasks, rule: Rule | None = None, start: Params | None = None
    ) -> Adaptation | Evaluation:
        """Fit the head, and evaluate it on the query examples if there are any."""
        objective = self.objective
        y = tasks.support_y if self.stacked else with_task_axis(tasks.support_y)
        assert isinstance(objective, _HeadObjective)
        assert isinstance(y, Tensor)
        with phase("support"):
            features = objective.features(tasks.support_x, is_stacked=self.stacked)
            if features.shape[:2] != y.shape:
                raise ValueError(
                    f"{objective.name}(model, ...): the model must return one embedding for each example, got "
                    f"{features.shape[1]} for {y.shape[1]} labels of a task."
                )
            fitted = objective.fitted(features, y, self.classes)
        if not self.stacked:
            fitted = {name: value.squeeze(0) for name, value in fitted.items()}
        none = features.new_zeros(len(y), 0)
        return self.results(fitted, none, y.new_zeros(len(y), dtype=torch.int64), none, tasks)


class _HeadExecutor(TaskExecutor):
    """An executor of tasks that share all parameters."""

    def probe(self, task: Tasks, params: Params) -> Tensor:
        """Return the embedding of one task."""
        objective = self.inner.objective
        return call_with(objective.model, {}, task.support_x, objective.norms, by_copy=objective.by_copy)

    @property
    def _modules(self) -> list[nn.Module]:
        """The algorithm, which contains the embedding and the learned parameters of the head and the loss."""
        assert isinstance(self.inner.objective, _HeadObjective)
        return [self.inner.objective.head]


def without_autocast(tensor: Tensor) -> torch.autocast:
    """Disable autocast, since linear solvers do not support half precision."""
    return torch.autocast(tensor.device.type, enabled=False)


PADDING = -100
"""The label of padding examples, which make all tasks equally large."""


class Classes(NamedTuple):
    """The classes of a batch of tasks.

    Attributes:
        ways: Maximum number of classes in a task.
        differ: Whether a task has fewer classes.
        is_padded: Whether a support or a query example is padding.
    """

    ways: int
    differ: bool
    is_padded: bool

    @property
    def labels(self) -> LabelBounds:
        """The bounds of the labels."""
        return LabelBounds(0, self.ways - 1, self.is_padded)


def read_classes(call: str, tasks: Tasks, loss_fn: LossFn) -> Classes:
    """Return the classes. Raise for invalid labels, and for classes without support examples."""
    y = tasks.support_y
    if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype == torch.bool or y.ndim != 2:
        raise TypeError(
            f"{call}: support.y must be the classes of the support examples, integers [tasks, shots], got "
            f"{described(y)}."
        )
    y = y.long()
    is_padding = y == PADDING
    counts = torch.where(is_padding, -1, y).amax(1) + 1
    lowest, fewest, ways = to_list(
        torch.stack([torch.where(is_padding, 0, y).min(), counts.min(), counts.max()])
    )
    if lowest < 0:
        raise ValueError(
            f"{call}: classes must be 0 or more, or {PADDING} for padding, support.y has {lowest}. Relabel them."
        )
    if fewest == 0:
        raise ValueError(f"{call}: task {int(counts.argmin())} has no support example that is no padding.")
    present = one_hot(y, ways).any(1)
    lacking = ~present & (torch.arange(ways, device=y.device) < counts.unsqueeze(1))
    unknown, is_ignored = _queries(tasks.query_y, loss_fn, present)
    flags = to_list(torch.stack([lacking.any(), unknown.any(), is_padding.any() | is_ignored.any()]))
    if flags[0]:
        task, label = (int(i) for i in lacking.nonzero()[0])
        raise ValueError(
            f"{call}: a task needs support examples of each of its classes, from 0 on, but task {task} has none of "
            f"class {label} (both count from 0). Relabel its classes, or sample every class."
        )
    if flags[1]:
        task, example = (int(i) for i in unknown.nonzero()[0])
        assert isinstance(tasks.query_y, Tensor)
        raise ValueError(
            f"{call}: query example {example} of task {task} is of class {int(tasks.query_y[task, example])}, of "
            "which the task has no support example (all count from 0)."
        )
    return Classes(ways, fewest < ways, flags[2])


def _queries(y: Nested | None, loss_fn: LossFn, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return two masks of the query labels: labels without a class in the task, and labels that the loss ignores."""
    ignored = ignored_label(loss_fn)
    if ignored is None or not isinstance(y, Tensor) or y.is_floating_point() or y.ndim != 2:
        return present.new_zeros(()), present.new_zeros(())
    y = y.long()
    is_known = (one_hot(y, present.shape[1]) & present.unsqueeze(1)).any(2)
    return ~is_known & (y != ignored), y == ignored


def one_hot(y: Tensor, ways: int) -> Tensor:
    """Return one-hot vectors ``[tasks, shots, ways]``, bool. They are zero for padding."""
    return y.unsqueeze(-1) == torch.arange(ways, device=y.device)


def described(value: Any) -> str:
    """Return a description of a value for an error message."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(restored(value)).__name__
