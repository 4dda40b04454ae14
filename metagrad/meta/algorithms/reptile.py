"""Reptile: the meta-gradient is by how much the tasks moved the parameters, back."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from metagrad.core import _torch
from metagrad.core._torch import Function
from metagrad.core.tree import constants, tree_map
from metagrad.meta.inner.loop import Adaptation, Evaluation, InnerLoop
from metagrad.meta.maml import MAML
from metagrad.meta.objective.task_loss import LossFn
from metagrad.meta.objective.tasks import Tasks
from metagrad.optim.rules import Params, Rule
from metagrad.optim.walk import hyperparameters_in
from metagrad.sparse.tables.embedding import over

Examples = Literal["all", "support"]


class Reptile(MAML):
    r"""Learn parameters close to what all tasks come to, without differentiating through the inner steps.

    .. math::
        \nabla_\theta \, \mathrm{loss} := \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T} (\theta - \phi_i), \qquad
        \phi_i = U_i^{\mathrm{steps}}(\theta)

    so that ``torch.optim.SGD(learner.parameters(), lr=epsilon)`` takes the steps
    :math:`\theta \leftarrow \theta + \frac{\epsilon}{n} \sum_i (\phi_i - \theta)` of the batched version, and of the
    serial one where batches have one task; any other optimizer is given the same gradient. The value of ``loss`` is
    the mean query loss after adaptation, as MAML's. No graph of a step is kept. A second derivative is refused: there
    is no function with that gradient.

    Protocol: a task is trained on all of its examples, so in training, with ``examples="all"``, the inner steps see
    support and query examples, and the loss that is returned is one of training. In ``eval()`` and under
    ``torch.no_grad()`` they see the support examples alone, and the loss is that of MAML. Each inner step takes all
    examples at once, where the paper draws minibatches of them.

    Args:
        model: As of :class:`MAML`.
        loss_fn: As of :class:`MAML`.
        inner: As of :class:`MAML`, any rule; nothing of it is learned.
        steps: As of :class:`MAML`; the paper takes 5 to 10.
        examples: What the inner steps of training see: ``"all"`` examples, or those of ``"support"``.
        **arguments: As of :class:`MAML`, without ``adapt``, ``order`` and ``truncate``.

    Raises:
        ValueError: As :class:`MAML`; ``examples`` is something else; a hyper-parameter of ``inner`` or the loss
            is to be learned, which gets no gradient.
        TypeError: As :class:`MAML`.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> learner = metagrad.Reptile(model, torch.nn.functional.mse_loss,
        ...                            inner=metagrad.optim.rules.sgd(lr=0.1), steps=5)
        >>> batch = metagrad.tasks.Sinusoid(shots=10, queries=10).sample(1)
        >>> everything = [torch.cat(pair, 1) for pair in zip(batch.support, batch.query)]
        >>> phi, theta = learner.adapt(everything).params["weight"][0], model.weight
        >>> learner(batch).loss.backward()
        >>> bool(torch.allclose(theta.grad, theta - phi))
        True

    References:
        Nichol, Achiam, Schulman, "On first-order meta-learning algorithms", 2018, algorithms 1 and 2.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        inner: Rule,
        steps: int,
        examples: Examples = "all",
        **arguments: Any,
    ) -> None:
        if examples not in get_args(Examples):
            raise ValueError(f'Reptile(..., examples): expected "all" or "support", got {examples!r}.')
        super().__init__(
            model, loss_fn, inner=inner, steps=steps, adapt=None, order=1, truncate=None, **arguments
        )
        self.examples: Examples = examples

    def _check(self) -> None:
        super()._check()
        if self.order != 1 or self.adapted is not None or self.truncate is not None:
            raise ValueError(
                f"Reptile(...): expected order 1, adapted None and truncate None, got {self.order!r}, "
                f"{self.adapted!r} and {self.truncate!r}. All parameters adapt, and steps are not differentiated."
            )
        beside = {"the loss": self.loss_fn, 'norm="per_step"': self.per_step_norms}
        what = [
            *(f"{path} of inner" for path, tensor in hyperparameters_in(self.inner) if tensor.requires_grad),
            *(name for name, part in beside.items() if isinstance(part, nn.Module) and _is_learned(part)),
        ]
        if what:
            raise ValueError(
                f"Reptile(...): {what[0]} would be learned, but the steps are not differentiated through. Give "
                "numbers, and modules without parameters that require grad, or use FOMAML or MAML."
            )

    def _inner_loop(self, steps: int, tasks: Tasks) -> InnerLoop:
        joins = self.examples == "all" and self.training and tasks.query_x is not None
        return _DisplacementLoop(**vars(super()._inner_loop(steps, tasks)), joins=joins)


def _is_learned(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


@dataclass(frozen=True)
class _DisplacementLoop(InnerLoop):
    """A loop whose meta-gradient is the start minus the adapted parameters; the value of its loss is that of MAML.

    Attributes:
        joins: Whether it adapts to query examples too, where the result is differentiated.
    """

    joins: bool = False

    def run(
        self, params: Params, tasks: Tasks, rule: Rule | None = None, start: Params | None = None
    ) -> Adaptation | Evaluation:
        """Adapt, and compute query losses."""
        if not torch.is_grad_enabled() or tasks.query_x is None:
            return super().run(params, tasks, rule)
        starts, seen = self.start_of(params, tasks), _joined(tasks, self.stacked) if self.joins else tasks
        # Within torch.func, which wants variables of its own, the tape stays on.
        with contextlib.nullcontext() if _torch.functorch_is_active() else torch.no_grad():
            seen = seen._replace(query_x=None, query_y=None)
            adapted, losses, used, rows = super().run(params, seen, rule, starts)
            if not self.stacked:
                adapted, rows = tree_map(lambda tensor: tensor.squeeze(0), (adapted, rows))
            results = constants((adapted, losses, used, *self.judge(adapted, tasks)))
        adapted, losses, used, query_losses, predictions = results
        moves = [_once(starts[name].detach() - p, rows.get(name)) for name, p in adapted.items()]
        query_losses = _Attached.apply(
            query_losses, self.stacked, *moves, *(starts[name] for name in adapted)
        )
        return Evaluation(losses, used, query_losses, predictions, losses[:, :0])


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
            "Reptile(batch): the meta-gradient is not the gradient of a function, and cannot be differentiated. For "
            "second derivatives use MAML."
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
