"""Losses and meta-gradients that are NaN or infinite: named by task and inner step, or their tasks left out.

A gradient that is finite costs one look at it. One that is not is computed again, task by task, with its cotangents
scaled to one: what is finite then overflowed because the loss was scaled, as a ``GradScaler`` does, who sees to it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn

from metagrad.autograd.checks.finite import is_finite
from metagrad.autograd.recompute.checkpoint import Look
from metagrad.core import _torch
from metagrad.core._torch import Function
from metagrad.core.capture import AutocastState
from metagrad.core.substitution import Slots
from metagrad.core.tree import plus, tree_flatten, tree_leaves, tree_map, tree_unflatten
from metagrad.meta.inner.loop import MEAN, QUERY_LOSSES, Adaptation, Evaluation
from metagrad.meta.objective.tasks import Tasks
from metagrad.optim.rules import Params, Rule
from metagrad.optim.walk import hyperparameters_in, with_hyperparameters

Nonfinite = Literal["raise", "skip"]
Results = TypeVar("Results", bound="Adaptation | Evaluation")
Compute = Callable[[Params, Rule, Tasks], tuple]
"""Parameters, a rule and tasks to a tree of tensors ``[tasks, ...]``, and constants."""


def check_nonfinite(policy: object, name: str = "MAML") -> None:
    """Refuse an unknown policy."""
    if policy not in get_args(Nonfinite):
        raise ValueError(f'{name}(..., nonfinite): expected "raise" or "skip", got {policy!r}.')


def refuse_nonfinite(losses: Tensor, steps: int, name: str = "MAML") -> None:
    """Raise for the first task whose losses are not all finite, and name the first step where one is not.

    Args:
        losses: Before each step; on the query examples after each step but the last, if these were computed; on the
            query examples at the end, if there are any: ``[tasks, losses]``.
        steps: The number of steps.
        name: Of the algorithm.
    """
    losses = losses.detach()
    if math.isfinite(losses.sum().item()):
        return
    finite = torch.isfinite(losses)
    if finite.all():
        return
    task = int((~finite).any(1).nonzero()[0])
    places = _places(losses.shape[1], steps)
    number = min((~finite[task]).nonzero().flatten().tolist(), key=lambda number: places[number].time)
    remedy = "Lower the inner learning rate, or look" if steps else "Look"
    raise FloatingPointError(
        f"{name}: the loss of task {task} is {losses[task, number].item()} {places[number].words} (tasks and steps "
        f"count from 0; {int((~finite).any(1).sum())} of {len(losses)} tasks are affected). {remedy} "
        'at the data of that task; with nonfinite="skip" such tasks are left out and counted.'
    )


class _Place(NamedTuple):
    """When a loss is computed, and how to say so."""

    time: float
    words: str


def _places(num_losses: int, steps: int) -> list[_Place]:
    on_query = "on its query examples, after"
    places = [_Place(t, f"at inner step {t}") for t in range(steps)]
    places += [_Place(t + 0.5, f"{on_query} inner step {t}") for t in range(num_losses - steps - 1)]
    return [*places, _Place(steps, f"{on_query} the last step")]


class LossCheck:
    """Refuses losses that are not finite, or has the tasks computed again without those whose losses are not.

    They are not merely left out of a mean: zero times infinity is NaN, in each gradient that they share.

    Args:
        policy: "raise" or "skip".
        tasks: The tasks of a batch.
        model: The model, whose buffers each computation is to find as the first did.
        name: Of the algorithm, in errors.

    Attributes:
        remaining: What is to be computed next; None when all losses are finite.
        numbers: The numbers of those tasks in the batch, ``[remaining]``, int64; None for all of them.
        skipped: The tasks that were left out, ``[tasks]``, bool; None raises instead.
        results: Of all tasks; for one that was left out what it came to, without a gradient.
    """

    def __init__(self, policy: Nonfinite, tasks: Tasks, model: nn.Module, name: str = "MAML") -> None:
        self.remaining: Tasks | None = tasks
        self.numbers: Tensor | None = None
        self.skipped = torch.zeros(tasks.count, dtype=torch.bool, device=tasks.device)
        self.results: Any = None
        self._tasks, self._name = tasks, name
        self._buffers = Buffers(model) if policy == "skip" else None

    def record(self, results: Adaptation | Evaluation, *, are_finite: bool = False) -> None:
        """Take the results of the remaining tasks, which may be known to be finite.

        Raises:
            FloatingPointError: A loss is not finite; or of every task, where they may be left out.
        """
        is_first, self.remaining = self.results is None, None
        if is_first:
            self.results = results
        if are_finite and is_first:
            return
        with torch.no_grad():
            losses, steps = results.all_losses, results.losses.shape[1]
        if self._buffers is None:
            refuse_nonfinite(losses, steps, self._name)
            return
        finite = torch.isfinite(losses.detach()).all(1)
        if not bool(finite.any()):
            refuse_nonfinite(losses, steps, self._name)
        if not bool(finite.all()):
            self._buffers.restore()
            kept = finite.nonzero().flatten()
            self.numbers = kept if self.numbers is None else self.numbers[kept]
            self.remaining = self._tasks.select(self.numbers)
        elif self.numbers is not None:
            merge = functools.partial(_filled, kept=self.numbers)
            self.results = tree_map(merge, self.results, results)
            self.skipped.fill_(True).index_fill_(0, self.numbers, False)


class Buffers:
    """The buffers of a model as they are, to be restored: running statistics, say."""

    def __init__(self, model: nn.Module) -> None:
        self._values = [(buffer, buffer.clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the values back."""
        for buffer, value in self._values:
            buffer.copy_(value)


