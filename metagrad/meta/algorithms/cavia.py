"""CAVIA: a context vector is all that adapts."""

from __future__ import annotations

from typing import Any

from torch import nn

from metagrad.core.tree import LossFn, Params
from metagrad.meta.maml import MAML
from metagrad.meta.objective.tasks import Tasks
from metagrad.optim.rules import Rule


class CAVIA(MAML):
    r"""MAML of context parameters, which start at zero in each task; the others are learned and shared by all tasks.

    .. math::
        \min_\theta \; \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T} L_i^{\mathrm{query}}(\phi_i, \theta), \qquad
        \phi_i = U_i^{\mathrm{steps}}(0), \quad
        U_i(\phi) = \phi - \alpha \nabla_\phi L_i^{\mathrm{support}}(\phi, \theta)

    A task is as large as its context: the other parameters are not repeated for each. What the model does with a
    context is its own; :class:`metagrad.models.ContextMLP` appends it to the input, and
    ``metagrad.models.Conv4(..., context=100)`` modulates its channels by it. The value that the context has in the
    model has no part in anything.

    Args:
        model: A model with context parameters.
        loss_fn: As of :class:`MAML`.
        inner: As of :class:`MAML`.
        steps: As of :class:`MAML`.
        context: The name of the context, or a pattern or module that says which parameters it is.
        **arguments: As of :class:`MAML`, without ``adapt``.

    Raises:
        ValueError: As :class:`MAML`; or nothing in the model is called so.
        TypeError: As :class:`MAML`.

    Example:
        >>> model = metagrad.models.ContextMLP([1, 40, 40, 1], context=5)
        >>> learner = metagrad.CAVIA(model, torch.nn.functional.mse_loss,
        ...                          inner=metagrad.optim.rules.sgd(lr=1.0), steps=1)
        >>> batch = metagrad.tasks.Sinusoid(shots=10, queries=10).sample(25)
        >>> learner(batch).loss.backward()
        >>> {name: tuple(p.shape) for name, p in learner.adapt(batch.support).params.items()}
        {'context.vector': (25, 5)}

    References:
        Zintgraf, Shiarlis, Kurin, Hofmann, Whiteson, "Fast context adaptation via meta-learning", ICML 2019,
        section 3, algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        inner: Rule,
        steps: int,
        context: str = "context",
        **arguments: Any,
    ) -> None:
        super().__init__(model, loss_fn, inner=inner, steps=steps, adapt=context, **arguments)

    def _start(self, model: nn.Module, params: Params, tasks: Tasks, stacked: bool) -> Params:
        """Return zeros, in each task."""
        shape = (tasks.count,) if stacked else ()
        return {name: p.new_zeros((*shape, *p.shape)) for name, p in params.items()}
