"""Inner loops: the adaptation of one task, or of a batch of tasks at once, as a differentiable unroll."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metagrad import memory as memory_tracking
from metagrad.autograd.checks.lint import refuse_defects
from metagrad.autograd.unrolling.compiled import Compiler
from metagrad.autograd.unrolling.schedule import Step
from metagrad.autograd.unrolling.unroll import unroll
from metagrad.core._torch import without_torch_function
from metagrad.core.budget import Memory, checked_memory, free_bytes
from metagrad.core.norms import composite_norms
from metagrad.core.structured import Nested
from metagrad.core.tree import Tree, constants, detached, tree_map, zeros_for_none
from metagrad.hypergrad.implicit import ImplicitMethod
from metagrad.meta.inner.compiled import query_loss, with_tensors
from metagrad.meta.inner.minimum import Proximal, at_minimum
from metagrad.meta.inner.start import OwnStart
from metagrad.meta.objective.norms import normalised
from metagrad.meta.objective.task_loss import Loss, TaskLoss
from metagrad.meta.objective.tasks import Tasks, num_tasks, task_squares, with_task_axis
from metagrad.optim.rules import Params, Rule, with_batch_ndim
from metagrad.sparse.tables.embedding import embedding, over


class Adaptation(NamedTuple):
    """The result of an inner loop.

    Attributes:
        params: The adapted parameters, ``[tasks, ...]`` each.
        losses: The loss before each step, ``[tasks, steps]``.
        used: How many steps were taken, ``[tasks]``, int64.
        rows: Which rows of a table its parameter holds, ``[tasks, R]``, by the name of the table.
    """

    params: Params
    losses: Tensor
    used: Tensor
    rows: Params

    @property
    def all_losses(self) -> Tensor:
        """Every loss that was computed, ``[tasks, steps]``."""
        return self.losses


class Evaluation(NamedTuple):
    """The losses and predictions of query examples at adapted parameters.

    Attributes:
        losses: The support loss before each step, ``[tasks, steps]``.
        used: How many steps were taken, ``[tasks]``, int64.
        query_losses: After the last step, ``[tasks]``.
        predictions: After the last step, ``[tasks, queries, ...]``.
        path: The query loss after each step but the last, ``[tasks, steps - 1]``; ``[tasks, 0]`` or None where the
            last alone counts.
        objectives: What counts in the meta-objective, ``[tasks]``, where that is not the query losses; None else.
        mean: Of the query losses, if the graph that computed them has computed it too.
    """

    losses: Tensor
    used: Tensor
    query_losses: Tensor
    predictions: Nested
    path: Tensor | None = None
    objectives: Tensor | None = None
    mean: Tensor | None = None

    @property
    def all_losses(self) -> Tensor:
        """Every loss that was computed: ``[tasks, steps]``, those of ``path`` and the last query loss.

        An objective that is not finite takes the place of the last.
        """
        path, last = [] if self.path is None else [self.path], self.query_losses
        if self.objectives is not None:
            last = torch.where(self.objectives.isfinite(), last, self.objectives)
        return torch.cat([self.losses, *path, last.unsqueeze(1)], dim=1)


QUERY_LOSSES, MEAN = map(Evaluation._fields.index, ("query_losses", "mean"))
"""The places of fields among the tensors of an evaluation."""


@dataclass(frozen=True)
class InnerLoop:
    """How tasks are adapted to: one of them, or several at once.

    Attributes:
        objective: The loss.
        rule: The functional optimizer that takes the steps.
        steps: How many steps are taken.
        order: 2 differentiates through the gradient, 1 takes it as a constant.
        memory: What :func:`metagrad.unroll` keeps.
        truncate: How many of the last steps are differentiated through; None means all.
        tolerance: The gradient norm at which a task stops; None means that it never does.
        compiled: Compiles steps; None compiles nothing.
        start: What parameters start from in each task; None means from the meta-parameters.
        stacked: Whether tasks have an axis of their own, in front.
        judges_each: Whether query losses are computed after every step, and not after the last alone.
        proximal: The weight of the squared distance to the start in the loss; None has none.
        hypergradient: The method of implicit differentiation; None differentiates through the steps.
    """

    objective: TaskLoss
    rule: Rule
    steps: int
    order: int
    memory: Memory
    truncate: int | None = None
    tolerance: float | None = None
    compiled: Compiler | None = None
    start: OwnStart | None = None
    stacked: bool = False
    judges_each: bool = False
    proximal: float | Tensor | None = None
    hypergradient: ImplicitMethod | None = None

    def of_parts(self, num_parts: int, device: torch.device, *, stacked: bool) -> InnerLoop:
        """Return the loop of one of several parts of the tasks, whose graphs share a budget."""
        rule = with_batch_ndim(self.rule, 1) if stacked else self.rule
        memory = checked_memory("MAML(...)", self.memory)
        if num_parts > 1 and memory not in ("full", "step", "sqrt"):
            whole = int(free_bytes(device) if memory == "auto" else memory)
            memory = max(whole // num_parts, 1)
        return replace(self, rule=rule, memory=memory, stacked=stacked)

    def adapt(self, params: Params, tasks: Tasks) -> Adaptation:
        """Adapt to support examples."""
        adapted, losses, used, _ = self.run(params, tasks)
        rows = tasks.rows
        if not self.stacked:
            adapted, rows = with_task_axis((adapted, rows))
        return Adaptation(adapted, losses, used, rows)

    def evaluate(self, params: Params, tasks: Tasks, rule: Rule | None = None) -> Evaluation:
        """Adapt to support examples, and compute the loss of query examples; takes what :meth:`run` does."""
        adapted, losses, used, path = self.run(params, tasks, rule)
        return Evaluation(losses, used, *self.judge(adapted, tasks), path)

    def judge(self, adapted: Params, tasks: Tasks) -> tuple[Tensor, Nested]:
        """Return losses ``[tasks]`` and predictions of query examples."""
        loss: Loss = self.to_query(tasks)._loss(tasks)
        if self.compiled is not None:
            loss = functools.partial(query_loss, self.compiled, loss)
        with phase("query"):
            query = loss(adapted, tasks.query_x, tasks.query_y)  # type: ignore[arg-type]
        return query if self.stacked else with_task_axis(query)

    def run(
        self, params: Params, tasks: Tasks, rule: Rule | None = None, start: Params | None = None
    ) -> tuple[Params, Tensor, Tensor, Tensor]:
        """Take the steps; differentiable where grad mode is on.

        Args:
            params: What tasks start from.
            tasks: The tasks.
            rule: The rule with other hyper-parameters, as compiled code is handed it.
            start: What each task starts from, where that is known.

        Returns:
            Adapted parameters, losses ``[tasks, steps]``, numbers of steps taken ``[tasks]``, and query losses on
            the way ``[tasks, steps - 1]``, or ``[tasks, 0]``.
        """
        start = self.start_of(params, tasks) if start is None else start
        first_param = next(iter(start.values()))
        count = (num_tasks(tasks.support_x),) if self.stacked else ()
        used = torch.zeros(count, dtype=torch.int64, device=first_param.device)
        if self.steps == 0:
            none = first_param.new_zeros((used.numel(), 0))
            return start, none, used.reshape(-1), none
        _refuse_inference_mode()
        if self.compiled is not None:
            rule = with_tensors(self.rule, first_param)
        judged = self.judges_each and self.steps > 1 and tasks.query_x is not None
        proximal = self.proximal_to(start)
        args = _arguments(tasks, rule, judged, proximal)
        loss, state = self._loss(tasks), (start, self.rule.init(start), used)
        first, reports = self.steps - self.num_differentiated, []
        if first:
            step = self._step(loss, keep_graph=False, passes_on=judged)
            with contextlib.nullcontext() if judged else torch.no_grad():
                state, report = self._loop(step, range(first))(state, *args)
            reports.append(report)
            if not judged:
                state = constants(state)
                if self.hypergradient is None:
                    state = (with_history_of(start, state[0]), *state[1:])
        if first < self.steps:
            step = self._step(loss, keep_graph=torch.is_grad_enabled())
            state, report = self._loop(step, range(first, self.steps))(state, *args)
            reports.append(report)
        params, _, used = state
        if self.hypergradient is not None:
            norms = self.objective.norms
            here = loss if norms is None else functools.partial(loss, norms=norms.support(self.steps))
            with phase("minimum"):
                params = at_minimum(here, params, tasks, proximal, self.hypergradient)
        losses, path = _columns(reports, used.numel(), judged)
        return params, losses, used.reshape(-1), path

    @property
    def modules(self) -> list[nn.Module]:
        """The modules beside model and loss of which something may be learned."""
        norms = None if self.objective.norms is None else self.objective.norms.norms.per_step
        return [*([] if norms is None else [norms]), *([] if self.start is None else self.start.modules)]

    def to_query(self, tasks: Tasks) -> InnerLoop:
        """Return the loop with the objective as it is for query examples after the steps."""
        if self.objective.norms is None:
            return self
        norms = self.objective.norms.query(self.steps, tasks.support_x)
        return replace(self, objective=replace(self.objective, norms=norms))

    @property
    def num_differentiated(self) -> int:
        """How many of the last steps a result is differentiated through."""
        if self.hypergradient is not None:
            return 0
        if self.truncate is None or not torch.is_grad_enabled():
            return self.steps
        return min(self.truncate, self.steps)

    @property
    def differentiates_gradients(self) -> bool:
        """Whether gradients of a loss are differentiated."""
        return self.steps > 0 and self.order == 2 and torch.is_grad_enabled()

    def proximal_to(self, start: Params) -> Proximal | None:
        """Return the proximal term of tasks that start from these values."""
        return None if self.proximal is None else Proximal(start, self.proximal)

    def resting(self, params: Params, used: Tensor, rows: Params) -> Params:
        """Return what table rows that a task does not look up become in its steps, with a gradient of zero.

        Without weight decay, those are the rows themselves.

        Args:
            params: The parameters.
            used: How many steps each task took, ``[tasks]``.
            rows: The rows, ``[tasks, R]``, by the name of the table.
        """
        start = {name: look_up(p, rows[name]) if name in rows else p for name, p in params.items()}
        zeros = {name: torch.zeros_like(p) for name, p in start.items()}
        params, state = start, self.rule.init(start)
        first = self.steps - self.num_differentiated
        for t in range(self.steps):
            if t == first > 0:
                params, state = detached((params, state))
                params = with_history_of(start, params)
            grads = zeros
            if (proximal := self.proximal_to(start)) is not None:
                grads = _with_proximal(zeros, params, proximal, self.order == 2)
            moved, state = self.rule.update(grads, state, params)
            active = {name: where_active(used > t, moved[name], params[name]) for name in rows}
            params = {**moved, **active}
        return {name: params[name] for name in rows}

    def start_of(self, params: Params, tasks: Tasks) -> Params:
        """Return what tasks start from, given the meta-parameters."""
        count = num_tasks(tasks.support_x) if self.stacked else None
        if self.start is None:
            return start_values(params, tasks.rows, count)
        with phase("start"), normalised(self.objective.norms):
            own = self.start.values(self.objective.model, params, tasks, stacked=self.stacked)
        others = {name: p for name, p in params.items() if name not in own}
        values = {**start_values(others, tasks.rows, count, apart=True), **own}
        return {name: values[name] for name in params}

    def _loss(self, tasks: Tasks) -> Loss:
        objective = replace(self.objective, rows=tasks.rows)
        return objective.stacked if self.stacked else objective.single

    def _loop(self, step: Step, times: range) -> Callable[..., tuple[tuple[Any, ...], Tree]]:
        """Return the function that runs the steps, given a state and arguments: traced, eager, or compiled."""
        if torch.compiler.is_compiling():
            return functools.partial(_traced, step, times)
        if self.compiled is None:
            late = _from(step, times.start) if times.start else step
            return functools.partial(unroll, late, steps=len(times), memory=self.memory)
        compiled, memory = self.compiled, checked_memory("MAML(...)", self.memory)
        return lambda state, *args: compiled.unroll(step, state, args, times, memory)

    def _step(self, loss: Loss, keep_graph: bool, *, passes_on: bool = False) -> Step:
        """Return one step; one that ``passes_on`` takes its cotangent to be that of the parameters before it."""
        create_graph, norms = self.order == 2 and keep_graph, self.objective.norms

        def step(
            state: tuple[Any, ...],
            t: int,
            x: Nested,
            y: Nested,
            rule: Rule | None = None,
            query: tuple[Nested, Nested] | None = None,
            proximal: Proximal | None = None,
        ) -> tuple[tuple[Any, ...], Tree]:
            params, rule_state, used = state
            # A step with a rule as its argument is compiled, without phases.
            with phase("inner", t) if rule is None else contextlib.nullcontext():
                here = loss if norms is None else functools.partial(loss, norms=norms.support(t))
                losses, grads = self._gradients(here, params, x, y, create_graph, t)
                if proximal is not None:
                    grads = _with_proximal(grads, params, proximal, create_graph)
                moved = (self.rule if rule is None else rule).update(grads, rule_state, params)
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
        """Return the query loss after a step; after the last one :meth:`evaluate` computes it, with predictions."""
        if not isinstance(t, Tensor) and t == self.steps - 1:
            return torch.zeros_like(losses)
        return loss(params, x, y)[0]

    def _gradients(
        self, loss: Loss, params: Params, x: Nested, y: Nested, create_graph: bool, t: int
    ) -> tuple[Tensor, Params]:
        if torch.compiler.is_compiling():
            return _functional_gradients(loss, params, x, y, self.order)
        losses, _ = loss(params, x, y)
        if create_graph and t == 0:
            refuse_defects("MAML(..., order=2), at the first inner step", losses, params.values())
        # A step that is computed again, as that of compiled code is, frees its graph at its end.
        is_kept = create_graph or self.memory in ("step", "sqrt") or self.compiled is not None
        grads = gradients_of(losses, params, create_graph, retain_graph=is_kept)
        losses = losses if is_kept else _of_no_graph(losses)
        return losses, grads if create_graph else {name: g.detach() for name, g in grads.items()}


def _functional_gradients(
    loss: Loss, params: Params, x: Nested, y: Nested, order: int
) -> tuple[Tensor, Params]:
    """Differentiate by torch.func, which torch.compile takes."""

    def total(params: Params) -> tuple[Tensor, Tensor]:
        losses, _ = loss(params, x, y)
        return losses.sum(), losses

    with composite_norms():  # torch.func has wrong second derivatives of the fused ones
        grads, losses = torch.func.grad(total, has_aux=True)(params)
    return losses, grads if order == 2 else {name: g.detach() for name, g in grads.items()}


def _refuse_inference_mode() -> None:
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "MAML: inner steps need gradients, which torch.inference_mode() does not allow. Use "
            "torch.no_grad(), under which MAML adapts all the same."
        )


def _traced(step: Step, times: range, state: tuple[Any, ...], *args: object) -> tuple[tuple[Any, ...], Tree]:
    """Run the loop as part of a traced graph; the checks of :func:`metagrad.unroll` were made before."""
    collected, report = [], None
    for t in times:
        state, report = step(state, t, *args)
        collected.append(report)
    if isinstance(report, Tensor):
        return state, torch.stack(collected)
    return state, tuple(torch.stack(column) for column in zip(*collected, strict=True))


def _from(step: Step, first: int) -> Step:
    """Count the steps of a loop from a number on."""
    return lambda state, t, *args: step(state, first + t, *args)


def _arguments(tasks: Tasks, rule: Rule | None, judged: bool, proximal: Proximal | None) -> tuple[Any, ...]:
    """Return what steps take beside their state."""
    query = (tasks.query_x, tasks.query_y) if judged else None
    args = [tasks.support_x, tasks.support_y, rule, query, proximal]
    while args[-1] is None:
        args.pop()
    return tuple(args)


def _with_proximal(grads: Params, params: Params, proximal: Proximal, create_graph: bool) -> Params:
    """Add the gradient of a proximal term; a constant where gradients are."""
    terms = proximal.gradients(params)
    return {name: g + (terms[name] if create_graph else terms[name].detach()) for name, g in grads.items()}


def _columns(reports: list, num_tasks: int, judged: bool) -> tuple[Tensor, Tensor]:
    """Return the losses ``[tasks, steps]``, and the query losses after each step but the last."""
    parts = list(zip(*reports, strict=True)) if judged else [reports]
    losses, *query = (torch.cat(part).reshape(-1, num_tasks).t() for part in parts)
    return losses, query[0][:, :-1] if query else losses.new_zeros((num_tasks, 0))


def with_history_of(starts: Params, values: Params) -> Params:
    """Return values whose cotangents go to the starts: straight-through, with the identity for the Jacobian."""
    return {name: value + (starts[name] - starts[name].detach()) for name, value in values.items()}


def task_norms(grads: Params, num_axes: int) -> Tensor:
    """Return the Euclidean norm over all parameters, for each task."""
    return task_squares((g.detach() for g in grads.values()), num_axes).sqrt()


def where_active(active: Tensor, moved: Tree, stayed: Tree) -> Tree:
    """Choose task by task; what has no task axis, such as a count of steps, moves on."""

    def choose(new: object, old: object) -> object:
        if not isinstance(new, Tensor) or not isinstance(old, Tensor) or new.ndim < active.ndim:
            return new
        return torch.where(over(active, new), new, old)

    return tree_map(choose, moved, stayed)


def start_values(params: Params, rows: Params, num_tasks: int | None, *, apart: bool = False) -> Params:
    """Return what tasks start from, to be differentiated with respect to in any grad mode.

    Args:
        params: The parameters.
        rows: Of tables, which rows to take instead.
        num_tasks: How many tasks are stacked; None means one, without an axis of its own.
        apart: Whether other values are computed from the parameters, through which inner gradients must not go.
    """
    apart = apart or bool(rows)

    def start(name: str, p: Tensor) -> Tensor:
        if name in rows:
            return look_up(p, rows[name])
        return _variable(p, apart) if num_tasks is None else _repeated(p, num_tasks)

    return {name: start(name, p) for name, p in params.items()}


def look_up(table: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a table, to be differentiated with respect to in any grad mode."""
    values = embedding(rows, table)
    return values if values.requires_grad else values.requires_grad_()