def _filled(every: object, some: object, kept: Tensor) -> object:
    if not isinstance(every, Tensor) or not isinstance(some, Tensor):
        return some
    if some.shape[1:] != every.shape[1:]:  # rows of tables, filled up with the last of each
        some = torch.cat([some, some[:, -1:].expand(-1, every.shape[1] - some.shape[1], *some.shape[2:])], 1)
    return every.detach().index_copy(0, kept, some)


class Culprit(NamedTuple):
    """A task whose gradient is not finite.

    Attributes:
        task: Its number.
        place: Where its gradient ceases to be finite.
    """

    task: int
    place: str


class Learned:
    """The tensors that the gradients of a meta-batch are taken of, and where they are.

    Args:
        params: The parameters that are adapted.
        rule: The inner rule.
        modules: What may have other parameters: the model, and beside it a loss, whose are learned, but not adapted.
    """

    def __init__(self, params: Params, rule: Rule, modules: Sequence[nn.Module]) -> None:
        self.params, self.rule = params, rule
        # Kept: a ``functional_call`` may have ended when the meta-batch is differentiated.
        self.slots = Slots(modules)
        hyper = [tensor for _, tensor in hyperparameters_in(rule)]
        tensors = [*params.values(), *hyper, *self.slots.tensors]
        self.leaves = list({id(t): t for t in tensors if t.requires_grad}.values())
        self.is_rule_learned = any(tensor.requires_grad for tensor in hyper)
        own, learned = {id(p) for p in params.values()}, {id(leaf) for leaf in self.leaves}
        self.are_others_learned = bool(learned & {id(tensor) for tensor in self.slots.tensors} - own)

    @contextlib.contextmanager
    def exchanged(self, others: Sequence[Tensor], *, later: bool = False) -> Generator[tuple[Params, Rule]]:
        """Put other tensors into the places of the leaves; in modules, of those that are not adapted."""
        exchange = {id(leaf): other for leaf, other in zip(self.leaves, others, strict=True)}
        rule = self.rule
        if self.is_rule_learned:
            rule = with_hyperparameters(rule, lambda tensor: exchange.get(id(tensor), tensor))
        params = {name: exchange.get(id(p), p) for name, p in self.params.items()}
        if not later and not self.are_others_learned:
            yield params, rule
            return
        own = {id(p) for p in self.params.values()}
        beside = {key: other for key, other in exchange.items() if key not in own}
        with self.slots.restored(beside) if later else self.slots.exchanged(beside):
            yield params, rule


