"""Stochastic gradient descent, with momentum, Nesterov's momentum and weight decay."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.core.checks import refuse
from metagrad.core.tree import Params
from metagrad.optim.arithmetic import plus_scaled
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.per_parameter import PerParameter, Values
from metagrad.optim.rule import Hyperparameter, functional_optimizer, hyperparameter


class SGDState(NamedTuple):
    """The state of :class:`SGDRule`.

    Attributes:
        step: Steps taken.
        momentum: Velocities, in the shapes of the parameters. None without momentum.
    """

    step: int
    momentum: Params | None


@functional_optimizer
class SGDRule(PerParameter):
    r"""The functional form of stochastic gradient descent. It takes the steps of ``torch.optim.SGD``.

    .. math::
        d_t &= g_t + \lambda w_t, \qquad v_{t+1} = \mu v_t + (1 - \tau) d_t \\
        w_{t+1} &= w_t - \eta \, (d_t + \mu v_{t+1} \text{ if nesterov, else } v_{t+1})

    Every hyperparameter is a number or a tensor that may require grad. It takes the forms of :data:`Hyperparameter`:
    one value, one for each step, or one for each parameter by name.

    These arguments take every form of :data:`Hyperparameter`, and may require grad: lr, momentum, dampening,
    weight_decay.

    Args:
        lr: The learning rate :math:`\eta`. A dict of tensors in the parameters' shapes is Meta-SGD.
        momentum: The share :math:`\mu` of the last velocity that is kept. 0 disables momentum.
        dampening: The share :math:`\tau` of each gradient that is not added to the velocity, except in the first
            step.
        weight_decay: The factor :math:`\lambda` of the parameters that is added to their gradients.
        nesterov: Look ahead along the new velocity.
        maximize: Maximize the loss: negate the gradient.

    Raises:
        ValueError: ``nesterov`` without momentum, or with dampening.

    Example:
        >>> rule = metagrad.optim.rules.sgd(lr=0.5)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> new, state = rule.update({"w": torch.tensor([1.0, 1.0])}, rule.init(params), params)
        >>> new, state.step
        ({'w': tensor([0.5000, 1.5000])}, 1)

    References:
        Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013,
        section 2; Li et al., "Meta-SGD", arXiv:1707.09835.
    """

    lr: Hyperparameter = hyperparameter()
    _: KW_ONLY
    momentum: Hyperparameter = hyperparameter(default=0.0)
    dampening: Hyperparameter = hyperparameter(default=0.0)
    weight_decay: Hyperparameter = hyperparameter(default=0.0)
    nesterov: bool = False
    maximize: bool = False

    call, State = "sgd(...)", SGDState
    decays_linearly = True
    takes_rows = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not is_used(self.momentum):
            raise ValueError("sgd(..., nesterov=True): Nesterov's momentum needs momentum, got 0.")
        if self.nesterov and isinstance(self.dampening, (int, float)) and self.dampening != 0:
            refuse("sgd(..., nesterov=True): dampening", "0", self.dampening)

    def init_slots(self, param: Tensor) -> tuple[Tensor | None]:
        """Return a velocity of zero, or None without momentum."""
        return (torch.zeros_like(param) if is_used(self.momentum) else None,)

    def update_param(
        self, h: Values, step: float | Tensor, w: Tensor, g: Tensor, velocity: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return a parameter and its velocity after one step."""
        if is_used(h.weight_decay):
            g = plus_scaled(g, h.weight_decay, w)
        if velocity is not None:
            fresh = g
            if is_used(h.dampening):
                begun = step.clamp(max=1) if isinstance(step, Tensor) else min(step, 1)
                fresh = g * (1 - begun * h.dampening)
            velocity = plus_scaled(fresh, h.momentum, velocity)
            g = plus_scaled(g, h.momentum, velocity) if self.nesterov else velocity
        return plus_scaled(w, h.lr, g, sign=-1), velocity


sgd = SGDRule