def _variable(param: Tensor, apart: bool) -> Tensor:
    """Add a view beside values that are computed, so that the inner gradient does not go into their graph."""
    # Without grad mode there is no such node, and a view would be one that gradients pass by.
    if _is_constant(param):
        return param.detach().requires_grad_()
    return param.view_as(param) if apart and torch.is_grad_enabled() else param


def _repeated(param: Tensor, num_tasks: int) -> Tensor:
    """Give every task the parameter, without a copy."""
    if torch.is_grad_enabled() and not _is_constant(param):
        return param.expand(num_tasks, *param.shape)
    # A view made without grad mode says that it requires grad, but gets no gradient.
    return param.detach().expand(num_tasks, *param.shape).requires_grad_()


def _is_constant(param: Tensor) -> bool:
    """Say whether a parameter gets no gradient; compiled code differentiates by torch.func, regardless of this."""
    return not param.requires_grad and not torch.compiler.is_compiling()


def _of_no_graph(losses: Tensor) -> Tensor:
    """Return losses whose graph is freed: differentiating them raises an error that says why."""

    def refuse(cotangent: Tensor) -> None:
        raise RuntimeError(
            "MAML(..., order=1): the graphs of the inner steps are freed at once, so out.support_losses has no "
            'gradient. Pass memory="step", which computes them again, or order=2; or detach the losses.'
        )

    losses = losses.view_as(losses)
    if losses.requires_grad:
        with without_torch_function():  # compiled code, which keeps what it needs, may pass this hook by
            losses.register_hook(refuse)
    return losses


def gradients_of(
    losses: Tensor, params: Params, create_graph: bool, *, retain_graph: bool | None = None
) -> Params:
    """Differentiate the sum of losses; a parameter that they do not use gets zeros, its exact gradient."""
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
    with without_torch_function():
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
    """Open an outer step of the memory tracker, if one is open and nobody has opened a phase."""
    tracker = memory_tracking.current()
    return contextlib.nullcontext() if tracker is None else tracker.implied_outer()


def phase(name: str, index: int | None = None) -> contextlib.AbstractContextManager[object]:
    """Open a phase of the memory tracker, if one is open."""
    tracker = memory_tracking.current()
    return contextlib.nullcontext() if tracker is None else tracker.phase(name, index=index)
