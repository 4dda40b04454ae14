"""Running the tasks of a meta-batch: every feature of a call is a step of one executor."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from metagrad.autograd.compile.compiled import UncompilableError
from metagrad.core.substitution import Slots
from metagrad.meta.execution.nonfinite import Buffers, GradientCheck, LossCheck, Nonfinite
from metagrad.meta.execution.stacking import Attempt, Comparison, Stacking, has_convolutions
from metagrad.meta.execution.tables import find_rows
from metagrad.meta.inner.compiled import refuse_model
from metagrad.meta.inner.loop import Adaptation, Evaluation, InnerLoop, outer_phase, phase, start_values
from metagrad.meta.inner.shared import SharingCall, shared_values
from metagrad.meta.objective.features import split_layers
from metagrad.meta.objective.task_loss import TaskLoss
from metagrad.meta.objective.tasks import Tasks, concatenated, num_tasks
from metagrad.optim.curvature import needs_curvature
from metagrad.optim.rules import Params, Rule


class Outcome(NamedTuple):
    """What became of the tasks of a meta-batch.

    Attributes:
        results: An :class:`Evaluation` where there are query examples, else an :class:`Adaptation`.
        skipped: Which tasks were left out, ``[tasks]``, bool.
        chunk: How many tasks ran together; 1 means one by one, without vmap.
    """

    results: Evaluation | Adaptation
    skipped: Tensor
    chunk: int


@dataclass(frozen=True)
class TaskExecutor:
    """Adapts to all tasks of a meta-batch, and evaluates them where there are query examples.

    Attributes:
        inner: The inner loop, with the objective.
        params: What tasks start from.
        sparse: The names of the tables of which each task adapts the rows that it looks up.
        nonfinite: How losses and meta-gradients that are not finite are handled.
        stacking: How many tasks run together.
        name: Of the algorithm, in errors.
    """

    inner: InnerLoop
    params: Params
    sparse: tuple[str, ...]
    nonfinite: Nonfinite
    stacking: Stacking
    name: str = "MAML"

    def run(self, tasks: Tasks) -> Outcome:
        """Run the tasks, in these steps.

        1. An outer phase of the memory tracker is opened.
        2. Losses that are not finite raise, or the other tasks run once more.
        3. It is decided how many tasks run together; two are compared once, stacked and one by one.
        4. Gradients are looked at where they enter parameters, hyper-parameters and modules.
        5. The tasks run, each part eagerly or compiled; one by one if torch.vmap cannot take the model after all.
        """
        model, _ = self.inner.objective.model, self._slots
        losses, chunk = LossCheck(self.nonfinite, tasks, model, self.name), 1
        skipped = losses.skipped if self.nonfinite == "skip" else None
        with outer_phase():
            while (part := losses.remaining) is not None:
                chunk = self._chunk_size(part)
                check = GradientCheck(
                    self.params,
                    self.inner.rule,
                    self._modules,
                    part,
                    losses.numbers,
                    skipped,
                    self._again,
                    self.name,
                )
                with check.inputs() as (params, rule):
                    results = self._begin()
                    with Attempt(self.stacking, model, chunk) as attempt:
                        results = self.compute(params, rule, part, chunk)
                    if results is None:
                        chunk, _ = 1, self._begin()
                        results = self.compute(params, rule, part, chunk)
                        self.stacking.give_up(attempt.reason)
                losses.record(check.outputs(results))
        if self.inner.objective.norms is not None:
            self.inner.objective.norms.norms.finish()
        return Outcome(losses.results, losses.skipped, chunk)

    def _begin(self) -> None:
        """Collect running statistics from here on."""
        if self.inner.objective.norms is not None:
            self.inner.objective.norms.norms.begin()

    def compute(self, params: Params, rule: Rule, tasks: Tasks, chunk: int) -> Evaluation | Adaptation:
        """Compute tasks, ``chunk`` at a time; 1 means one by one, without vmap."""
        objective = self.inner.objective
        rows = find_rows(objective.model, self.sparse, tasks.inputs, chunk, objective.norms)
        parts = list(tasks._replace(rows=rows).split(chunk))
        inner = dataclasses.replace(self.inner, rule=rule)
        inner = inner.of_parts(len(parts), tasks.device, stacked=chunk != 1)
        inner, parts = self._with_features(inner, parts)
        run = inner.adapt if tasks.query_x is None else inner.evaluate
        run = run if inner.compiled is None else functools.partial(_compiled, inner, self._slots)
        return concatenated(list(map(functools.partial(run, params), parts)))  # without a frame of its own

    def _with_features(self, inner: InnerLoop, parts: list[Tasks]) -> tuple[InnerLoop, list[Tasks]]:
        """Put features in the places of inputs, where the first layers compute the same at every inner step."""
        # Functions of start= are handed the inputs; memory="block" is for models of which a graph is too large.
        if inner.chain is not None or (inner.start is not None and inner.start.functions):
            return inner, parts
        if not all(isinstance(x, Tensor) for x in parts[0].inputs):
            return inner, parts
        norms = inner.objective.norms
        own = {id(p) for p in self.params.values()}
        split = split_layers(inner.objective.model, own, None if norms is None else norms.norms)
        if split is None:
            return inner, parts
        first = TaskLoss(
            inner.objective.model,
            inner.objective.loss_fn,
            layers=split.shared,
            tables=inner.objective.tables,
        )
        is_convolved = parts[0].device.type == "cpu" and has_convolutions(split.shared)
        call = (
            first.call
            if not inner.stacked
            else functools.partial(first.predict, chunk=1 if is_convolved else 0)
        )
        with phase("features"):
            featured = [
                part._replace(
                    support_x=call({}, x=part.support_x),
                    query_x=None if part.query_x is None else call({}, x=part.query_x),
                )
                for part in parts
            ]
        objective = dataclasses.replace(inner.objective, layers=split.adapted)
        return dataclasses.replace(inner, objective=objective), featured

    def _again(self, params: Params, rule: Rule, tasks: Tasks) -> Evaluation | Adaptation:
        """Compute a task eagerly, with all graphs, and leave buffers as they were."""
        buffers = Buffers(self.inner.objective.model)
        inner = dataclasses.replace(self.inner, memory="full", compiled=None)
        results = dataclasses.replace(self, inner=inner).compute(params, rule, tasks, chunk=1)
        buffers.restore()
        return results

    def _chunk_size(self, tasks: Tasks) -> int:
        if self.inner.chain is not None:
            return 1
        return self.stacking.chunk_size(self.comparison(tasks))

    def comparison(self, tasks: Tasks) -> Comparison:
        """Return what shows whether tasks may be stacked."""
        inner = self.inner
        return Comparison(inner.compared, self.params, tasks, self.sparse, inner.order, inner.start)

    @functools.cached_property
    def _slots(self) -> Slots:
        """What is in the places of the parameters of the model and the loss, before others are put there."""
        objective = self.inner.objective
        parts = () if self.inner.compiled is None else (objective.model, objective.loss_fn)
        return Slots([part for part in parts if isinstance(part, nn.Module)])

    @property
    def _modules(self) -> list[nn.Module]:
        """The model, and beside it modules whose parameters are learned alone: a loss, a start, norms of steps."""
        objective = self.inner.objective
        parts = (objective.model, objective.loss_fn, *self.inner.modules)
        return [part for part in parts if isinstance(part, nn.Module)]


def _compiled(inner: InnerLoop, slots: Slots, params: Params, tasks: Tasks) -> Evaluation | Adaptation:
    """Run an inner loop compiled, or eagerly as fallback."""
    compiled = inner.compiled
    assert compiled is not None
    eager = dataclasses.replace(inner, compiled=None)
    inner = dataclasses.replace(inner, shared=shared_values(inner.objective, params))
    run, run_eagerly = (loop.adapt if tasks.query_x is None else loop.evaluate for loop in (inner, eager))

    def attempt() -> Evaluation | Adaptation:
        refuse_uncompilable(inner, tasks)
        if compiled.options.whole and tasks.query_x is not None:
            count = num_tasks(tasks.support_x) if inner.stacked else None
            rule = compiled.rule(inner.rule, start_values(params, tasks.rows, count), inner.steps)
            evaluate = SharingCall(inner.objective, eager.evaluate)
            with slots.restored({}):
                return Evaluation(*compiled.whole_batch(evaluate, inner.shared, params, tasks, rule))
        # Guards of compiled code know what stands in the places of parameters; gradients go by what is handed over.
        with slots.restored({}):
            return run(params, tasks)

    return compiled.attempt(attempt, lambda: run_eagerly(params, tasks))


def refuse_uncompilable(inner: InnerLoop, tasks: Tasks) -> None:
    """Raise for what compiled code does not look at."""
    if inner.chain is not None:
        raise UncompilableError(
            'memory="block" differentiates the blocks of a model one by one (memory="step" can be compiled)'
        )
    if needs_curvature(inner.rule, 0):
        raise UncompilableError("its rule asks for curvature, which is taken from the tape")
    if inner.compiled is not None and inner.compiled.options.whole and inner.start and inner.start.functions:
        raise UncompilableError(
            "start= calls a function, which belongs to no graph of a meta-batch (compile=True takes it)"
        )
    if inner.objective.norms is not None:
        raise UncompilableError("norm= exchanges the normalisations of the model while it runs")
    refuse_model(inner.objective.model, (*tasks.rows, *inner.objective.tables))
    if not tasks.are_tensors:
        raise UncompilableError("inputs or targets are not single tensors")
    if inner.compiled is not None and inner.compiled.output_shape is not None:
        inner.objective.check_predictions(inner.compiled.output_shape)
