"""RMSprop: gradients over the root of a running average of their squares."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.core.tree import Params
from metagrad.optim.arithmetic import average, average_square, plus_scaled, root
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.per_parameter import PerParameter, Values
from metagrad.optim.rule import Hyperparameter, functional_optimizer, hyperparameter


class RMSpropState(NamedTuple):
    """The state of :class:`RMSpropRule`.

    Attributes:
        step: Steps taken.
        square: Averages of the squares of the gradients, in the shapes of the parameters.
        mean: Averages of the gradients. None unless ``centered``.
        momentum: Velocities. None without momentum.
    """

    step: int
    square: Params
    mean: Params | None
    momentum: Params | None


@functional_optimizer
class RMSpropRule(PerParameter):
    r"""The functional form of RMSprop. It takes the steps of ``torch.optim.RMSprop``.

    .. math::
        v_t &= \alpha v_{t-1} + (1 - \alpha) g_t^2, \qquad
        b_t = \mu b_{t-1} + \frac{g_t}{\sqrt{v_t - \bar g_t^2 + \epsilon_r} + \epsilon} \\
        w_t &= w_{t-1} - \eta \, b_t

    with the average gradient :math:`\bar g_t = \alpha \bar g_{t-1} + (1 - \alpha) g_t` if ``centered``, else 0.
    The rule is differentiable at a gradient of exactly zero, where the derivative of the root is taken as 0.

    These arguments take every form of :data:`Hyperparameter`, and may require grad: lr, alpha, eps, eps_root,
    weight_decay, momentum.

    Args:
        lr: The learning rate :math:`\eta`.
        alpha: Decay rate of the average of squares, from 0 to below 1.
        eps: Added to the square root in the denominator. It bounds the step where gradients vanish.
        eps_root: Added inside the square root. It makes a training smooth in its data and hyperparameters.
        weight_decay: The factor of the parameters that is added to their gradients.
        momentum: The share :math:`\mu` of the last velocity that is kept. 0 disables momentum.
        centered: Divide by the standard deviation of the gradients, not by the root of their second moment.
        maximize: Maximize the loss: negate the gradient.

    Example:
        >>> rule = metagrad.optim.rules.rmsprop(lr=0.5, alpha=0.75, eps=0.0)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> new, state = rule.update({"w": torch.tensor([3.0, -4.0])}, rule.init(params), params)
        >>> new["w"]
        tensor([0., 3.])

    References:
        Tieleman, Hinton, "Lecture 6.5: RMSprop", COURSERA: Neural networks for machine learning, 2012; Graves,
        "Generating sequences with recurrent neural networks", arXiv:1308.0850, equations 38 to 45, for
        ``centered``.
    """

    lr: Hyperparameter = hyperparameter(default=1e-2)
    _: KW_ONLY
    alpha: Hyperparameter = hyperparameter(default=0.99, below=1.0)
    eps: Hyperparameter = hyperparameter(default=1e-8)
    eps_root: Hyperparameter = hyperparameter(default=0.0)
    weight_decay: Hyperparameter = hyperparameter(default=0.0)
    momentum: Hyperparameter = hyperparameter(default=0.0)
    centered: bool = False
    maximize: bool = False

    call, State = "rmsprop(...)", RMSpropState
    decays_linearly = False

    def init_slots(self, param: Tensor) -> tuple[Tensor | None, ...]:
        """Return zeros for the averages and the velocity that the options use."""
        zeros = torch.zeros_like(param)
        return zeros, zeros if self.centered else None, zeros if is_used(self.momentum) else None

    def update_param(
        self,
        h: Values,
        step: float | Tensor,
        w: Tensor,
        g: Tensor,
        square: Tensor,
        mean: Tensor | None,
        velocity: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Return a parameter, its averages and its velocity after one step."""
        if is_used(h.weight_decay):
            g = plus_scaled(g, h.weight_decay, w)
        square = average_square(square, h.alpha, g)
        variance = square
        if mean is not None:
            mean = average(mean, h.alpha, g)
            variance = square - mean * mean
        if is_used(h.eps_root):
            variance = variance + h.eps_root
        direction = g / (root(variance) + h.eps)
        if velocity is not None:
            direction = velocity = plus_scaled(direction, h.momentum, velocity)
        return plus_scaled(w, h.lr, direction, sign=-1), square, mean, velocity


rmsprop = RMSpropRule
