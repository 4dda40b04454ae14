"""Inner loops: the adaptation of one task, or of a batch of tasks at once, as a differentiable unroll."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metagrad import memory as memory_tracking
from metagrad.autograd.blocks.block_gradient import block_gradient
from metagrad.autograd.blocks.types import Chain
from metagrad.autograd.checks.lint import refuse_defects
from metagrad.autograd.unrolling.compiled_schedule import unroll_compiled
from metagrad.autograd.unrolling.schedule import Step
from metagrad.autograd.unrolling.unroll import unroll
from metagrad.core._torch import without_torch_function
from metagrad.core.budget import Memory, checked_memory, free_bytes
from metagrad.core.tree import Tree, tree_map
from metagrad.meta.curvature import inner_curvature, observed_layers
from metagrad.meta.objective import LossFn
from metagrad.meta.programs import Programs, checked_tensors
from metagrad.meta.structured import Nested
from metagrad.meta.tables import look_up
from metagrad.optim.curvature import Curvature, needs_curvature
from metagrad.optim.rules import Params, Rule

Loss = Callable[[Params, Nested, Nested], tuple[Tensor, Nested]]
"""Parameters, inputs, targets to losses (one, or one for each task) and predictions."""


class Adaptation(NamedTuple):
    """What an inner loop leaves.

    Attributes:
        params: The adapted parameters.
        losses: The loss before each step, ``[steps]`` or ``[steps, tasks]``.
        used: How many steps were taken, ``[]`` or ``[tasks]``, int64.
    """

    params: Params
    losses: Tensor
    used: Tensor


@dataclass(frozen=True)
class InnerLoop:
    """How a task is adapted to.

    Attributes:
        rule: What makes a step of a gradient.
        order: 2 differentiates through the gradient, 1 takes it as a constant.
        memory: What :func:`metagrad.unroll` keeps.
        truncate: How many of the last steps are differentiated through; None means all.
        tolerance: The gradient norm at which a task stops; None means that it never does.
        chain: The model by blocks and its loss, where gradients are taken block by block.
        programs: What has been compiled; None compiles nothing.
        loss_fn: The loss of predictions and targets, of which a rule may ask the Gauss-Newton matrix.
        model: The model, of whose layers a rule may ask what they were given.
    """

    rule: Rule
    order: int
    memory: Memory
    truncate: int | None = None
    tolerance: float | None = None
    chain: Chain | None = None
    programs: Programs | None = None
    loss_fn: LossFn | None = None
    model: nn.Module | None = None

    def sharing(self, num_parts: int, device: torch.device) -> InnerLoop:
        """Return the loop of one of several parts whose graphs are alive together: budgets are divided."""
        memory = checked_memory("MAML(...)", self.memory)
        if num_parts == 1 or memory in ("full", "step", "sqrt"):
            return self
        budget = free_bytes(device) if memory == "auto" else memory
        return replace(self, memory=int(budget) // num_parts)

    def run(
        self,
        loss: Loss,
        params: Params,
        x: Nested,
        y: Nested,
        *,
        steps: int,
        tasks: tuple[int, ...],
        rule: Rule | None = None,
    ) -> Adaptation:
        """Take ``steps`` steps on ``loss(params, x, y)``; differentiable where grad mode is on.

        ``tasks`` is the shape of the losses: ``()``, or ``(tasks,)`` where tasks are stacked; ``rule`` is taken for
        the loop's own, with other hyper-parameters.
        """
        used = torch.zeros(tasks, dtype=torch.int64, device=next(iter(params.values())).device)
        if steps == 0:
            return Adaptation(params, next(iter(params.values())).new_zeros((0, *tasks)), used)
        _refuse_inference_mode()
        if self.programs is not None:
            rule = self.programs.rule(self.rule, params, steps)
        state, args = (params, self.rule.init(params), used), (x, y) if rule is None else (x, y, rule)
        first = steps - self.differentiated(steps)
        collected = []
        if first:
            state, losses = self._without_graphs(loss, state, args, range(first))
            collected.append(losses)
        if first < steps:
            step = self._step(loss, torch.is_grad_enabled())
            state, losses = self._loop(step, state, args, range(first, steps))
            collected.append(losses)
        params, _, used = state
        return Adaptation(params, torch.cat(collected), used)

    def _without_graphs(self, loss: Loss, state: tuple, args: tuple, times: range) -> tuple[tuple, Tensor]:
        """Take the steps that are not differentiated through."""
        params = state[0]
        with torch.no_grad():
            state, losses = self._loop(self._step(loss, keep_graph=False), state, args, times)
        state = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, state)
        return (with_history_of(params, state[0]), *state[1:]), losses

    def differentiated(self, steps: int) -> int:
        """Return how many of the last steps a result is differentiated through."""
        if self.truncate is None or not torch.is_grad_enabled():
            return steps
        return min(self.truncate, steps)

    def _loop(self, step: Step, state: tuple, args: tuple, times: range) -> tuple[tuple, Tensor]:
        if torch.compiler.is_compiling():
            return _unchecked(step, state, args, times)
        if self.programs is None:
            late = _from(step, times.start) if times.start else step
            return unroll(late, state, *args, steps=len(times), memory=self.memory)
        memory = checked_memory("MAML(...)", self.memory)
        around = functools.partial(phase, "inner")
        return unroll_compiled(
            self.programs, step, state, args, times, memory, owner=self.programs, around=around
        )

    def _step(self, loss: Loss, keep_graph: bool) -> Step:
        create_graph = self.order == 2 and keep_graph

        def step(
            state: tuple, t: int, x: Nested, y: Nested, rule: Rule | None = None
        ) -> tuple[tuple, Tensor]:
            params, rule_state, used = state
            # Where the rule is handed over the step is compiled, and its phase is opened around it.
            with phase("inner", t) if rule is None else contextlib.nullcontext():
                losses, grads, curvature = self._gradients(loss, params, x, y, create_graph, t)
                moved = (self.rule if rule is None else rule).update(grads, rule_state, params, curvature)
                if self.tolerance is None:
                    return (*moved, used + 1), losses
                active = (used == t) & (_norms(grads, losses.ndim) > self.tolerance)
                return (*where_active(active, moved, (params, rule_state)), used + active), losses

        return step

    def _gradients(
        self, loss: Loss, params: Params, x: Nested, y: Nested, create_graph: bool, t: int
    ) -> tuple[Tensor, Params, Curvature | None]:
        if torch.compiler.is_compiling():
            return *_functional_gradients(loss, params, x, y, self.order), None
        is_due = needs_curvature(self.rule, t)
        calls = None
        if self.chain is not None:
            predictions, (losses, grads) = None, block_gradient(self.chain, params, x, y)
        else:
            with observed_layers(self.model, params, self.rule, t) as calls:
                losses, predictions = self._losses(loss, params, x, y)
            total = losses.sum()
            if (create_graph or is_due) and t == 0:
                refuse_defects("MAML(..., order=2), at the first inner step", total, params.values())
            grads = _gradients(total, params, create_graph or is_due)
        curvature = None
        if is_due:
            curvature = inner_curvature(
                lambda params: loss(params, x, y)[0],
                params,
                losses,
                grads,
                self.loss_fn,
                predictions,
                y,
                losses.ndim > 0,
                create_graph=create_graph,
                calls=calls,
            )
        return losses, grads if create_graph else {name: g.detach() for name, g in grads.items()}, curvature

    def _losses(self, loss: Loss, params: Params, x: Nested, y: Nested) -> tuple[Tensor, Nested]:
        losses, predictions = loss(params, x, y)
        if self.programs is not None:
            _, tensor = checked_tensors((losses, predictions))
            self.programs.prediction = tuple(tensor.shape[losses.ndim :])
        return losses, predictions


def _functional_gradients(
    loss: Loss, params: Params, x: Nested, y: Nested, order: int
) -> tuple[Tensor, Params]:
    """Differentiate by torch.func, which torch.compile takes."""

    def total(params: Params) -> tuple[Tensor, Tensor]:
        losses, _ = loss(params, x, y)
        return losses.sum(), losses

    grads, losses = torch.func.grad(total, has_aux=True)(params)
    return losses, grads if order == 2 else {name: g.detach() for name, g in grads.items()}


def _refuse_inference_mode() -> None:
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "MAML: inner steps need gradients, which torch.inference_mode() does not allow. Use "
            "torch.no_grad(), under which MAML adapts all the same."
        )


def _unchecked(step: Step, state: tuple, args: tuple, times: range) -> tuple[tuple, Tensor]:
    """Run the loop; what :func:`metagrad.unroll` looks at has been looked at before."""
    collected = []
    for t in times:
        state, losses = step(state, t, *args)
        collected.append(losses)
    return state, torch.stack(collected)


def _from(step: Step, first: int) -> Step:
    """Count the steps of a loop from a number on."""
    return lambda state, t, *args: step(state, first + t, *args)


def with_history_of(starts: Params, values: Params) -> Params:
    """Return values that pass their cotangents on to what they came from, as if nothing had happened between."""
    return {name: value + (starts[name] - starts[name].detach()) for name, value in values.items()}


def _norms(grads: Params, num_axes: int) -> Tensor:
    """Return the Euclidean norm over all parameters, for each task."""
    return torch.stack([g.detach().flatten(num_axes).square().sum(-1) for g in grads.values()]).sum(0).sqrt()


def where_active(active: Tensor, moved: Tree, stayed: Tree) -> Tree:
    """Choose task by task; what has no task axis, such as a count of steps, moves on."""

    def choose(new: object, old: object) -> object:
        if not isinstance(new, Tensor) or not isinstance(old, Tensor) or new.ndim < active.ndim:
            return new
        return torch.where(active.view(*active.shape, *[1] * (new.ndim - active.ndim)), new, old)

    return tree_map(choose, moved, stayed)


def start_values(params: Params, rows: Params, num_tasks: int | None) -> Params:
    """Return what tasks start from, to be differentiated with respect to in any grad mode.

    Args:
        params: The parameters.
        rows: Of tables, which rows to take instead.
        num_tasks: How many tasks are stacked; None means one, without an axis of its own.
    """
    if num_tasks is None:
        return {
            name: look_up(p, rows[name]) if name in rows else _apart(p, rows) for name, p in params.items()
        }
    return {
        name: look_up(p, rows[name]) if name in rows else _repeated(p, num_tasks)
        for name, p in params.items()
    }


def _apart(param: Tensor, rows: Params) -> Tensor:
    """Give a parameter a node of its own beside tables: what leads to those is not to be walked for its gradient."""
    # Without grad mode there is no such node, and a view would be one that gradients pass by.
    if _is_constant(param):
        return param.detach().requires_grad_()
    return param.view_as(param) if rows and torch.is_grad_enabled() else param


def _repeated(param: Tensor, num_tasks: int) -> Tensor:
    """Give every task the parameter, without a copy."""
    if torch.is_grad_enabled() and not _is_constant(param):
        return param.expand(num_tasks, *param.shape)
    # A view made without grad mode says that it requires grad, but gradients pass it by.
    return param.detach().expand(num_tasks, *param.shape).requires_grad_()


def _is_constant(param: Tensor) -> bool:
    """Say whether the tape passes a parameter by; compiled code differentiates by torch.func, which does not ask."""
    return not param.requires_grad and not torch.compiler.is_compiling()


def _gradients(loss: Tensor, params: Params, create_graph: bool) -> Params:
    """Differentiate; a parameter that the loss does not use gets zeros, its exact gradient."""
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph, allow_unused=True)
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
    return {
        name: torch.zeros_like(param) if gradient is None else gradient
        for (name, param), gradient in zip(params.items(), grads, strict=True)
    }


def outer_phase() -> contextlib.AbstractContextManager:
    """Open an outer step of the memory tracker, if one is open and nobody has opened a phase."""
    tracker = memory_tracking.current()
    return contextlib.nullcontext() if tracker is None else tracker.implied_outer()


def phase(name: str, index: int | None = None) -> contextlib.AbstractContextManager:
    """Open a phase of the memory tracker, if one is open."""
    tracker = memory_tracking.current()
    return contextlib.nullcontext() if tracker is None else tracker.phase(name, index=index)