class GradientCheck:
    """Looks at the gradients of a meta-batch before they reach parameters, hyper-parameters or modules.

    Args:
        learned: What gradients are taken of.
        tasks: The tasks.
        numbers: The numbers of the tasks in their batch; None if they are all of it.
        skipped: Where to mark a task whose gradient is dropped, ``[tasks of the batch]``; None raises instead.
        again: Computes a task once more, without recomputation, compilation or tasks that run together.
        name: Of the algorithm, in errors.

    Attributes:
        is_on: Whether there are gradients to look at.
    """

    def __init__(
        self,
        learned: Learned,
        tasks: Tasks,
        numbers: Tensor | None,
        skipped: Tensor | None,
        again: Compute,
        name: str = "MAML",
    ) -> None:
        self.learned, self.tasks, self.numbers = learned, tasks, numbers
        self.skipped, self.again, self.name = skipped, again, name
        self._autocast = AutocastState()
        self._cotangents: dict[int, Tensor] = {}
        self.is_on = bool(learned.leaves) and torch.is_grad_enabled() and not _torch.functorch_is_active()

    @contextlib.contextmanager
    def inputs(self) -> Generator[tuple[Params, Rule]]:
        """Put tensors into the places of those that gradients are taken of, and look at the gradients of these."""
        if not self.is_on:
            yield self.learned.params, self.learned.rule
            return
        with self.learned.exchanged(_Entry.apply(self, *self.learned.leaves)) as exchanged:  # type: ignore[reportArgumentType]
            yield exchanged

    def looking_at(self, tensors: Sequence[Tensor]) -> Look | None:
        """Return what looks at the gradients of one function of tensors, which computes all, and the mean at last.

        None where nothing can be told of it: a tensor that gradients are taken of is handed to it twice.
        """
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        if len(places) < len(tensors):
            return None
        return functools.partial(self._looked_at, [places.get(id(leaf)) for leaf in self.learned.leaves])

    def _looked_at(
        self,
        places: Sequence[int | None],
        cotangents: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
    ) -> Sequence[Tensor | None]:
        found = [None if place is None else grads[place] for place in places]
        if is_finite([gradient for gradient in found if gradient is not None]):
            return grads
        *others, mean = cotangents
        self._cotangents = {p: c for p, c in (*enumerate(others), (MEAN, mean)) if c is not None}
        repaired, result = self.repaired() or found, list(grads)
        for place, gradient in zip(places, repaired, strict=True):
            if place is not None:
                result[place] = gradient
        return result

    def outputs(self, results: Results) -> Results:
        """Note the cotangents of the results, which a gradient that is not finite is computed again from."""
        if not self.is_on:
            return results
        is_flat = all(value is None or isinstance(value, Tensor) for value in results)
        values: list[Any] = list(results)
        values, spec = (values, None) if is_flat else tree_flatten(results)
        for place, value in enumerate(values):
            if isinstance(value, Tensor) and value.requires_grad:
                # An alias: the predictions, say, also have a cotangent that comes of the losses.
                values[place] = value.view_as(value)
                values[place].register_hook(functools.partial(self._cotangents.__setitem__, place))
        return type(results)(*values) if spec is None else tree_unflatten(values, spec)

    def repaired(self) -> Sequence[Tensor | None] | None:
        """Return gradients for those that are not finite; None leaves these unchanged."""
        cotangents = self._of_tasks()
        if not is_finite(list(cotangents.values())):
            return None
        scale = max(float(c.detach().abs().max()) for c in cotangents.values()) or 1.0
        totals, culprits = None, []
        numbers = range(self.tasks.count) if self.numbers is None else self.numbers.tolist()
        for i, number in enumerate(numbers):
            own = {place: c[i : i + 1] / scale for place, c in cotangents.items()}
            with self._autocast.restored():
                grads, place = self._of_task(self.tasks.select(slice(i, i + 1)), own)
            if place is not None:
                culprits.append(Culprit(number, place))
            else:
                totals = grads if totals is None else list(map(plus, totals, grads))
        if not culprits and scale > 1:
            return None
        if self.skipped is None or totals is None or not culprits:
            raise FloatingPointError(_message(self.name, culprits, len(numbers)))
        self.skipped[[culprit.task for culprit in culprits]] = True
        return [None if total is None else total * scale for total in totals]

    def _of_tasks(self) -> dict[int, Tensor]:
        """Return the cotangents of what each task has; the mean of the query losses is formed of these."""
        found = dict(self._cotangents)
        mean = found.pop(MEAN, None)
        if mean is not None:
            each = (mean / self.tasks.count).expand(self.tasks.count)
            found[QUERY_LOSSES] = each + found[QUERY_LOSSES] if QUERY_LOSSES in found else each
        return found

    def _of_task(
        self, task: Tasks, cotangents: Mapping[int, Tensor]
    ) -> tuple[list[Tensor | None], str | None]:
        """Return the gradients that one task gives, and where they cease to be finite."""
        found: list[int] = []
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            variables = [leaf.view_as(leaf) for leaf in self.learned.leaves]
            with self.learned.exchanged(variables, later=True) as (params, rule):
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
            return list(grads), "in the gradient of a hyper-parameter or of what else the tasks share"
        step = max(found)
        return list(grads), "after the last inner step" if step == watched.steps else f"at inner step {step}"


class _WatchedRule:
    """A rule that notes the steps before which the cotangent of the parameters is not finite."""

    def __init__(self, rule: Rule, found: list[int]) -> None:
        self.rule = rule
        self.found = found
        self.steps = 0

    def init(self, params: Params) -> Any:
        self._watch(params)
        return self.rule.init(params)

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Any]:
        new, state = self.rule.update(grads, state, params)
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


class _Entry(Function):
    """Pass tensors on, and look at their gradients."""

    @staticmethod
    def forward(ctx, check, *tensors):
        ctx.set_materialize_grads(False)
        ctx.check = check
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads):
        if is_finite([g for g in grads if g is not None]):
            return (None, *grads)
        return (None, *(ctx.check.repaired() or grads))


def _message(name: str, culprits: list[Culprit], num_tasks: int) -> str:
    if not culprits:
        return (
            f"{name}: the meta-gradient is not finite, but is when it is computed again; random numbers (dropout) or "
            "another order of sums make it so. Lower the inner learning rate, or compute in a wider dtype."
        )
    first = culprits[0]
    return (
        f"{name}: the meta-gradient of task {first.task} is not finite: it ceases to be so {first.place} (tasks and "
        f"steps count from 0; {len(culprits)} of {num_tasks} tasks are affected). Look there for a root, a norm or "
        'a division at zero; with nonfinite="skip" such tasks are left out and counted, where one is left.'
    )
