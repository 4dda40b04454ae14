"""Losses and meta-gradients that are NaN or Inf: raise an error that names the task, or exclude such tasks.

A finite gradient costs only the check. If a gradient is not finite, the gradient of each task is computed again with
cotangents scaled to one. If all gradients are then finite, the first gradient overflowed because the loss was
scaled. The ``GradScaler`` handles that case.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from metagrad.autograd.checks.finite import is_finite
from metagrad.core import _torch
from metagrad.core._torch import Function
from metagrad.core.capture import AutocastState
from metagrad.core.reach import placed
from metagrad.core.substitution import tensor_places
from metagrad.core.tree import Params, plus, tree_flatten, tree_leaves, tree_map, tree_unflatten
from metagrad.meta.inner.loop import Adaptation, Evaluation
from metagrad.meta.objective.tasks import Tasks
from metagrad.optim.hyperparameters import hyperparameters_in, with_hyperparameters
from metagrad.optim.rules import Rule

Nonfinite = Literal["raise", "skip"]
T = TypeVar("T")
Compute = Callable[[Params, Rule, Tasks], tuple]
"""Maps parameters, an optimizer and tasks to a pytree of tensors ``[tasks, ...]`` and constants."""

_SKIP = 'with nonfinite="skip" such tasks are left out and counted'


def finite_tasks(results: Adaptation | Evaluation, policy: Nonfinite, name: str = "MAML") -> Tensor | None:
    """Return whether the losses of each task are finite, ``[tasks]``, or None if all losses are finite.

    Args:
        results: The results with the losses.
        policy: "raise" or "skip".
        name: Name of the algorithm.

    Raises:
        FloatingPointError: If a loss is not finite. With "skip", only if every task has such a loss.
    """
    losses, steps = results.all_losses.detach(), results.losses.shape[1]
    if math.isfinite(losses.sum().item()):
        return None
    is_bad = ~torch.isfinite(losses)
    finite = ~is_bad.any(1)
    if finite.all():
        return None
    if policy == "skip" and finite.any():
        return finite
    task = int(is_bad.any(1).nonzero()[0])
    number = int(is_bad[task].nonzero()[0])
    where = f"at inner step {number}" if number < steps else "on its query examples"
    remedy = "Lower the inner learning rate, or look" if steps else "Look"
    raise FloatingPointError(
        f"{name}: the loss of task {task} is {losses[task, number].item()} {where} (tasks and steps count from 0; "
        f"{int((~finite).sum())} of {len(losses)} tasks are affected). {remedy} at the data of that task; {_SKIP}."
    )


def merged(every: T, some: T, kept: Tensor) -> T:
    """Return the results of all tasks.

    The results ``some`` of the finite tasks fill the positions ``kept``. Other tasks get no gradient.
    """
    return tree_map(functools.partial(_filled, kept=kept), every, some)


def _filled(every: object, some: object, kept: Tensor) -> object:
    if not isinstance(every, Tensor) or not isinstance(some, Tensor):
        return some
    if some.shape[1:] != every.shape[1:]:  # table rows: repeat the last row
        some = torch.cat([some, some[:, -1:].expand(-1, every.shape[1] - some.shape[1], *some.shape[2:])], 1)
    return every.detach().index_copy(0, kept, some)


class LearnedTensors:
    """The tensors that a meta-batch is differentiated with respect to, and their places.

    Args:
        params: The adapted parameters.
        rule: The inner optimizer.
        modules: Modules with other learned parameters: the model, and a loss.
    """

    def __init__(self, params: Params, rule: Rule, modules: Sequence[nn.Module]) -> None:
        self.params, self.rule = params, rule
        # The backward pass may run after the end of a ``functional_call``.
        self.places = tensor_places(*modules)
        hyper = [tensor for _, tensor in hyperparameters_in(rule)]
        tensors = [*params.values(), *hyper, *(tensor for _, tensor in self.places)]
        self.leaves = list({id(t): t for t in tensors if t.requires_grad}.values())
        self.is_rule_learned = any(tensor.requires_grad for tensor in hyper)

    @contextlib.contextmanager
    def exchanged(self, others: Sequence[Tensor], *, later: bool = False) -> Generator[tuple[Params, Rule]]:
        """Substitute other tensors for the leaves. In modules, substitute only leaves that are not adapted."""
        exchange = {id(leaf): other for leaf, other in zip(self.leaves, others, strict=True)}
        rule = self.rule
        if self.is_rule_learned:
            rule = with_hyperparameters(rule, lambda tensor: exchange.get(id(tensor), tensor))
        params = {name: exchange.get(id(p), p) for name, p in self.params.items()}
        own = {id(p) for p in self.params.values()}
        beside = {key: other for key, other in exchange.items() if key not in own}
        places = self.places if later else [(place, t) for place, t in self.places if id(t) in beside]
        with placed((place, beside.get(id(tensor), tensor)) for place, tensor in places):
            yield params, rule


class GradientCheck:
    """Checks the gradients of a meta-batch before they reach parameters, hyperparameters or modules.

    Args:
        learned: The tensors that the meta-batch is differentiated with respect to.
        tasks: The tasks.
        numbers: The numbers of the tasks in their batch. None if the tasks are the whole batch.
        skipped: Output that marks tasks whose gradient is dropped, ``[tasks of the batch]``. None raises instead.
        again: Computes a task again, eagerly and not vectorized, with ``memory="full"``.
        name: Name of the algorithm in errors.
    """

    def __init__(
        self,
        learned: LearnedTensors,
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
        self._versions = {name: p._version for name, p in learned.params.items() if not p.is_inference()}
        self._is_on = bool(learned.leaves) and torch.is_grad_enabled() and not _torch.functorch_is_active()

    @contextlib.contextmanager
    def inputs(self) -> Generator[tuple[Params, Rule]]:
        """Substitute tensors whose gradients are checked."""
        if not self._is_on:
            yield self.learned.params, self.learned.rule
            return
        with self.learned.exchanged(_Entry.apply(self, *self.learned.leaves)) as exchanged:  # type: ignore[reportArgumentType]
            yield exchanged

    def outputs(self, results: T) -> T:
        """Record the cotangents of the results. They are needed to compute the gradient of each task again."""
        if not self._is_on:
            return results
        values, spec = tree_flatten(results)
        for place, value in enumerate(values):
            if isinstance(value, Tensor) and value.requires_grad:
                # An alias, since a prediction also has a cotangent from the losses.
                values[place] = value.view_as(value)
                values[place].register_hook(functools.partial(self._begin, place))
        return tree_unflatten(values, spec)

    def _begin(self, place: int, cotangent: Tensor) -> None:
        """Start the backward pass of a result.

        Raises:
            RuntimeError: A parameter was modified since the forward pass.
        """
        self._cotangents[place] = cotangent
        for name, p in self.learned.params.items():
            if p._version != self._versions[name]:
                raise RuntimeError(
                    f"{self.name}(batch): the parameter {name!r} was modified in place between the forward and the "
                    "backward pass. Call backward before an optimizer modifies parameters."
                )

    def repaired(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients without the tasks whose gradients are NaN or Inf."""
        cotangents = list(self._cotangents.values())
        if not is_finite(cotangents):
            return grads
        scale = max(float(c.detach().abs().max()) for c in cotangents) or 1.0
        each = [self._of_task(i, scale) for i in range(self.tasks.count)]
        finite = [is_finite([g for g in own if g is not None]) for own in each]
        if all(finite) and scale > 1:
            return grads
        bad = [i for i, is_good in enumerate(finite) if not is_good]
        numbers = bad if self.numbers is None else self.numbers[bad].tolist()
        if self.skipped is None or len(numbers) in (0, len(finite)):
            raise FloatingPointError(_message(self.name, numbers, len(finite)))
        self.skipped[numbers] = True
        kept = (own for own, is_good in zip(each, finite, strict=True) if is_good)
        totals = functools.reduce(lambda one, other: list(map(plus, one, other)), kept)
        return [None if total is None else total * scale for total in totals]

    def _of_task(self, i: int, scale: float) -> list[Tensor | None]:
        """Return the gradients of one task, with its cotangents divided by ``scale``."""
        create_graph = torch.is_grad_enabled()
        with self._autocast.restored(), torch.enable_grad():
            variables = [leaf.view_as(leaf) for leaf in self.learned.leaves]
            with self.learned.exchanged(variables, later=True) as (params, rule):
                values = tree_leaves(self.again(params, rule, self.tasks.select(slice(i, i + 1))))
            return list(
                torch.autograd.grad(
                    [values[place] for place in self._cotangents],
                    variables,
                    [c[i : i + 1] / scale for c in self._cotangents.values()],
                    create_graph=create_graph,
                    allow_unused=True,
                )
            )


class _Entry(Function):
    """Identity whose gradients are checked."""

    @staticmethod
    def forward(ctx, check, *tensors):
        ctx.set_materialize_grads(False)
        ctx.check = check
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads):
        if is_finite([g for g in grads if g is not None]):
            return (None, *grads)
        return (None, *ctx.check.repaired(grads))


def _message(name: str, numbers: list[int], num_tasks: int) -> str:
    if not numbers:
        return (
            f"{name}: the meta-gradient is not finite, but is when it is computed again; random numbers (dropout) or "
            "another order of sums make it so. Lower the inner learning rate, or compute in a wider dtype."
        )
    return (
        f"{name}: the meta-gradient of task {numbers[0]} is not finite (tasks count from 0; {len(numbers)} of "
        f"{num_tasks} tasks are affected). Look for a root, a norm or a division at zero, or a learned number that "
        f"multiplies the -inf of a class that a task lacks; {_SKIP}, where one is left."
    )
