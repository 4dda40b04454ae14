"""Inner loops that are not differentiated through: their meta-gradients are computed from the steps they take."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad.core import _torch
from metagrad.core._torch import Function
from metagrad.core.tree import constants, tree_map
from metagrad.meta.inner.loop import Evaluation, InnerLoop, task_norms
from metagrad.meta.objective.tasks import Tasks
from metagrad.optim.curvature import needs_curvature, needs_layers
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


@dataclass(frozen=True)
class PathLengthLoop(TrajectoryLoop):
    """A loop whose meta-gradient is that of the length of its path, with identity Jacobians, as Leap's is.

    Attributes:
        power: Of the length of each step: 1 or 2.
        stabilize: Whether a step that raises the loss counts as one that lowers it by as much.
    """

    power: int = 1
    stabilize: bool = True

    def follow(self, params: Params, starts: Params, tasks: Tasks, rule: Rule | None) -> Trajectory:
        """Take the steps, and sum the gradients of their lengths."""
        recorder, (loss, x, y) = _Recorder(self.rule), (self._loss(tasks), tasks.support_x, tasks.support_y)
        norms = self.objective.norms
        # There are statistics for each step, and at the end those of the last.
        last = None if norms is None else norms.support(max(self.steps - 1, 0)).uncounted()
        end = loss if last is None else functools.partial(loss, norms=last)
        step = dataclasses.replace(self, rule=recorder)._step(loss, keep_graph=False)
        used = torch.zeros(tasks.count if self.stacked else (), dtype=torch.int64, device=tasks.device)
        state = _of_its_own((starts, recorder.init(starts), used))
        total = {name: torch.zeros_like(p) for name, p in starts.items()}
        losses, leg = [], None
        for t in range(self.steps + 1):
            at = state[0]
            with torch.enable_grad():
                new, value = step(state, t, x, y) if t < self.steps else (state, end(at, x, y)[0])
            if leg is not None:
                pull = self._pull(value - losses[-1], *leg)
                total = {name: total[name] + pull[name] for name in total}
            losses.append(value)
            state = _of_its_own(new)
            leg = recorder.grads, _moves(state[0], at, tasks.rows)
        losses = torch.stack(losses)[:-1].reshape(self.steps, used.numel()).t()
        return Trajectory(state[0], losses, state[2].reshape(-1), total)

    def _pull(self, rise: Tensor, grads: Params, moves: Params) -> Params:
        """Return the gradient of the length of a step, at the point where it begins.

        Args:
            rise: Of the loss, ``[tasks]``, or of one task.
            grads: Of the loss, where the step begins.
            moves: Of the parameters, back.
        """
        norms = task_norms(moves, rise.ndim)
        rise = rise.to(norms.dtype)
        length = (rise.square() + norms.square()).sqrt()
        # Where nothing moved: the derivative of a norm at zero is taken as zero.
        factor = self.power * torch.where(length > 0, length ** (self.power - 2), 0)
        rise = -rise.abs() if self.stabilize else rise
        return {name: _weighted(factor, moves[name] - _weighted(rise, grads[name])) for name in moves}


class _Recorder:
    """A rule that keeps the gradients of its last step."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.grads = rule, {}

    def needs_curvature(self, step: int) -> bool:
        return needs_curvature(self.rule, step)

    def needs_layers(self, step: int) -> bool:
        return needs_layers(self.rule, step)

    def init(self, params: Params) -> Any:
        return self.rule.init(params)

    def update(self, grads: Params, state: Any, params: Params, curvature: Any = None) -> tuple[Params, Any]:
        self.grads = grads
        return self.rule.update(grads, state, params, curvature)


def _of_its_own(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the state of a loop as new leaves, cut from the graph of the step before."""
    if _torch.functorch_is_active():
        return state
    params, *others = constants(state)
    return {name: p.requires_grad_() for name, p in params.items()}, *others


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
            "The meta-gradient of Reptile and Leap is that of no function of the parameters, and cannot be "
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
