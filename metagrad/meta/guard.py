"""Meta-gradients that are NaN or infinite: the task and inner step behind them are named, or the task dropped.

A gradient that is finite costs one look at it. One that is not is computed again, task by task, with its cotangents
scaled to one: what is finite then overflowed because the loss was scaled, as a ``GradScaler`` does, who sees to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metagrad.autograd.checks.finite import is_finite
from metagrad.core import _torch
from metagrad.core.capture import AutocastState
from metagrad.core.substitution import Slots
from metagrad.core.tree import tree_flatten, tree_leaves, tree_unflatten
from metagrad.meta.batching import Tasks
from metagrad.meta.finite import Results
from metagrad.optim.curvature import needs_curvature
from metagrad.optim.rules import Params, Rule
from metagrad.optim.walk import hyperparameters_in, with_hyperparameters

Compute = Callable[[Params, Rule, Tasks], Results]
"""Parameters, a rule and tasks to a tree of tensors ``[tasks, ...]``, and constants."""


class Culprit(NamedTuple):
    """A task whose gradient is not finite.

    Attributes:
        task: Its number.
        place: Where its gradient ceases to be finite.
    """

    task: int
    place: str


@dataclasses.dataclass
class Guard:
    """Looks at the gradients of a meta-batch.

    Attributes:
        compute: What is done with the tasks, to be differentiated.
        again: The same with one task, without recomputation, compilation or tasks that run together.
        numbers: The numbers of the tasks in their batch.
        skipped: Where to mark a task whose gradient is dropped, ``[tasks of the batch]``; None raises instead.
        modules: What may have parameters: the model, and beside it a loss, whose are learned, but not adapted.
    """

    compute: Compute
    again: Compute
    numbers: range | Tensor
    skipped: Tensor | None
    modules: Sequence[nn.Module] = ()

    def __call__(self, params: Params, rule: Rule, tasks: Tasks) -> Results:
        """Compute, so that a gradient of the results is looked at before it reaches parameters or rule."""
        call = _Call.of(params, rule, self.modules)
        if not call.leaves or not torch.is_grad_enabled() or _torch.functorch_is_active():
            return self.compute(params, rule, tasks)
        cotangents: dict[int, Tensor] = {}
        autocast = AutocastState()

        def repaired() -> list[Tensor | None] | None:
            with autocast.restored():
                return self._repaired(call, tasks, cotangents)

        with call.exchanged(_Entry.apply(repaired, *call.leaves)) as (params, rule):  # type: ignore[reportArgumentType]
            values, spec = tree_flatten(self.compute(params, rule, tasks))
        for place, value in enumerate(values):
            if isinstance(value, Tensor) and value.requires_grad:
                # An alias: the predictions, say, also have a cotangent that comes of the losses.
                values[place] = value.view_as(value)
                values[place].register_hook(functools.partial(cotangents.__setitem__, place))
        return tree_unflatten(values, spec)

    def _repaired(
        self, call: _Call, tasks: Tasks, cotangents: Mapping[int, Tensor]
    ) -> list[Tensor | None] | None:
        """Say what to do about gradients that are not finite: None lets them be."""
        if not is_finite(list(cotangents.values())):
            return None
        scale = max(float(c.detach().abs().max()) for c in cotangents.values()) or 1.0
        totals, culprits = None, []
        for i in range(len(self.numbers)):
            own = {place: c[i : i + 1] / scale for place, c in cotangents.items()}
            grads, place = self._of_task(call, tasks.select(slice(i, i + 1)), own)
            if place is not None:
                culprits.append(Culprit(int(self.numbers[i]), place))
            else:
                totals = grads if totals is None else [_sum(a, b) for a, b in zip(totals, grads, strict=True)]
        if not culprits and scale > 1:
            return None
        if self.skipped is None or totals is None or not culprits:
            raise FloatingPointError(_message(culprits, len(self.numbers)))
        self.skipped[[culprit.task for culprit in culprits]] = True
        return [None if total is None else total * scale for total in totals]

    def _of_task(
        self, call: _Call, task: Tasks, cotangents: Mapping[int, Tensor]
    ) -> tuple[list[Tensor | None], str | None]:
        """Return the gradients that one task gives, and where they cease to be finite."""
        found: list[int] = []
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            variables = [leaf.view_as(leaf) for leaf in call.leaves]
            with call.exchanged(variables, later=True) as (params, rule):
                watched = _WatchedRule(rule, found)
                values = tree_leaves(self.again(params, watched, task))
            grads = torch.autograd.grad(
                [values[place] for place in cotangents],
                variables,
                list(cotangents.values()),
                create_graph=create_graph,
                allow_unused=True,
            )
        if is_finite([g for g in grads if g is not None]):
            return list(grads), None
        if not found:
            return list(grads), "in the gradient of a hyper-parameter or of the loss function"
        step = max(found)
        return list(grads), "after the last inner step" if step == watched.steps else f"at inner step {step}"


class _Call(NamedTuple):
    """What a meta-batch is computed from, kept: a ``functional_call`` may have ended when it is differentiated."""

    params: Params
    rule: Rule
    leaves: list[Tensor]
    """The tensors that gradients are taken of."""
    slots: Slots

    @classmethod
    def of(cls, params: Params, rule: Rule, modules: Sequence[nn.Module]) -> _Call:
        slots = Slots(modules)
        tensors = [*params.values(), *(tensor for _, tensor in hyperparameters_in(rule)), *slots.tensors]
        return cls(params, rule, list({id(t): t for t in tensors if t.requires_grad}.values()), slots)

    @contextlib.contextmanager
    def exchanged(self, others: Sequence[Tensor], *, later: bool = False) -> Iterator[tuple[Params, Rule]]:
        """Put other tensors into the places of the leaves; in modules, of those that are not adapted."""
        exchange = {id(leaf): other for leaf, other in zip(self.leaves, others, strict=True)}
        own = {id(p) for p in self.params.values()}
        beside = {key: other for key, other in exchange.items() if key not in own}
        with self.slots.restored(beside) if later else self.slots.exchanged(beside):
            yield _exchanged(self.params, self.rule, exchange)


class _WatchedRule:
    """A rule that notes the steps before which the cotangent of the parameters is not finite."""

    def __init__(self, rule: Rule, found: list[int]) -> None:
        self.rule = rule
        self.found = found
        self.steps = 0

    def needs_curvature(self, step: int) -> bool:
        return needs_curvature(self.rule, step)

    def init(self, params: Params) -> Any:
        self._watch(params)
        return self.rule.init(params)

    def update(
        self, grads: Params, state: Any, params: Params, curvature: object = None
    ) -> tuple[Params, Any]:
        new, state = self.rule.update(grads, state, params, curvature)
        self.steps += 1
        self._watch(new)
        return new, state

    def _watch(self, params: Params) -> None:
        step = self.steps

        def note(gradient: Tensor) -> None:
            if not is_finite([gradient]):
                self.found.append(step)

        for param in params.values():
            if param.requires_grad:
                param.register_hook(note)


class _Entry(torch.autograd.Function):
    """Pass tensors on, and look at their gradients."""

    @staticmethod
    def forward(ctx, repaired, *tensors):
        ctx.set_materialize_grads(False)
        ctx.repaired = repaired
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads):
        if is_finite([g for g in grads if g is not None]):
            return (None, *grads)
        return (None, *(ctx.repaired() or grads))


def _exchanged(params: Params, rule: Rule, exchange: Mapping[int, Tensor]) -> tuple[Params, Rule]:
    """Put other tensors into the places of some, which are known by their ids."""
    if any(id(tensor) in exchange for _, tensor in hyperparameters_in(rule)):
        rule = with_hyperparameters(rule, lambda tensor: exchange.get(id(tensor), tensor))
    return {name: exchange.get(id(p), p) for name, p in params.items()}, rule


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _message(culprits: list[Culprit], num_tasks: int) -> str:
    if not culprits:
        return (
            "MAML: the meta-gradient is not finite, but is when it is computed again; random numbers (dropout) or "
            "another order of sums make it so. Lower the inner learning rate, or compute in a wider dtype."
        )
    first = culprits[0]
    return (
        f"MAML: the meta-gradient of task {first.task} is not finite: it ceases to be so {first.place} (tasks and "
        f"steps count from 0; {len(culprits)} of {num_tasks} tasks are affected). Look there for a root, a norm or "
        'a division at zero; with nonfinite="skip" such tasks are left out and counted, where one is left.'
    )
