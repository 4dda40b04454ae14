"""Adagrad: step sizes that shrink with the squares of all gradients so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.optim.arithmetic import plus_scaled, root
from metagrad.optim.hyperparameters import check_hyperparameter, is_used
from metagrad.optim.per_parameter import PerParameter
from metagrad.optim.rule import Hyperparameter, Params


class AdagradState(NamedTuple):
    """What :class:`Adagrad` carries from step to step."""

    step: int  # steps taken
    total: Params  # sums of the squares of the gradients, in the shapes of the parameters


@dataclass(frozen=True, eq=False)
class Adagrad(PerParameter):
    """The rule that :func:`adagrad` makes."""

    lr: Hyperparameter
    lr_decay: Hyperparameter = 0.0
    eps: Hyperparameter = 1e-10
    weight_decay: Hyperparameter = 0.0
    initial_accumulator_value: float | Tensor = 0.0
    maximize: bool = False

    call, State = "adagrad(...)", AdagradState
    hyper = ("lr", "lr_decay", "eps", "weight_decay")
    nested = ("initial_accumulator_value",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_hyperparameter(self.call, "initial_accumulator_value", self.initial_accumulator_value)

    @property
    def decays_linearly(self) -> bool:
        """A step with a zero gradient is not linear in the parameters: their decay goes through the root."""
        return False

    def slots(self, param: Tensor) -> tuple[Tensor]:
        """Return the sum before the first step."""
        return ((torch.zeros_like(param) + self.initial_accumulator_value).to(param.dtype),)

    def move(
        self,
        step: float | Tensor,
        w: Tensor,
        g: Tensor,
        total: Tensor,
        *,
        lr: float | Tensor,
        lr_decay: float | Tensor,
        eps: float | Tensor,
        weight_decay: float | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return a parameter and its sum after one step."""
        if is_used(weight_decay):
            g = plus_scaled(g, weight_decay, w)
        total = total + g * g
        return w - (lr / (1 + step * lr_decay)) * g / (root(total) + eps), total


def adagrad(
    lr: Hyperparameter = 1e-2,
    *,
    lr_decay: Hyperparameter = 0.0,
    eps: Hyperparameter = 1e-10,
    weight_decay: Hyperparameter = 0.0,
    initial_accumulator_value: float | Tensor = 0.0,
    maximize: bool = False,
) -> Adagrad:
    r"""Make the rule of Adagrad; equal to ``torch.optim.Adagrad`` step for step.

    .. math::
        s_t = s_{t-1} + g_t^2, \qquad
        w_t = w_{t-1} - \frac{\eta}{1 + (t - 1) \gamma} \, \frac{g_t}{\sqrt{s_t} + \epsilon}

    The rule can be differentiated where all gradients so far are exactly zero: the derivative of the root is
    taken as 0 there.

    Args:
        lr: The step size :math:`\eta`, in the forms of :data:`Hyperparameter`; may require grad, as may the next.
        lr_decay: How fast it shrinks from step to step, :math:`\gamma`.
        eps: What is added to the root.
        weight_decay: The factor of the parameters that is added to their gradients.
        initial_accumulator_value: The sum :math:`s_0` before the first step, a number or a 0-d tensor.
        maximize: Climb: take the gradient with the other sign.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``.

    Raises:
        ValueError: A number is negative; in ``update``, a value for a step or a parameter is missing.
        TypeError: A hyper-parameter is of an unknown form; in ``init``, a parameter is complex; in ``update``, a
            gradient is sparse: use ``rowwise``.

    Example:
        >>> rule = metagrad.optim.rules.adagrad(lr=0.5, eps=0.0)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> new, state = rule.update({"w": torch.tensor([3.0, -4.0])}, rule.init(params), params)
        >>> new["w"], state.total["w"]
        (tensor([0.5000, 2.5000]), tensor([ 9., 16.]))

    References:
        Duchi, Hazan, Singer, "Adaptive subgradient methods for online learning and stochastic optimization",
        JMLR 12, 2011, section 1.3.
    """
    return Adagrad(
        lr=lr,
        lr_decay=lr_decay,
        eps=eps,
        weight_decay=weight_decay,
        initial_accumulator_value=initial_accumulator_value,
        maximize=maximize,
    )
