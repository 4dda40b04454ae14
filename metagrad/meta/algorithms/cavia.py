"""CAVIA: only a context vector is adapted."""

from __future__ import annotations

from typing import Any

from torch import nn

from metagrad.core.tree import LossFn, Params
from metagrad.meta.maml import MAML
from metagrad.meta.objective.tasks import Tasks
from metagrad.meta.options import refuse_fixed
from metagrad.optim.rules import Rule


class CAVIA(MAML):
    r"""Fast context adaptation (CAVIA): only context parameters are adapted, from zero in each task.

    .. math::
        \min_\theta \; \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T} L_i^{\mathrm{query}}(\phi_i, \theta), \qquad
        \phi_i = U_i^{\mathrm{steps}}(0), \quad
        U_i(\phi) = \phi - \alpha \nabla_\phi L_i^{\mathrm{support}}(\phi, \theta)

    All tasks share the other parameters, so each task stores only its context. The model decides how it uses
    the context. :class:`metagrad.models.ContextMLP` appends it to the input. ``metagrad.models.Conv4(...,
    context=100)`` modulates its channels with it. The value of the context in the model is not used.

    Args:
        model: A model with context parameters.
        loss_fn: The loss function, as in :class:`MAML`.
        inner: The functional optimizer of the inner steps.
        steps: The number of inner steps.
        context: The name of the context parameters, or a pattern or module as in ``MAML(..., adapt)``.
        **arguments: Other arguments of :class:`MAML`, except ``adapt``.

    Raises:
        ValueError: If the model has no such parameter, or :class:`MAML` raises for another argument.
        TypeError: If :class:`MAML` raises it.

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
        refuse_fixed(
            "CAVIA", arguments, adapt="only the context is adapted. Pass context=, or use MAML(..., adapt)."
        )
        super().__init__(model, loss_fn, inner=inner, steps=steps, adapt=context, **arguments)

    def _start(self, model: nn.Module, params: Params, tasks: Tasks, stacked: bool) -> Params:
        """Return zeros for each task."""
        shape = (tasks.count,) if stacked else ()
        return {name: p.new_zeros((*shape, *p.shape)) for name, p in params.items()}
