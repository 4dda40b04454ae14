"""Adagrad: step sizes that shrink with the squares of all gradients so far."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.core.tree import Params
from metagrad.optim.arithmetic import minus_quotient, plus_scaled, root
from metagrad.optim.hyperparameters import check_hyperparameter, is_used
from metagrad.optim.per_parameter import PerParameter, Values
from metagrad.optim.rule import Hyperparameter, functional_optimizer, hyperparameter


class AdagradState(NamedTuple):
    """The state of :class:`AdagradRule`.

    Attributes:
        step: Steps taken.
        total: Sums of the squares of the gradients, in the shapes of the parameters.
    """

    step: int
    total: Params


@functional_optimizer
class AdagradRule(PerParameter):
    r"""The functional form of Adagrad. It takes the steps of ``torch.optim.Adagrad``.

    .. math::
        s_t = s_{t-1} + g_t^2, \qquad
        w_t = w_{t-1} - \frac{\eta}{1 + (t - 1) \gamma} \, \frac{g_t}{\sqrt{s_t} + \epsilon}

    The update is also differentiable if all gradients so far are exactly zero. The derivative of the root is
    then taken as 0.

    These arguments take every form of :data:`Hyperparameter`, and may require grad: lr, lr_decay, eps, weight_decay.

    Args:
        lr: The learning rate :math:`\eta`.
        lr_decay: Decay of the learning rate, :math:`\gamma`.
        eps: Added to the square root in the denominator.
        weight_decay: The factor of the parameters that is added to their gradients.
        initial_accumulator_value: The sum :math:`s_0` before the first step, a number or a 0-d tensor.
        maximize: Maximize the loss: negate the gradient.

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

    lr: Hyperparameter = hyperparameter(default=1e-2)
    _: KW_ONLY
    lr_decay: Hyperparameter = hyperparameter(default=0.0)
    eps: Hyperparameter = hyperparameter(default=1e-10)
    weight_decay: Hyperparameter = hyperparameter(default=0.0)
    initial_accumulator_value: float | Tensor = 0.0
    maximize: bool = False

    call, State = "adagrad(...)", AdagradState
    decays_linearly = False
    nested = ("initial_accumulator_value",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_hyperparameter(self.call, "initial_accumulator_value", self.initial_accumulator_value)

    def init_slots(self, param: Tensor) -> tuple[Tensor]:
        """Return the sum before the first step."""
        return ((torch.zeros_like(param) + self.initial_accumulator_value).to(param.dtype),)

    def update_param(
        self, h: Values, step: float | Tensor, w: Tensor, g: Tensor, total: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a parameter and its sum after one step."""
        if is_used(h.weight_decay):
            g = plus_scaled(g, h.weight_decay, w)
        total = torch.addcmul(total, g, g)
        return minus_quotient(w, h.lr / (1 + step * h.lr_decay), g, root(total) + h.eps), total


adagrad = AdagradRule
