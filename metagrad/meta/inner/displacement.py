"""An inner loop whose meta-gradient is by how much it moved the parameters, back: that of Reptile."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.core import _torch
from metagrad.core.tree import tree_map
from metagrad.meta.inner.loop import Evaluation, InnerLoop
from metagrad.meta.objective.tasks import Tasks
from metagrad.optim.rules import Params, Rule


@dataclass(frozen=True)
class DisplacementLoop(InnerLoop):
    """An inner loop that is not differentiated through: its gradient is what it started from less what it came to.

    Attributes:
        joins: Whether it adapts to query examples too, where the result is differentiated.
    """

    joins: bool = False

    def evaluate(self, params: Params, tasks: Tasks, rule: Rule | None = None) -> Evaluation:
        """Adapt, and compute query losses, whose value is that of MAML and whose gradient the displacement."""
        if not torch.is_grad_enabled():
            return super().evaluate(params, tasks, rule)
        inner = dataclasses.replace(self, order=1)
        # Within torch.func, which wants variables of its own, the tape stays on.
        with contextlib.nullcontext() if _torch.functorch_is_active() else torch.no_grad():
            adapted, losses, used, path = inner.run(
                params, _joined(tasks, self.stacked) if self.joins else tasks, rule
            )
            query_losses, predictions = inner.judge(adapted, tasks)
        starts = self.start_of(params, tasks)
        moves = [
            _once(starts[name].detach() - p.detach(), tasks.rows.get(name)) for name, p in adapted.items()
        ]
        losses, query_losses, predictions = tree_map(torch.detach, (losses, query_losses, predictions))
        query_losses = _Displacement.apply(
            query_losses, self.stacked, *moves, *(starts[name] for name in adapted)
        )
        return Evaluation(losses, used, query_losses, predictions, path)


class _Displacement(torch.autograd.Function):
    """Pass losses ``[tasks]`` on; their gradient with respect to what tasks start from is the displacement."""

    @staticmethod
    def forward(losses, stacked, *moves_and_starts):
        return losses.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.stacked, *moves_and_starts = inputs
        ctx.save_for_backward(*moves_and_starts)

    @staticmethod
    def backward(ctx, weights):
        count = len(ctx.saved_tensors) // 2
        moves, starts = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        weights = weights if ctx.stacked else weights.squeeze(0)
        weighted = [weights.view(*weights.shape, *[1] * (move.ndim - weights.ndim)) * move for move in moves]
        if torch.is_grad_enabled():
            weighted = map(_Constant.apply, weighted, starts)
        return None, None, *[None] * count, *weighted


class _Constant(torch.autograd.Function):
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
            "Reptile: its gradient, theta - phi, is that of no function, and cannot be differentiated. For second "
            "derivatives use MAML."
        )


def _once(move: Tensor, rows: Tensor | None) -> Tensor:
    """Return the displacement of table rows of which the last may be repeated, and then counts once."""
    if rows is None:
        return move
    is_new = torch.cat([torch.ones_like(rows[..., :1]), rows.diff()], -1) != 0
    return move * is_new.unsqueeze(-1)


def _joined(tasks: Tasks, stacked: bool) -> Tasks:
    """Return tasks whose support examples are all that they have."""

    def join(support: Tensor, query: Tensor) -> Tensor:
        return torch.cat([support, query], dim=int(stacked))

    return tasks._replace(
        support_x=tree_map(join, tasks.support_x, tasks.query_x),
        support_y=tree_map(join, tasks.support_y, tasks.query_y),
    )
