"""Running the tasks of a meta-batch: every feature of a call is a step of one executor."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from metagrad.autograd.compile.compiled import UncompilableError
from metagrad.autograd.derivatives.quick.attention import unfused_attention
from metagrad.core.structured import Nested
from metagrad.core.substitution import Slots
from metagrad.memory import allocator
from metagrad.meta.execution.nonfinite import Buffers, GradientCheck, Learned, LossCheck, Nonfinite
from metagrad.meta.execution.stacking import Attempt, Comparison, Stacking, has_convolutions, structure_of
from metagrad.meta.execution.tables import find_rows
from metagrad.meta.inner.compiled import refuse_model
from metagrad.meta.inner.loop import Adaptation, Evaluation, InnerLoop, outer_phase, phase, start_values
from metagrad.meta.inner.shared import SharingCall, shared_slots
from metagrad.meta.objective.features import SplitLayers, split_layers
from metagrad.meta.objective.task_loss import TaskLoss
from metagrad.meta.objective.tasks import Tasks, concatenated
from metagrad.optim.rules import Params, Rule

T = TypeVar("T")


class Outcome(NamedTuple):
    """The results of the tasks of a meta-batch.

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
        with (
            outer_phase(),
            unfused_attention if self.inner.differentiates_gradients else contextlib.nullcontext(),
        ):
            while (part := losses.remaining) is not None:
                chunk = self._chunk_size(part)
                check = GradientCheck(self._learned, part, losses.numbers, skipped, self._again, self.name)
                if (kept := self._kept_batch(part, chunk, check)) is not None:
                    losses.record(kept[0], are_finite=kept[1])
                    continue
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
        if self.sparse:
            rows = find_rows(objective.model, self.sparse, tasks.inputs, chunk, objective.norms)
            tasks = tasks._replace(rows=rows)
        parts = list(tasks.split(chunk))
        if len(parts) > 1:
            allocator.advise(f"{self.name}(...), by {len(parts)} parts of the tasks", params.values())
        inner = self._loop(rule, len(parts), tasks.device, stacked=chunk != 1)
        inner, parts = self._with_features(inner, parts)
        run = inner.adapt if tasks.query_x is None else inner.evaluate
        run = run if inner.compiled is None else functools.partial(self._compiled, inner)
        return concatenated(list(map(functools.partial(run, params), parts)))  # without a frame of its own

    def _loop(self, rule: Rule, num_parts: int, device: torch.device, *, stacked: bool) -> InnerLoop:
        """Return the inner loop of one of several parts of the tasks."""
        if rule is not self.inner.rule:
            return dataclasses.replace(self.inner, rule=rule).of_parts(num_parts, device, stacked=stacked)
        make = functools.partial(self.inner.of_parts, num_parts, device, stacked=stacked)
        return self._once(("loop", stacked), make) if num_parts == 1 else make()

    def _compiled(self, inner: InnerLoop, params: Params, tasks: Tasks) -> Evaluation | Adaptation:
        """Run an inner loop compiled, or eagerly as fallback."""
        compiled, objective = inner.compiled, inner.objective
        assert compiled is not None
        shared = self._shared(objective)
        inner = dataclasses.replace(inner, shared=shared) if shared else inner

        def of(loop: InnerLoop) -> Callable[[Params, Tasks], Evaluation | Adaptation]:
            return loop.adapt if tasks.query_x is None else loop.evaluate

        def attempt() -> Evaluation | Adaptation:
            self._once(_described(tasks), lambda: refuse_uncompilable(inner, tasks))
            if compiled.output_shape is not None:
                objective.check_predictions(compiled.output_shape)
            # Guards look at the parameters of modules; gradients flow to the tensors that are handed over.
            with self._slots.restored({}):
                if not inner.may_be_one_graph or tasks.query_x is None:
                    return of(inner)(params, tasks)
                count = tasks.count if inner.stacked else None
                start = functools.partial(start_values, params, tasks.rows, count)
                rule = compiled.rule(inner.rule, next(iter(params.values())), start, inner.steps)
                evaluate, args = _evaluation(inner), (shared, params, tasks, rule)
                if not (compiled.options.whole or compiled.is_small(evaluate, args, inner.steps, count or 1)):
                    return of(inner)(params, tasks)
                *results, _ = compiled.whole_batch(evaluate, *args)
                return Evaluation(*results)

        return compiled.attempt(
            attempt, lambda: of(dataclasses.replace(inner, compiled=None, shared={}))(params, tasks)
        )

    def _kept_batch(self, tasks: Tasks, chunk: int, check: GradientCheck) -> tuple[Evaluation, bool] | None:
        """Evaluate all tasks by code that was compiled before, and look at gradients where it computes them.

        That is a call of a graph, once the guards of its code have passed; None where there is no such code. The
        results may be known to be finite, with their gradient.
        """
        compiled, described = self.inner.compiled, _described(tasks)
        if (
            described not in self._made
            or chunk < max(tasks.count, 2)
            or not check.is_on
            or self._split is not None
        ):
            return None
        if (
            compiled is None
            or not self.inner.may_be_one_graph
            or tasks.query_x is None
            or not compiled.meta_batch.gradient.has_kept
            or not compiled.is_available
        ):
            return None
        if compiled.output_shape is not None:
            self.inner.objective.check_predictions(compiled.output_shape)
        inner = self._loop(self.inner.rule, 1, tasks.device, stacked=True)
        evaluate = self._once("whole", lambda: _evaluation(inner))
        start = functools.partial(start_values, self.params, tasks.rows, tasks.count)
        rule = compiled.rule(inner.rule, next(iter(self.params.values())), start, inner.steps)
        args = self._shared(inner.objective), self.params, tasks, rule
        if (found := compiled.kept_batch(evaluate, args, check.looking_at)) is None:
            return None
        (*results, mean), are_finite = found
        return Evaluation(*results, mean=mean if self.nonfinite == "raise" else None), are_finite

    def _with_features(self, inner: InnerLoop, parts: list[Tasks]) -> tuple[InnerLoop, list[Tasks]]:
        """Replace inputs by features, where the first layers compute the same at every inner step."""
        # Functions of start= are handed the inputs.
        if inner.start is not None and inner.start.functions:
            return inner, parts
        if not all(isinstance(x, Tensor) for x in parts[0].inputs):
            return inner, parts
        split = self._split
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

    def _shared(self, objective: TaskLoss) -> Params:
        """Return the parameters that are learned and do not adapt, as compiled code is handed them."""
        slots = self._once(("shared", objective.layers), lambda: shared_slots(objective, self.params))
        return {name: kept[key] for name, kept, key in slots}

    def _chunk_size(self, tasks: Tasks) -> int:
        return self.stacking.chunk_size(
            tasks.count, self._structure, functools.partial(self.comparison, tasks)
        )

    def comparison(self, tasks: Tasks) -> Comparison:
        """Return what shows whether tasks may be stacked."""
        inner = self.inner
        return Comparison(inner.compared, self.params, tasks, self.sparse, inner.order, inner.start)

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made under a key, by the first call with it."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    # What follows depends on the modules as they were when this was made.

    @functools.cached_property
    def _made(self) -> dict[Hashable, Any]:
        """What :meth:`_once` has made."""
        return {}

    @functools.cached_property
    def _learned(self) -> Learned:
        """The tensors that gradients are taken of."""
        return Learned(self.params, self.inner.rule, self._modules)

    @functools.cached_property
    def _structure(self) -> Hashable:
        """What changes when the tasks must be examined again."""
        objective, start = self.inner.objective, self.inner.start
        policy = None if objective.norms is None else objective.norms.norms.policy
        functions = () if start is None else tuple(id(function) for _, function in start.functions)
        return structure_of(objective.model), tuple(self.params), functions, policy

    @functools.cached_property
    def _split(self) -> SplitLayers | None:
        """The layers whose features are computed once, and the others; None if there are none of the former."""
        objective = self.inner.objective
        own = {id(p) for p in self.params.values()}
        return split_layers(objective.model, own, None if objective.norms is None else objective.norms.norms)

    @functools.cached_property
    def _slots(self) -> Slots:
        """The parameters of the model and the loss, before others take their places."""
        objective = self.inner.objective
        parts = () if self.inner.compiled is None else (objective.model, objective.loss_fn)
        return Slots([part for part in parts if isinstance(part, nn.Module)])

    @property
    def _modules(self) -> list[nn.Module]:
        """The model, and beside it modules whose parameters are learned alone: a loss, a start, norms of steps."""
        objective = self.inner.objective
        parts = (objective.model, objective.loss_fn, *self.inner.modules)
        return [part for part in parts if isinstance(part, nn.Module)]


