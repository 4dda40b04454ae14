"""Inner loops: differentiable adaptation to one task, or to a batch of tasks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metagrad.autograd.checks.lint import refuse_defects
from metagrad.autograd.unrolling.compiled import SMALL, Compiler
from metagrad.autograd.unrolling.schedule import Step
from metagrad.autograd.unrolling.steps import Arguments
from metagrad.autograd.unrolling.unroll import run_loop
from metagrad.core.budget import Memory, checked_memory, free_bytes
from metagrad.core.norms import composite_norms
from metagrad.core.tree import (
    Params,
    Tree,
    as_variable,
    constants,
    detached,
    tree_map,
    with_fresh_views,
    zeros_for_none,
)
from metagrad.memory.tracker import current, phase
from metagrad.meta.objective.norms import normalised
from metagrad.meta.objective.structured import Nested, Structured
from metagrad.meta.objective.task_loss import Loss, TaskLoss
from metagrad.meta.objective.tasks import Tasks, num_tasks, task_squares, with_task_axis
from metagrad.optim.rules import Rule, with_batch_ndim
from metagrad.sparse.tables.embedding import embedding, over


class Adaptation(NamedTuple):
    """The result of an inner loop.

    Attributes:
        params: The adapted parameters, ``[tasks, ...]`` each.
        losses: The support loss before each step, ``[tasks, steps]``.
        used: The number of steps of each task, ``[tasks]``, int64.
        rows: Indices of the rows that ``params`` holds, ``[tasks, R]``, for each table.
    """

    params: Params
    losses: Tensor
    used: Tensor
    rows: Params

    @property
    def all_losses(self) -> Tensor:
        """All computed losses, ``[tasks, steps]``."""
        return self.losses


class Evaluation(NamedTuple):
    """The losses and predictions of query examples at adapted parameters.

    Attributes:
        losses: The support loss before each step, ``[tasks, steps]``.
        used: The number of steps of each task, ``[tasks]``, int64.
        query_losses: The query losses after the last step, ``[tasks]``.
        predictions: The predictions after the last step, ``[tasks, queries, ...]``.
        path: The query loss after each step except the last, ``[tasks, steps - 1]``. It is ``[tasks, 0]`` if only the
            last loss counts.
    """

    losses: Tensor
    used: Tensor
    query_losses: Tensor
    predictions: Nested
    path: Tensor

    @property
    def all_losses(self) -> Tensor:
        """All computed losses: ``losses``, ``path`` and the last query loss, concatenated along the steps."""
        return torch.cat([self.losses, self.path, self.query_losses.unsqueeze(1)], dim=1)


@dataclass(frozen=True)
class InnerLoop:
    """The adaptation to one task, or to several vectorized tasks.

    Attributes:
        objective: The loss.
        rule: The functional optimizer of the steps.
        steps: The number of steps.
        order: 2 differentiates through inner gradients. 1 treats them as constants.
        memory: The checkpointing policy, see :func:`metagrad.unroll`.
        truncate: The number of last steps that are differentiated. None means all steps.
        tolerance: A task stops if its gradient norm is at most this number. None means that no task stops early.
        compiled: Compiles the steps. None runs them eagerly.
        start: Returns task-specific initial values of some parameters, given the model, the meta-parameters, the
            tasks and whether they are vectorized. None uses the meta-parameters.
        minimum: Attaches the derivative of a minimum to adapted parameters, given the loss, the optimizer, the
            initial parameters, the adapted parameters and the tasks. None differentiates through the steps.
        stacked: Whether tensors have a task axis in front.
        evaluates_each: Whether query losses are computed after every step, not only after the last.
    """

    objective: TaskLoss
    rule: Rule
    steps: int
    order: int
    memory: Memory
    truncate: int | None = None
    tolerance: float | None = None
    compiled: Compiler | None = None
    start: Callable[[nn.Module, Params, Tasks, bool], Params] | None = None
    minimum: Callable[[Loss, Any, Params, Params, Tasks], Params] | None = None
    stacked: bool = False
    evaluates_each: bool = False

    def of_parts(self, num_parts: int, device: torch.device, *, stacked: bool) -> InnerLoop:
        """Return the loop for one of several parts of the tasks. The parts share a memory budget."""
        rule = with_batch_ndim(self.rule, 1) if stacked else self.rule
        memory = checked_memory("MAML(...)", self.memory)
        if num_parts > 1 and memory not in ("full", "step", "sqrt", "log"):
            whole = int(free_bytes(device) if memory == "auto" else memory)
            memory = max(whole // num_parts, 1)
        return replace(self, rule=rule, memory=memory, stacked=stacked)

    def run(
        self, params: Params, tasks: Tasks, rule: Rule | None = None, start: Params | None = None
    ) -> Adaptation | Evaluation:
        """Run the steps, and evaluate on the query examples if there are any. Differentiable if grad mode is on.

        Args:
            params: The meta-parameters.
            tasks: The tasks.
            rule: The optimizer with other hyperparameters, as an argument of compiled code.
            start: The initial parameters of each task, if they are known.
        """
        start = self.start_of(params, tasks) if start is None else start
        first_param = next(iter(start.values()))
        count = (num_tasks(tasks.support_x),) if self.stacked else ()
        used = torch.zeros(count, dtype=torch.int64, device=first_param.device)
        if self.steps and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            raise RuntimeError(
                "MAML: inner steps need gradients, which torch.inference_mode() does not allow. Use "
                "torch.no_grad(), under which MAML adapts all the same."
            )
        if self.compiled is not None:
            rule = with_tensors(self.rule, first_param)
        judged = self.evaluates_each and self.steps > 1 and tasks.query_x is not None
        args = _arguments(tasks, rule, judged)
        loss, state = self._loss(tasks), (start, self.rule.init(start), used)
        first, reports = self.steps - self.num_differentiated, []
        if first:
            step = self._step(loss, keep_graph=False, passes_on=judged)
            with contextlib.nullcontext() if judged else torch.no_grad():
                state, report = self._loop(step, range(first))(state, args)
            reports.append(report)
            if not judged:
                state = constants(state)
                if self.minimum is None:
                    state = (with_history_of(start, state[0]), *state[1:])
        if first < self.steps:
            step = self._step(loss, keep_graph=torch.is_grad_enabled())
            state, report = self._loop(step, range(first, self.steps))(state, args)
            reports.append(report)
        params, _, used = state
        if self.minimum is not None:
            norms = self.objective.norms
            here = loss if norms is None else functools.partial(loss, norms=norms.support(self.steps))
            with phase("minimum"):
                params = self.minimum(here, self.rule, start, params, tasks)
        return self.results(params, *_columns(reports, used, first_param, judged), tasks)

    def results(
        self, params: Params, losses: Tensor, used: Tensor, path: Tensor, tasks: Tasks
    ) -> Adaptation | Evaluation:
        """Return adapted parameters, or the losses and predictions of query examples if there are any."""
        if tasks.query_x is not None:
            return Evaluation(losses, used, *self.evaluate(params, tasks), path)
        params, rows = (params, tasks.rows) if self.stacked else with_task_axis((params, tasks.rows))
        return Adaptation(params, losses, used, rows)

    def evaluate(self, adapted: Params, tasks: Tasks) -> tuple[Tensor, Nested]:
        """Return the losses ``[tasks]`` and predictions of query examples."""
        loss: Loss = self.to_query(tasks)._loss(tasks)
        # An eager call of a small loss is as fast, and its gradient can be differentiated again.
        if self.compiled is not None and sum(p.numel() for p in adapted.values()) > SMALL:
            loss = functools.partial(self.compiled.of(_query_loss), loss)
        with phase("query"):
            query = loss(adapted, tasks.query_x, tasks.query_y)  # type: ignore[arg-type]
        if self.compiled is not None:
            self.objective.check_predictions(query[1].shape[query[0].ndim :])  # type: ignore[union-attr]
        return query if self.stacked else with_task_axis(query)

    def to_query(self, tasks: Tasks) -> InnerLoop:
        """Return the loop with the norm statistics of the query examples."""
        if self.objective.norms is None:
            return self
        norms = self.objective.norms.query(self.steps, tasks.support_x)
        return replace(self, objective=replace(self.objective, norms=norms))

    @property
    def num_differentiated(self) -> int:
        """The number of last steps that are differentiated."""
        if self.minimum is not None:
            return 0
        if self.truncate is None or not torch.is_grad_enabled():
            return self.steps
        return min(self.truncate, self.steps)

    @property
    def differentiates_gradients(self) -> bool:
        """Whether inner gradients are differentiated."""
        return self.steps > 0 and self.order == 2 and torch.is_grad_enabled()

    def resting(self, params: Params, used: Tensor, rows: Params) -> Params:
        """Return table rows after the steps of a task that does not use these rows, so their gradients are zero.

        Without weight decay, the rows do not change.

        Args:
            params: The parameters.
            used: The number of steps of each task, ``[tasks]``.
            rows: Indices of the rows of each table, ``[tasks, R]``.
        """
        start = {name: look_up(p, rows[name]) if name in rows else p for name, p in params.items()}
        zeros = {name: torch.zeros_like(p) for name, p in start.items()}
        params, state = start, self.rule.init(start)
        first = self.steps - self.num_differentiated
        for t in range(self.steps):
            if t == first > 0:
                params, state = detached((params, state))
                params = with_history_of(start, params)
            moved, state = self.rule.update(zeros, state, params)
            active = {name: where_active(used > t, moved[name], params[name]) for name in rows}
            params = {**moved, **active}
        return {name: params[name] for name in rows}

    def start_of(self, params: Params, tasks: Tasks) -> Params:
        """Return the initial parameters of the tasks."""
        count = num_tasks(tasks.support_x) if self.stacked else None
        if self.start is None:
            return start_values(params, tasks.rows, count)
        with phase("start"), normalised(self.objective.norms):
            own = self.start(self.objective.model, params, tasks, self.stacked)
        own = {name: to_differentiate(value, params[name]) for name, value in own.items()}
        others = {name: p for name, p in params.items() if name not in own}
        values = {**start_values(others, tasks.rows, count, apart=True), **own}
        return {name: values[name] for name in params}

    def _loss(self, tasks: Tasks) -> Loss:
        objective = replace(self.objective, rows=tasks.rows)
        return objective.stacked if self.stacked else objective.single

    def _loop(self, step: Step, times: range) -> Callable[..., tuple[tuple[Any, ...], Tree]]:
        """Return a function of state and arguments that runs the steps: plain, checkpointed or compiled."""
        memory = checked_memory("MAML(...)", self.memory)
        if self.compiled is not None:
            return lambda state, args: self.compiled.unroll(step, state, Arguments(args), times, memory)  # type: ignore[union-attr]
        if torch.compiler.is_compiling() or (memory == "full" and torch.is_grad_enabled()):
            return functools.partial(_in_turn, step, times)
        return lambda state, args: run_loop(step, state, Arguments(args), times, memory)

    def _step(self, loss: Loss, keep_graph: bool, *, passes_on: bool = False) -> Step:
        """Return one step. If ``passes_on``, its Jacobian is replaced by the identity (straight-through)."""
        create_graph, norms = self.order == 2 and keep_graph, self.objective.norms

        def step(
            state: tuple[Any, ...],
            t: int,
            x: Nested,
            y: Nested,
            rule: Rule | None = None,
            query: tuple[Nested, Nested] | None = None,
        ) -> tuple[tuple[Any, ...], Tree]:
            params, rule_state, used = state
            # A step with an optimizer as its argument is compiled, and has no phases.
            with phase("inner", t) if rule is None else contextlib.nullcontext():
                here = loss if norms is None else functools.partial(loss, norms=norms.support(t))
                if torch.compiler.is_compiling():
                    losses, grads = _functional_gradients(here, params, x, y)
                else:
                    losses, _ = here(params, x, y)
                    losses, grads = self._gradients(losses, params, create_graph, t)
                grads = grads if create_graph else {name: g.detach() for name, g in grads.items()}
                moved = (self.rule if rule is None else rule).update(grads, rule_state, params)
                moved = (with_fresh_views(moved[0], params), *moved[1:])
                if passes_on:
                    moved = constants(moved)
                    moved = (with_history_of(params, moved[0]), *moved[1:])
                if self.tolerance is None:
                    new = (*moved, used + 1)
                else:
                    active = (used == t) & (task_norms(grads, losses.ndim) > self.tolerance)
                    new = (*where_active(active, moved, (params, rule_state)), used + active)
                if query is None:
                    return new, losses
                after = loss if norms is None else functools.partial(loss, norms=norms.query(t + 1, x))
                return new, (losses, self._query_losses(after, new[0], losses, t, *query))

        return step

    def _query_losses(
        self, loss: Loss, params: Params, losses: Tensor, t: int, x: Nested, y: Nested
    ) -> Tensor:
        """Return the query loss after a step. After the last step, :meth:`evaluate` computes it."""
        if not isinstance(t, Tensor) and t == self.steps - 1:
            return torch.zeros_like(losses)
        return loss(params, x, y)[0]

    def _gradients(self, losses: Tensor, params: Params, create_graph: bool, t: int) -> tuple[Tensor, Params]:
        if create_graph and t == 0:
            refuse_defects("MAML(..., order=2), at the first inner step", losses, params.values())
        # A checkpointed or compiled step frees its graph at its end.
        is_kept = create_graph or self.memory in ("step", "sqrt", "log") or self.compiled is not None
        grads = gradients_of(losses, params, create_graph, retain_graph=is_kept)
        return losses if is_kept else _of_no_graph(losses), grads


def _functional_gradients(loss: Loss, params: Params, x: Nested, y: Nested) -> tuple[Tensor, Params]:
    """Differentiate with torch.func, which torch.compile supports."""

    def total(params: Params) -> tuple[Tensor, Tensor]:
        losses, _ = loss(params, x, y)
        return losses.sum(), losses

    with composite_norms():  # torch.func has incorrect second derivatives of the fused norms
        grads, losses = torch.func.grad(total, has_aux=True)(params)
    return losses, grads


def _in_turn(
    step: Step, times: range, state: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[tuple[Any, ...], Tree]:
    """Run the steps sequentially, and store every graph."""
    collected, report = [], None
    for t in times:
        state, report = step(state, t, *args)
        collected.append(report)
    if isinstance(report, Tensor):
        return state, torch.stack(collected)
    return state, tuple(torch.stack(column) for column in zip(*collected, strict=True))


def _arguments(tasks: Tasks, rule: Rule | None, judged: bool) -> tuple[Any, ...]:
    """Return the arguments that a step gets after its state."""
    query = (tasks.query_x, tasks.query_y) if judged else None
    args = [tasks.support_x, tasks.support_y, rule, query]
    while args[-1] is None:
        args.pop()
    return tuple(args)


def _columns(reports: list, used: Tensor, like: Tensor, judged: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses ``[tasks, steps]``, the step counts, and the query losses after each step except the last."""
    used = used.reshape(-1)
    none = like.new_zeros((used.numel(), 0))
    parts = list(zip(*reports, strict=True)) if judged else [reports] if reports else []
    columns = [torch.cat(part).reshape(-1, used.numel()).t() for part in parts]
    return columns[0] if columns else none, used, columns[1][:, :-1] if judged else none


