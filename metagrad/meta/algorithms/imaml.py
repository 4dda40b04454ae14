"""iMAML: the derivative of a regularised minimum, instead of that of the steps that lead there."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from metagrad.hypergrad import CG
from metagrad.hypergrad.implicit import ImplicitMethod
from metagrad.meta.maml import MAML
from metagrad.meta.objective.task_loss import LossFn
from metagrad.optim.rules import Rule


class iMAML(MAML):  # noqa: N801 - the name of the paper
    r"""Implicit MAML: tasks adapt to a minimum that a proximal term holds near the initialisation.

    .. math::
        \phi_i^*(\theta) = \arg\min_\phi L_i^{\mathrm{support}}(\phi) + \frac{\lambda}{2} |\phi - \theta|^2, \qquad
        \frac{d\phi_i^*}{d\theta} = \Bigl( I + \frac{1}{\lambda} \nabla^2 L_i^{\mathrm{support}}(\phi_i^*) \Bigr)^{-1}

    The inverse is applied to the gradient of the query loss, of all tasks together, by ``hypergradient``. Memory does
    not grow with ``steps``, and any rule may take them; the meta-gradient is as right as they converge.

    Args:
        model: As of :class:`MAML`.
        loss_fn: As of :class:`MAML`.
        inner: The rule of the inner steps; its hyper-parameters are numbers, for a minimum does not depend on them.
        steps: The number of inner steps: enough to come close to the minimum.
        proximal: The number :math:`\lambda`, above 0; the paper takes 2 for Omniglot with 5 ways and 0.5 for
            mini-ImageNet. Above the most negative curvature of the support loss, or the solve raises.
        hypergradient: The inverse; None is `CG(steps=5)`, conjugate gradients from zero as in the paper. How much a
            step adds depends on the curvature over :math:`\lambda`: on a small regression with the 2 of the paper, 5
            steps leave 1.1 % of the inverse, 6 leave 0.4 % and 10 leave 0.01 %.
        **arguments: As of :class:`MAML`.

    Raises:
        ValueError: As :class:`MAML`.

    Example:
        >>> imaml = metagrad.iMAML(
        ...     torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, inner=metagrad.optim.rules.sgd(lr=0.1), steps=50
        ... )
        >>> task = metagrad.tasks.Sinusoid(shots=10, queries=10)
        >>> imaml(task.sample(4, generator=torch.Generator().manual_seed(0))).loss.backward()
        >>> imaml.model.weight.grad.shape
        torch.Size([1, 1])

    References:
        Rajeswaran, Finn, Kakade, Levine, "Meta-learning with implicit gradients", NeurIPS 2019, equations 3 and 6,
        algorithms 1 and 2.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        inner: Rule,
        steps: int,
        proximal: float | Tensor = 2.0,
        hypergradient: ImplicitMethod | None = None,
        **arguments: Any,
    ) -> None:
        method = CG(steps=5) if hypergradient is None else hypergradient
        super().__init__(
            model, loss_fn, inner=inner, steps=steps, proximal=proximal, hypergradient=method, **arguments
        )