def _evaluation(inner: InnerLoop) -> SharingCall:
    """Return what one graph of a meta-batch computes."""
    return SharingCall(
        inner.objective, _WithMean(dataclasses.replace(inner, compiled=None, shared={}).evaluate)
    )


class _WithMean(NamedTuple):
    """A function that evaluates, with the mean of the query losses as its last result; guards match it by value."""

    evaluate: Callable[..., Evaluation]

    def __call__(self, *args: Any) -> tuple[Nested | None, ...]:
        """Call the function."""
        results = self.evaluate(*args)
        return (*results[:-1], results.query_losses.mean())


def _described(tasks: Tasks) -> Hashable:
    """Return the key under which it is kept that such tasks can be compiled."""
    return "compilable", tasks.are_tensors, tuple(tasks.rows)


def refuse_uncompilable(inner: InnerLoop, tasks: Tasks) -> None:
    """Raise for what compiled code does not look at."""
    if inner.compiled is not None and inner.compiled.options.whole and inner.start and inner.start.functions:
        raise UncompilableError(
            "start= calls a function, which belongs to no graph of a meta-batch (compile=True takes it)"
        )
    if inner.objective.norms is not None:
        raise UncompilableError("norm= exchanges the normalisations of the model while it runs")
    refuse_model(inner.objective.model, (*tasks.rows, *inner.objective.tables))
    if not tasks.are_tensors:
        raise UncompilableError("inputs or targets are not single tensors")
