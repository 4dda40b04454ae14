"""The executor runs the tasks of a meta-batch.

Every feature of a call is one step of :meth:`TaskExecutor.run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metagrad.core import _torch
from metagrad.core.capture import RandomState
from metagrad.core.modules import ModuleSnapshot, buffer_versions
from metagrad.core.norms import unfused_attention
from metagrad.core.tree import Params
from metagrad.meta.execution.compiled import evaluated, is_one_graph, refusal
from metagrad.meta.execution.examination import Examination, Findings
from metagrad.meta.execution.nonfinite import GradientCheck, LearnedTensors, Nonfinite, finite_tasks, merged
from metagrad.meta.execution.tables import find_rows
from metagrad.meta.execution.vectorization import (
    Vectorization,
    loop_reason,
    may_be_of_vmap,
    prefers_loop,
    structure_of,
)
from metagrad.meta.inner.loop import Adaptation, Evaluation, InnerLoop, outer_phase
from metagrad.meta.objective.tasks import Tasks, concatenated
from metagrad.optim.rules import Rule


class Outcome(NamedTuple):
    """The results of the tasks of a meta-batch.

    Attributes:
        results: An :class:`Evaluation` if there are query examples, otherwise an :class:`Adaptation`.
        skipped: Whether each task was excluded, ``[tasks]``, bool.
        chunk: How many tasks ran in one vectorized pass. 1 means a Python loop without vmap.
    """

    results: Evaluation | Adaptation
    skipped: Tensor
    chunk: int


@dataclass(frozen=True)
class TaskExecutor:
    """Adapts to all tasks of a meta-batch, and evaluates on their query examples if there are any.

    Attributes:
        inner: The inner loop, with the objective.
        params: The initial parameters of all tasks.
        sparse: Names of embedding tables. Each task adapts only the rows that it uses.
        nonfinite: The treatment of losses and meta-gradients that are NaN or Inf.
        vectorization: Decides how many tasks run in one vectorized pass.
        name: Name of the algorithm in errors.
    """

    inner: InnerLoop
    params: Params
    sparse: tuple[str, ...]
    nonfinite: Nonfinite
    vectorization: Vectorization
    name: str = "MAML"

    def run(self, tasks: Tasks, numbers: Tensor | None = None, skipped: Tensor | None = None) -> Outcome:
        """Run the tasks, in these steps.

        1. Examine one task of the first batch, which decides how many tasks run in one vectorized pass.
        2. Open an outer phase of the memory tracker.
        3. Add a check of the gradients of parameters, hyperparameters and modules.
        4. Run the tasks, eagerly or compiled. If torch.vmap raises, run them in a Python loop.
        5. If a loss is NaN or Inf, raise, or run the other tasks again.

        Args:
            tasks: The tasks.
            numbers: The numbers of the tasks, if they are only a part of the meta-batch, ``[tasks]``.
            skipped: Output that marks excluded tasks, ``[tasks of the meta-batch]``, bool.
        """
        if skipped is None:
            skipped = torch.zeros(tasks.count, dtype=torch.bool, device=tasks.device)
        marks = skipped if self.nonfinite == "skip" else None
        structure, model = self._structure(), self.inner.objective.model
        found = self.vectorization.findings(structure, functools.partial(self._examined, tasks))
        if found.rerun is not None and not self.inner.objective.by_copy:
            return self._by_copy().run(tasks, numbers, skipped)
        before = None if marks is None else ModuleSnapshot(model.modules(), {}, math.inf)
        with outer_phase(), self._attention():
            if found.functions:
                self._tell(found.functions)
            chunk = self.vectorization.chunk_size(tasks.count, found.loop)
            if chunk > 1 and (whole := self._one_graph(tasks, chunk)) is not None:
                return Outcome(whole, skipped, chunk)
            check = GradientCheck(self._learned(), tasks, numbers, marks, self._again, self.name)
            random = None if chunk == 1 or structure in self.vectorization.ran else RandomState()
            versions = buffer_versions(model)
            with check.inputs() as (params, rule):
                self._begin()
                try:
                    results = self.compute(params, rule, tasks, chunk)
                except Exception as error:
                    self._refuse_dtype(tasks, error)
                    if chunk == 1 or not may_be_of_vmap(error):
                        raise
                    if random is not None:
                        random.restore()
                    self._begin()
                    results, chunk = self.compute(params, rule, tasks, 1), 1
                    self.vectorization.give_up(structure, error)
            if chunk != 1:
                self.vectorization.ran.add(structure)
                self._refuse_written(versions)
            results = check.outputs(results)
            finite = finite_tasks(results, self.nonfinite, self.name)
            if finite is not None:
                assert before is not None
                before.put_back(values=True)
                return self._without(tasks, results, finite, numbers, skipped)
        if self.inner.objective.norms is not None:
            self.inner.objective.norms.norms.finish()
        return Outcome(results, skipped, chunk)

    def _without(
        self, tasks: Tasks, results: Any, finite: Tensor, numbers: Tensor | None, skipped: Tensor
    ) -> Outcome:
        """Run again without the tasks whose losses are NaN or Inf."""
        every = torch.arange(tasks.count, device=tasks.device) if numbers is None else numbers
        skipped[every[~finite]] = True
        some = self.run(tasks.select(finite.nonzero().flatten()), every[finite], skipped)
        return some._replace(results=merged(results, some.results, finite.nonzero().flatten()))

    def _refuse_dtype(self, tasks: Tasks, error: Exception) -> None:
        """Raise ``TypeError`` if an error may be due to inputs of another dtype than the parameters."""
        dtypes = {p.dtype for p in self.inner.objective.model.parameters()}
        for name, x in (("support.x", tasks.support_x), ("query.x", tasks.query_x)):
            if isinstance(x, Tensor) and x.is_floating_point() and dtypes and x.dtype not in dtypes:
                raise TypeError(
                    f"{self.name}(batch): the model raises an error for inputs of another dtype. Expected {name} in "
                    f"{min(map(str, dtypes))}, as the parameters, got {x.dtype}. Convert the batch or the model."
                ) from error

    def _begin(self) -> None:
        if self.inner.objective.norms is not None:
            self.inner.objective.norms.norms.begin()

    def _refuse_written(self, versions: list[tuple[int, int]]) -> None:
        if buffer_versions(self.inner.objective.model) != versions:
            raise RuntimeError(
                f"{self.name}: the model writes into a buffer, which it did not do when it was examined on its "
                "first batch. Stacked tasks did so once for all of them; pass task_chunk=1, and they run one by one."
            )

    def _attention(self) -> contextlib.AbstractContextManager[object]:
        return unfused_attention() if self.inner.differentiates_gradients else contextlib.nullcontext()

    def compute(self, params: Params, rule: Rule, tasks: Tasks, chunk: int) -> Evaluation | Adaptation:
        """Compute tasks, ``chunk`` of them in one vectorized pass. 1 means a Python loop without vmap."""
        parts = list(self._with_rows(tasks, chunk).split(chunk))
        inner = self.inner if rule is self.inner.rule else dataclasses.replace(self.inner, rule=rule)
        inner = inner.of_parts(len(parts), tasks.device, stacked=chunk != 1)
        run = inner.run if inner.compiled is None else functools.partial(self._compiled, inner)
        return concatenated(list(map(functools.partial(run, params), parts)))  # a helper would add a frame

    def _with_rows(self, tasks: Tasks, chunk: int) -> Tasks:
        """Find the table rows that the tasks use."""
        objective = self.inner.objective
        rows = find_rows(objective.model, self.sparse, tasks.inputs, chunk, objective.norms)
        return tasks._replace(rows=rows)

    def _one_graph(self, tasks: Tasks, chunk: int) -> Evaluation | None:
        """Evaluate a small meta-batch with one compiled function. Return None if that is not possible."""
        inner = self.inner
        if inner.compiled is None or chunk < tasks.count or not is_one_graph(inner, self.params, tasks):
            return None

        def again(params: Params, rule: Rule) -> Evaluation:
            eager = dataclasses.replace(inner, compiled=None, rule=rule)
            results = dataclasses.replace(self, inner=eager, params=params).run(tasks).results
            assert isinstance(results, Evaluation)
            return results

        return inner.compiled.attempt(
            lambda: evaluated(inner, self.params, tasks, again), lambda: None, refusal(inner, tasks)
        )

    def _compiled(self, inner: InnerLoop, params: Params, tasks: Tasks) -> Evaluation | Adaptation:
        """Run an inner loop compiled, or eagerly if that is not possible."""
        assert inner.compiled is not None
        eager = dataclasses.replace(inner, compiled=None)
        return inner.compiled.attempt(
            lambda: inner.run(params, tasks), lambda: eager.run(params, tasks), refusal(inner, tasks)
        )

    def _again(self, params: Params, rule: Rule, tasks: Tasks) -> Evaluation | Adaptation:
        """Compute a task eagerly with ``memory="full"``, and restore the buffers."""
        before = ModuleSnapshot(self.inner.objective.model.modules(), {}, math.inf)
        inner = dataclasses.replace(self.inner, memory="full", compiled=None)
        results = dataclasses.replace(self, inner=inner).compute(params, rule, tasks, chunk=1)
        before.put_back(values=True)
        return results

    def _examined(self, tasks: Tasks) -> Findings | None:
        """Examine the first task. Return None if it raises.

        Raises:
            ValueError: The gradient of a module would be wrong.
        """
        if _torch.functorch_is_active():
            return Findings(self._loop_reason(tasks))
        found = self._examination(tasks).findings(self._loop_reason(tasks))
        if found is None or found.rerun is None:
            return found
        advice = "Call metagrad.checkpoint in place of torch.utils.checkpoint."
        if self.inner.objective.norms is not None:
            raise ValueError(
                f"{self.name}(..., norm): {found.rerun} runs again in the backward pass, where normalization layers "
                f"do not follow norm. {advice}"
            )
        again = self._by_copy()._examination(tasks).findings(loop="")
        if again is not None and again.rerun is not None:
            raise ValueError(
                f"{self.name}(batch): {again.rerun} runs again in the backward pass, where it has not the parameters "
                f"of the task: a hook, a Function or a closure holds the module itself. {advice}"
            )
        loop = found.loop if found.loop == "" else f"{found.rerun} runs again in the backward pass"
        return found._replace(loop=loop)

    def _loop_reason(self, tasks: Tasks) -> str | None:
        """Return why tasks cannot be vectorized if the modules show it, "" if a loop is faster, or None."""
        objective, task_chunk = self.inner.objective, self.vectorization.task_chunk
        prefers = task_chunk is None and prefers_loop(objective.model, tasks.device.type, self.params)
        return "" if prefers or task_chunk == 1 else loop_reason(objective.model, objective.norms is not None)

    def _examination(self, tasks: Tasks) -> Examination:
        first = next(iter(self._with_rows(tasks.select(slice(0, 1)), 1).split(1)))
        probe = functools.partial(self.probe, first)
        return Examination(self.name, self.inner.objective.model, self._modules, self.params, probe)

    def _by_copy(self) -> TaskExecutor:
        """Return an executor that calls copies of the model, which keep their parameters for the backward pass."""
        objective = dataclasses.replace(self.inner.objective, by_copy=True)
        return dataclasses.replace(self, inner=dataclasses.replace(self.inner, objective=objective))

    def query_loop(self, tasks: Tasks) -> InnerLoop:
        """Return the inner loop for query examples."""
        is_known = self.vectorization.findings(self._structure()).rerun is not None
        return (self._by_copy() if is_known else self).inner.to_query(tasks)

    def _tell(self, functions: Sequence[str]) -> None:
        """Do not compile custom Functions, and warn that they are differentiated twice."""
        what = f"the model's graph has the custom autograd.Function {', '.join(functions)}"
        if self.inner.compiled is not None:
            self.inner.compiled.reason = f"{what}, whose derivatives torch.compile may compute incorrectly"
        if self.inner.differentiates_gradients:
            self.vectorization.warn_once(
                f"{self.name}: {what}, which is differentiated twice. torch does not check that this is correct. Run "
                "metagrad.preflight, which compares it with finite differences."
            )

    def probe(self, task: Tasks, params: Params) -> Tensor:
        """Return the loss of one task at some parameters, without a task axis."""
        start = self.inner.start_of(params, task)
        objective = dataclasses.replace(self.inner.objective, rows=task.rows)
        return objective.single(start, task.support_x, task.support_y)[0]

    def _learned(self) -> LearnedTensors:
        return LearnedTensors(self.params, self.inner.rule, self._modules)

    def _structure(self) -> Hashable:
        """Return a key that changes if a task must be examined again."""
        objective = self.inner.objective
        policy = None if objective.norms is None else objective.norms.norms.policy
        modes = _torch.functorch_is_active(), torch.is_inference_mode_enabled()
        return structure_of(objective.model), tuple(self.params), policy, modes

    @property
    def _modules(self) -> list[nn.Module]:
        """The model, and modules that are learned but not adapted: a loss, and the norms of each step."""
        objective = self.inner.objective
        per_step = None if objective.norms is None else objective.norms.norms.per_step
        parts = (objective.model, objective.loss_fn, per_step)
        return [part for part in parts if isinstance(part, nn.Module)]
