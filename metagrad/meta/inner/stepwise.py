"""An inner loop whose query losses are each differentiated through the step before them alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metagrad.autograd.recompute.captured_tensors import REPEAT
from metagrad.autograd.recompute.checkpoint import Backward, attached, vjp
from metagrad.autograd.recompute.fingerprint import Fingerprint
from metagrad.autograd.recompute.surroundings import Surroundings
from metagrad.core import _torch
from metagrad.core.capture import RandomState, restored
from metagrad.core.structured import Nested
from metagrad.core.substitution import Slots, own_buffers
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import constants, dissect, is_differentiable, plus, tree_leaves, tree_map
from metagrad.meta.inner.loop import QUERY_LOSSES, Evaluation, InnerLoop, with_history_of
from metagrad.meta.objective.tasks import Tasks, num_tasks
from metagrad.optim.rules import Params, Rule
from metagrad.optim.walk import hyperparameters_in, with_hyperparameters


class Reports(NamedTuple):
    """The reports of a step: the support loss before it, the query loss after it, and predictions after the last."""

    support: Tensor
    query: Tensor
    predictions: Nested | None


Take = Callable[[int, Reports, Sequence[Tensor]], Reports]
"""The number of a step, its reports with their graph, and the tensors it begins with, to the reports to be kept."""


@dataclass(frozen=True)
class StepwiseLoop(InnerLoop):
    """An inner loop on whose trajectory parameters are constants, but for the step before each query loss.

    The gradient of the sum of the query losses is added up step by step, so that no graph of a step is kept. Any
    other derivative takes the steps again, with their graphs.

    Attributes:
        learns_start: Whether parameters on the trajectory move as what they started from, so that this is learned.
    """

    learns_start: bool = True

    def evaluate(self, params: Params, tasks: Tasks, rule: Rule | None = None) -> Evaluation:
        """Adapt, and compute the query loss after each step."""
        if not torch.is_grad_enabled() or not self.steps:
            return super().evaluate(params, tasks, rule)
        # A transform needs the graphs; gradients of rows have a form of their own.
        if _torch.functorch_is_active() or tasks.rows:
            return self.follow(params, tasks, lambda t, reports, begin: reports)
        return _Sweep(self, params, tasks).attached()

    def follow(self, params: Params, tasks: Tasks, take: Take) -> Evaluation:
        """Take the steps, and hand the reports of each to ``take``."""
        random = RandomState()
        start = self.start_of(params, tasks)
        count = (num_tasks(tasks.support_x),) if self.stacked else ()
        used = torch.zeros(count, dtype=torch.int64, device=tasks.device)
        args = (tasks.support_x, tasks.support_y, None, (tasks.query_x, tasks.query_y))
        state, step = (start, self.rule.init(start), used), self._step(self._loss(tasks), keep_graph=True)
        collected = []
        for t in range(self.steps):
            origin = constants(start)
            if self.learns_start:  # computed for each step, whose graph is freed
                with random.restored():
                    origin = self.start_of(params, tasks)
            entry = self._entry(origin, state[0])
            state, (support, query) = step((entry, *state[1:]), t, *args, self.proximal_to(origin))
            query, predictions = self.judge(state[0], tasks) if t == self.steps - 1 else (query, None)
            reports = Reports(support.reshape(-1), query.reshape(-1), predictions)
            collected.append(take(t, reports, [*origin.values(), *entry.values()]))
            state = constants(state)
        supports, queries, predictions = zip(*collected, strict=True)
        path = torch.stack(queries, 1)[:, :-1]
        return Evaluation(torch.stack(supports, 1), state[2].reshape(-1), queries[-1], predictions[-1], path)

    def _entry(self, origin: Params, values: Params) -> Params:
        """Return the parameters before a step: constants, which may have the history of what tasks start from."""
        values = {name: value.detach() for name, value in values.items()}
        if self.learns_start:
            return with_history_of(origin, values)
        return {name: value.requires_grad_() for name, value in values.items()}


class _Sweep:
    """The steps of a loop as one operation, which keeps the gradient of the sum of its query losses.

    Args:
        inner: The loop.
        params: What adapts.
        tasks: The tasks.
    """

    def __init__(self, inner: StepwiseLoop, params: Params, tasks: Tasks) -> None:
        self.inner, self.params, self.tasks = inner, params, tasks
        objective = inner.objective
        parts = [objective.model, objective.loss_fn, *([] if inner.start is None else inner.start.modules)]
        parts += [] if objective.norms is None else [objective.norms.norms.per_step]
        self.modules = [part for part in parts if isinstance(part, nn.Module)]
        self.slots = Slots(self.modules)
        own = {id(p) for p in params.values()}
        replaced = {id(p) for name, p in objective.model.named_parameters() if name in params} - own
        tensors = [
            *params.values(),
            *(tensor for _, tensor in hyperparameters_in(inner.rule)),
            *([inner.proximal] if isinstance(inner.proximal, Tensor) else []),
            *(tensor for tensor in self.slots.tensors if id(tensor) not in replaced),
            *(leaf for leaf in tree_leaves(tasks) if isinstance(leaf, Tensor)),
        ]
        self.variables = list({id(t): t for t in tensors if t.requires_grad}.values())
        self.totals: list[Tensor | None] = [None] * len(self.variables)
        self.random = RandomState()
        self.surroundings = Surroundings(
            "WarpGrad(batch)",
            "model or the loss",
            [module for part in self.modules for module in part.modules()],
        )

    def attached(self) -> Evaluation:
        """Take the steps, and put their results on the tape."""
        outputs, structure = dissect(self.inner.follow(self.params, self.tasks, self._add))
        if self.inner.objective.norms is None:
            self.surroundings.forget_written()
        else:  # which write running statistics after the last step
            self.surroundings.note_read(())
        outputs = [output.requires_grad_(is_differentiable(output)) for output in outputs]
        self.results = Fingerprint(outputs)
        present = [i for i, total in enumerate(self.totals) if total is not None]
        kept = [total for total in self.totals if total is not None]
        self.totals = []

        def pull(backward: Backward) -> Sequence[Tensor | None]:
            weight = _common_weight(backward.cotangents, self.inner.steps)
            if weight is None:
                return vjp(self, backward.tensors, backward.needed, backward.cotangents)
            found = dict(zip(present, backward.kept, strict=True))
            return [found[i] * weight if i in found else None for i in range(len(backward.tensors))]

        return structure.fill(attached(self, self.variables, outputs, kept=kept, pull=pull))  # type: ignore[arg-type]

    def _add(self, t: int, reports: Reports, begin: Sequence[Tensor]) -> Reports:
        """Add the gradient of the query losses after a step, and free its graph."""
        if t == 0:
            _refuse_unknown(reports.query, [*self.variables, *begin])
        grads = torch.autograd.grad(reports.query.sum(), self.variables, allow_unused=True)
        self.totals = list(map(plus, self.totals, grads))
        return constants(reports)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Take the steps again for other variables, with their graphs."""
        exchange = {id(v): tensor for v, tensor in zip(self.variables, tensors, strict=True)}

        def other(leaf: object) -> object:
            return exchange.get(id(leaf), leaf)

        own = {id(p) for p in self.params.values()}
        beside = {key: tensor for key, tensor in exchange.items() if key not in own}
        rule, proximal = with_hyperparameters(self.inner.rule, other), other(self.inner.proximal)  # type: ignore[arg-type]
        inner = dataclasses.replace(self.inner, rule=rule, proximal=proximal)
        buffers = contextlib.nullcontext()
        if inner.objective.norms is None:  # which writes into none
            buffers = own_buffers([module for part in self.modules for module in part.modules()])
        with restored(self.random, self.surroundings), self.slots.restored(beside), buffers:
            params, tasks = tree_map(other, (self.params, self.tasks))
            outputs = dissect(inner.follow(params, tasks, lambda t, reports, begin: reports))[0]
        if (difference := self.results.difference(outputs, exact=False)) is not None:
            raise RuntimeError(
                f"WarpGrad(batch): the steps did not repeat when they were taken again: {difference}. {REPEAT}"
            )
        return outputs


def _common_weight(cotangents: Sequence[Tensor | None], steps: int) -> Tensor | None:
    """Return the cotangent of all query losses, if it is one and the same, and nothing else has one."""
    last = len(cotangents) - 1
    given = {i: c for i, c in enumerate(cotangents) if c is not None}
    if QUERY_LOSSES not in given or given.keys() - {QUERY_LOSSES, last} or (steps > 1 and last not in given):
        return None
    weights = torch.cat([cotangent.reshape(-1) for cotangent in given.values()])
    return weights[0] if bool((weights == weights[0]).all()) else None


def _refuse_unknown(losses: Tensor, known: Sequence[Tensor]) -> None:
    """Refuse tensors that require grad and are no part of the model, the loss, the rule or the tasks."""
    leaves = {id(tensor) for tensor in known if tensor.grad_fn is None}
    entered = {tensor.grad_fn for tensor in known if tensor.grad_fn is not None}
    for node in graph_nodes([losses], entered):
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in leaves:
            raise ValueError(
                f"WarpGrad(batch): the model or the loss reads a tensor of shape {tuple(variable.shape)} that "
                "requires grad and is a parameter of neither. Register it as one, or detach it."
            )
