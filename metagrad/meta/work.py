"""What MAML does with some of the tasks of a batch: one of them, or several stacked."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.autograd.compile.check import UncompilableError
from metagrad.core.tree import tree_map
from metagrad.meta.batching import Tasks
from metagrad.meta.inner import Adaptation, InnerLoop, Loss, phase, start_values
from metagrad.meta.objective import Labels, Objective, check_labels
from metagrad.meta.programs import refuse_model
from metagrad.meta.structured import Nested, Structured, num_tasks
from metagrad.meta.whole import WholePrograms
from metagrad.optim.curvature import needs_curvature
from metagrad.optim.rules import Params, Rule


class Work(NamedTuple):
    """What is done with every part of the tasks of a batch."""

    objective: Objective
    inner: InnerLoop
    labels: Labels | None
    steps: int
    stacked: bool

    def adapt(self, params: Params, tasks: Tasks) -> tuple[Params, Tensor, Tensor, Params]:
        """Return adapted parameters ``[tasks, ...]``, support losses ``[tasks, steps]``, steps used, and rows."""
        adapted, losses, used = self._run(params, tasks)
        rows = tasks.rows
        if not self.stacked:
            adapted, rows = tree_map(lambda tensor: tensor.unsqueeze(0), (adapted, rows))
        return adapted, losses, used, rows

    def judge(
        self, params: Params, tasks: Tasks, rule: Rule | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Nested]:
        """Return support losses ``[tasks, steps]``, steps used, query losses ``[tasks]`` and predictions.

        Args:
            params: What tasks start from.
            tasks: The tasks.
            rule: What to take for the rule of the inner loop, with other hyper-parameters.
        """
        assert tasks.query_x is not None
        assert tasks.query_y is not None
        adapted, losses, used = self._run(params, tasks, rule)
        loss = self._loss(tasks.rows)
        judge = loss if self.inner.programs is None else functools.partial(self.inner.programs.judge, loss)
        with phase("query"):
            query_losses, predictions = judge(adapted, tasks.query_x, tasks.query_y)
        if not self.stacked:
            query_losses, predictions = tree_map(lambda t: t.unsqueeze(0), (query_losses, predictions))
        return losses, used, query_losses, predictions

    def compiled(
        self, do: Callable[[Work, Params, Tasks], tuple], params: Params, tasks: Tasks
    ) -> tuple[Tensor, ...]:
        """Do a method of this class by compiled code, or else as it is."""
        programs = self.inner.programs
        assert programs is not None

        def attempt() -> tuple[Tensor, ...]:
            self._refuse_uncompilable(tasks)
            if isinstance(programs, WholePrograms) and tasks.query_x is not None:
                return programs.judge_all(self, params, tasks)
            return do(self, params, tasks)

        eager = self._replace(inner=dataclasses.replace(self.inner, programs=None))
        return programs.attempt(attempt, lambda: do(eager, params, tasks))

    def _refuse_uncompilable(self, tasks: Tasks) -> None:
        """Raise for what compiled code does not look at."""
        if self.inner.chain is not None:
            raise UncompilableError(
                'memory="block" sweeps the blocks of a model by graphs of their own (memory="step" can be compiled)'
            )
        if needs_curvature(self.inner.rule, 0):
            raise UncompilableError("its rule asks for curvature, which is taken from the tape")
        refuse_model(self.objective.model, tasks.rows)
        if any(isinstance(part, Structured) for part in tasks[:4]):
            raise UncompilableError("inputs or targets are not single tensors")
        assert self.inner.programs is not None
        if self.inner.programs.prediction is not None:
            check_labels(self.labels, self.inner.programs.prediction)

    def _run(self, params: Params, tasks: Tasks, rule: Rule | None = None) -> Adaptation:
        """Run the inner loop; return its parameters, and its losses ``[tasks, steps]``."""
        x, y = tasks.support_x, tasks.support_y
        count = num_tasks(x) if self.stacked else None
        start = start_values(params, tasks.rows, count)
        adapted, losses, used = self.inner.run(
            self._loss(tasks.rows),
            start,
            x,
            y,
            steps=self.steps,
            tasks=() if count is None else (count,),
            rule=rule,
        )
        return Adaptation(adapted, losses.reshape(self.steps, used.numel()).t(), used.reshape(-1))

    def _loss(self, rows: Params) -> Loss:
        objective = dataclasses.replace(self.objective, rows=rows)
        return LabelledLoss(objective.stacked if self.stacked else objective.single, self.labels)


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledLoss:
    """A loss with the bounds of the labels that it is to look at.

    Attributes:
        loss: Parameters, inputs, targets, label bounds to losses (one, or one for each task) and predictions.
        labels: The bounds. To compiled code they would be constants, so they are checked outside.
    """

    loss: Callable[[Params, Nested, Nested, Labels | None], tuple[Tensor, Nested]]
    labels: Labels | None

    def __call__(self, params: Params, x: Nested, y: Nested) -> tuple[Tensor, Nested]:
        """Return losses and predictions."""
        return self.loss(params, x, y, None if torch.compiler.is_compiling() else self.labels)
