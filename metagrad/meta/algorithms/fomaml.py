"""First-order MAML."""

from __future__ import annotations

from typing import Any

from torch import nn

from metagrad.core.tree import LossFn
from metagrad.meta.maml import MAML
from metagrad.meta.options import refuse_fixed
from metagrad.optim.rules import Rule


class FOMAML(MAML):
    r"""First-order MAML: the meta-gradient is the gradient of the query loss at the adapted parameters.

    .. math:: g = \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T} \nabla L_i^{\mathrm{query}}(\phi_i), \qquad
        \phi_i = U_i^{\mathrm{steps}}(\theta)

    The inner gradients are constants, as in ``MAML(..., order=1)``, so no second derivatives are computed.

    Args:
        model: The model, as in :class:`MAML`.
        loss_fn: The loss function, as in :class:`MAML`.
        inner: The functional optimizer of the inner steps.
        steps: The number of inner steps.
        **arguments: Other arguments of :class:`MAML`, except ``order``.

    Raises:
        TypeError: If ``order`` is given.

    Example:
        The loss of a task is :math:`L = (w - y)^2 / 2`. One step with learning rate 1/2 from :math:`w = 0` ends at
        :math:`y / 2`:

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> torch.nn.init.zeros_(model.weight).item()
        0.0
        >>> half_square = lambda prediction, y: (prediction - y).square().mean() / 2
        >>> fomaml = metagrad.FOMAML(model, half_square, inner=metagrad.optim.rules.sgd(lr=0.5), steps=1)
        >>> task = (torch.ones(1, 1, 1), torch.full((1, 1, 1), 4.0))
        >>> fomaml((task, task)).loss.backward()
        >>> model.weight.grad.item()
        -2.0

    References:
        Finn, Abbeel, Levine, "Model-agnostic meta-learning for fast adaptation of deep networks", ICML 2017,
        section 5.2; Nichol, Achiam, Schulman, "On first-order meta-learning algorithms", arXiv:1803.02999, section 2.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, *, inner: Rule, steps: int, **arguments: Any
    ) -> None:
        refuse_fixed("FOMAML", arguments, order="it is 1. Use MAML(..., order=2) for second derivatives.")
        super().__init__(model, loss_fn, inner=inner, steps=steps, order=1, **arguments)