def with_history_of(starts: Params, values: Params) -> Params:
    """Return values whose cotangents go to ``starts`` (straight-through)."""
    return {name: value + (starts[name] - starts[name].detach()) for name, value in values.items()}


def task_norms(grads: Params, num_axes: int) -> Tensor:
    """Return the Euclidean norm over all parameters for each task."""
    return task_squares((g.detach() for g in grads.values()), num_axes).sqrt()


def where_active(active: Tensor, moved: Tree, stayed: Tree) -> Tree:
    """Select new or old values for each task. Tensors without a task axis, such as step counts, are new."""

    def choose(new: object, old: object) -> object:
        if not isinstance(new, Tensor) or not isinstance(old, Tensor) or new.ndim < active.ndim:
            return new
        return torch.where(over(active, new), new, old)

    return tree_map(choose, moved, stayed)


def start_values(params: Params, rows: Params, num_tasks: int | None, *, apart: bool = False) -> Params:
    """Return the initial parameters of tasks, which require grad in any grad mode.

    Args:
        params: The parameters.
        rows: The rows to select from some tables.
        num_tasks: The number of vectorized tasks. None means one task without a task axis.
        apart: Whether inner gradients must not reach other values that are computed from the parameters.
    """
    apart = apart or bool(rows)

    def start(name: str, p: Tensor) -> Tensor:
        if name in rows:
            return look_up(p, rows[name])
        return _variable(p, apart) if num_tasks is None else _repeated(p, num_tasks)

    return {name: start(name, p) for name, p in params.items()}


