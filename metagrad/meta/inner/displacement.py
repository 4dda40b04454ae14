"""The inner loop of Reptile, whose meta-gradient is the initial minus the adapted parameters."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.core import _torch
from metagrad.core._torch import Function
from metagrad.core.tree import Params, constants, tree_map
from metagrad.meta.inner.loop import Adaptation, Evaluation, InnerLoop
from metagrad.meta.objective.tasks import Tasks
from metagrad.optim.rules import Rule
from metagrad.sparse.tables.embedding import over


@dataclass(frozen=True)
class DisplacementLoop(InnerLoop):
    """A loop whose meta-gradient is the initial minus the adapted parameters. Its loss has the value of MAML's loss.

    Attributes:
        joins: Whether the steps also use query examples if the result is differentiated.
    """

    joins: bool = False

    def run(
        self, params: Params, tasks: Tasks, rule: Rule | None = None, start: Params | None = None
    ) -> Adaptation | Evaluation:
        """Adapt, and compute query losses."""
        if not torch.is_grad_enabled() or tasks.query_x is None:
            return super().run(params, tasks, rule)
        starts, seen = self.start_of(params, tasks), _joined(tasks, self.stacked) if self.joins else tasks
        # torch.func differentiates its own variables, so grad mode stays on.
        with contextlib.nullcontext() if _torch.functorch_is_active() else torch.no_grad():
            seen = seen._replace(query_x=None, query_y=None)
            try:
                found = super().run(params, seen, rule, starts)
            except Exception as error:
                if not self.joins or not self._accepts_support(starts, tasks):
                    raise
                raise ValueError(
                    "Reptile(batch): the model does not accept the support and query examples of a task together "
                    f"({error}). Pass examples='support' to adapt to the support examples only."
                ) from error
            assert isinstance(found, Adaptation)
            adapted, losses, used, rows = found
            if not self.stacked:
                adapted, rows = tree_map(lambda tensor: tensor.squeeze(0), (adapted, rows))
            results = constants((adapted, losses, used, *self.evaluate(adapted, tasks)))
        adapted, losses, used, query_losses, predictions = results
        moves = [_once(starts[name].detach() - p, rows.get(name)) for name, p in adapted.items()]
        query_losses = _GivenGradient.apply(
            query_losses, self.stacked, *moves, *(starts[name] for name in adapted)
        )
        return Evaluation(losses, used, query_losses, predictions, losses[:, :0])

    def _accepts_support(self, starts: Params, tasks: Tasks) -> bool:
        try:
            self._loss(tasks)(starts, tasks.support_x, tasks.support_y)
        except Exception:
            return False
        return True


class _GivenGradient(Function):
    """Identity of losses ``[tasks]`` whose gradients with respect to the initial parameters are given."""

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
        weighted = [over(weights, gradient) * gradient for gradient in gradients]
        if torch.is_grad_enabled():
            weighted = map(_Constant.apply, weighted, starts)
        return None, None, *[None] * count, *weighted


class _Constant(Function):
    """Identity for a gradient. It raises an error if it is differentiated."""

    @staticmethod
    def forward(gradient, start):
        return gradient.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        raise RuntimeError(
            "Reptile(batch): the meta-gradient is not the gradient of a function, and cannot be differentiated. For "
            "second derivatives use MAML."
        )


def _once(move: Tensor, rows: Tensor | None) -> Tensor:
    """Return the displacement of table rows, in which repetitions of the last row are set to zero."""
    if rows is None:
        return move
    is_new = torch.cat([torch.ones_like(rows[..., :1]), rows.diff()], -1) != 0
    return move * is_new.unsqueeze(-1)


def _joined(tasks: Tasks, stacked: bool) -> Tasks:
    """Return tasks whose support examples are all their examples."""

    def join(support: Tensor, query: Tensor) -> Tensor:
        return torch.cat([support, query], dim=int(stacked))

    return tasks._replace(
        support_x=tree_map(join, tasks.support_x, tasks.query_x),
        support_y=tree_map(join, tasks.support_y, tasks.query_y),
    )
