"""Inner loops that are not differentiated through: their meta-gradients are computed from the steps they take."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.core import _torch
from metagrad.core._torch import Function
from metagrad.core.tree import constants, tree_map
from metagrad.meta.inner.loop import Evaluation, InnerLoop
from metagrad.meta.objective.tasks import Tasks
from metagrad.optim.rules import Params, Rule
from metagrad.sparse.tables.embedding import over


class Trajectory(NamedTuple):
    """The result of the steps of tasks.

    Attributes:
        params: The adapted parameters.
        losses: The loss before each step, ``[tasks, steps]``.
        used: How many steps were taken, ``[tasks]``, int64.
        gradients: The meta-gradient of each task, with respect to its start.
    """

    params: Params
    losses: Tensor
    used: Tensor
    gradients: Params


@dataclass(frozen=True)
class TrajectoryLoop(InnerLoop):
    """An inner loop whose meta-gradient :meth:`follow` computes; the value of its loss is that of MAML.

    Attributes:
        joins: Whether it adapts to query examples too, where the result is differentiated.
    """

    joins: bool = False

    def follow(self, params: Params, starts: Params, tasks: Tasks, rule: Rule | None) -> Trajectory:
        """Take the steps, from ``starts``, which are those of ``params``."""
        raise NotImplementedError

    def evaluate(self, params: Params, tasks: Tasks, rule: Rule | None = None) -> Evaluation:
        """Adapt, and compute query losses."""
        if not torch.is_grad_enabled():
            return super().evaluate(params, tasks, rule)
        inner, starts = dataclasses.replace(self, order=1), self.start_of(params, tasks)
        # Within torch.func, which wants variables of its own, the tape stays on.
        with contextlib.nullcontext() if _torch.functorch_is_active() else torch.no_grad():
            seen = joined(tasks, self.stacked) if self.joins else tasks
            trajectory = inner.follow(params, starts, seen, rule)
            results = (trajectory, *inner.judge(trajectory.params, tasks))
        (_, losses, used, gradients), query_losses, predictions = constants(results)
        names = list(gradients)
        query_losses = _Attached.apply(
            query_losses,
            self.stacked,
            *(gradients[name] for name in names),
            *(starts[name] for name in names),
        )
        return Evaluation(losses, used, query_losses, predictions, losses[:, :0])


@dataclass(frozen=True)
class DisplacementLoop(TrajectoryLoop):
    """A loop whose meta-gradient is the start minus the adapted parameters, as Reptile's is."""

    def follow(self, params: Params, starts: Params, tasks: Tasks, rule: Rule | None) -> Trajectory:
        """Take the steps."""
        adapted, losses, used, _ = self.run(params, tasks, rule, starts)
        return Trajectory(adapted, losses, used, _moves(adapted, starts, tasks.rows))


def _moves(adapted: Params, starts: Params, rows: Params) -> Params:
    """Return by how much parameters moved, back; rows of tables of which the last is repeated count once."""
    moves = {name: starts[name].detach() - p.detach() for name, p in adapted.items()}
    return {name: _once(move, rows.get(name)) for name, move in moves.items()}


class _Attached(Function):
    """Pass losses ``[tasks]`` on, whose gradients with respect to what tasks start from are given."""

    @staticmethod
    def forward(losses, stacked, *gradients_and_starts):
        return losses.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.stacked, *gradients_and_starts = inputs
        ctx.save_for_backward(*gradients_and_starts)

    @staticmethod
    def backward(ctx, weights):
        count = len(ctx.saved_tensors) // 2
        gradients, starts = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        weights = weights if ctx.stacked else weights.squeeze(0)
        weighted = [_weighted(weights, gradient) for gradient in gradients]
        if torch.is_grad_enabled():
            weighted = map(_Constant.apply, weighted, starts)
        return None, None, *[None] * count, *weighted


def _weighted(weights: Tensor, value: Tensor) -> Tensor:
    """Multiply a value by a weight for each task."""
    return over(weights, value) * value


class _Constant(Function):
    """Pass a gradient on that has none itself, and say so where it is differentiated."""

    @staticmethod
    def forward(gradient, start):
        return gradient.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        raise RuntimeError(
            "The meta-gradient of Reptile is that of no function of the parameters, and cannot be "
            "differentiated. For second derivatives use MAML."
        )


def _once(move: Tensor, rows: Tensor | None) -> Tensor:
    """Return the displacement of table rows of which the last may be repeated, and then counts once."""
    if rows is None:
        return move
    is_new = torch.cat([torch.ones_like(rows[..., :1]), rows.diff()], -1) != 0
    return move * is_new.unsqueeze(-1)


def joined(tasks: Tasks, stacked: bool) -> Tasks:
    """Return tasks whose support examples are all that they have."""

    def join(support: Tensor, query: Tensor) -> Tensor:
        return torch.cat([support, query], dim=int(stacked))

    return tasks._replace(
        support_x=tree_map(join, tasks.support_x, tasks.query_x),
        support_y=tree_map(join, tasks.support_y, tasks.query_y),
    )