def to_differentiate(value: Tensor, param: Tensor) -> Tensor:
    """Return a value ``[..., *param.shape]`` as a separate variable, so that inner gradients stop at it."""
    if torch.compiler.is_compiling():
        return value
    if value.requires_grad and torch.is_grad_enabled():
        return value.view_as(value)
    return as_variable(value, param)


def look_up(table: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a table, which require grad in any grad mode."""
    values = embedding(rows, table)
    return values if values.requires_grad else values.requires_grad_()


def _variable(param: Tensor, apart: bool) -> Tensor:
    """Return a separate variable if inner gradients must not reach other values of the parameter."""
    # Without grad mode a view has no node, and would get no gradient.
    if _is_constant(param):
        return param.detach().requires_grad_()
    return param.view_as(param) if apart and torch.is_grad_enabled() else param


def _repeated(param: Tensor, num_tasks: int) -> Tensor:
    """Return the parameter for every task, without a copy."""
    if torch.is_grad_enabled() and not _is_constant(param):
        return param.expand(num_tasks, *param.shape)
    # A view that is made without grad mode requires grad, but gets no gradient.
    return param.detach().expand(num_tasks, *param.shape).requires_grad_()


def _is_constant(param: Tensor) -> bool:
    """Return whether a parameter gets no gradient. Compiled code differentiates with torch.func in any case."""
    return not param.requires_grad and not torch.compiler.is_compiling()


def _of_no_graph(losses: Tensor) -> Tensor:
    """Return losses whose graph is freed. Differentiating them raises an error with the reason."""

    def refuse(cotangent: Tensor) -> None:
        raise RuntimeError(
            "MAML(..., order=1): the graphs of the inner steps are freed at once, so out.support_losses has no "
            'gradient. Pass memory="step", which computes them again, or order=2; or detach the losses.'
        )

    losses = losses.view_as(losses)
    if losses.requires_grad:
        losses.register_hook(refuse)
    return losses


def gradients_of(
    losses: Tensor, params: Params, create_graph: bool, *, retain_graph: bool | None = None
) -> Params:
    """Return the gradients of the sum of losses. The gradient of an unused parameter is zero."""
    grads: Sequence[Tensor | None] = ()
    if losses.requires_grad:
        grads = torch.autograd.grad(
            losses,
            list(params.values()),
            torch.ones_like(losses),
            retain_graph=create_graph if retain_graph is None else retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
    if all(gradient is None for gradient in grads):
        raise ValueError(
            "MAML: the inner loss depends on none of the parameters that are adapted, so there is nothing to "
            "learn from the support examples. Does the model detach its output?"
        )
    layouts = [None if gradient is None else gradient.layout for gradient in grads]
    for name, layout in zip(params, layouts, strict=True):
        if layout not in (None, torch.strided):
            raise ValueError(
                f"MAML: the inner gradient of {name!r} is a sparse tensor, {layout}, as F.embedding(..., "
                f"sparse=True) makes it, which has no derivative. Pass sparse=[{name!r}] to MAML, which adapts the "
                "rows that are looked up, or leave sparse at False there."
            )
    return dict(zip(params, zeros_for_none(grads, params.values()), strict=True))


def outer_phase() -> contextlib.AbstractContextManager[object]:
    """Open an outer step of the memory tracker, if a tracker is open and has no open phase."""
    tracker = current()
    return contextlib.nullcontext() if tracker is None else tracker.implied_outer()


def with_tensors(rule: Rule, like: Tensor) -> Rule:
    """Return a rule with every number as a 0-d tensor, so that another number needs no recompilation.

    The numbers 0 and 1 stay numbers, since formulas depend on them. A rule omits a momentum of 0, for example.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32

    def made(leaf: object) -> object:
        if not isinstance(leaf, (int, float)) or isinstance(leaf, bool):
            return leaf
        return leaf if leaf in (0, 1) else torch.full((), leaf, dtype=dtype, device=like.device)

    return tree_map(made, rule)


def _query_loss(loss: Loss, params: Params, x: Nested, y: Nested) -> Any:
    results = loss(params, x, y)
    refuse_structured(results)
    return results


def refuse_structured(results: Sequence[Nested | None]) -> None:
    """Raise if a model returns several tensors, which compiled functions do not support."""
    for result in results:
        if isinstance(result, Structured):
            raise TypeError("the model returns several tensors (wrap one that returns the logits)")
