"""RMSprop: gradients over the root of a running average of their squares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.optim.arithmetic import average, plus_scaled, root
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.per_parameter import PerParameter
from metagrad.optim.rule import Hyperparameter, Params


class RMSpropState(NamedTuple):
    """What :class:`RMSprop` carries from step to step."""

    step: int  # steps taken
    square: Params  # averages of the squares of the gradients, in the shapes of the parameters
    mean: Params | None  # averages of the gradients; None unless centered
    momentum: Params | None  # velocities; None without momentum


@dataclass(frozen=True, eq=False)
class RMSprop(PerParameter):
    """The rule that :func:`rmsprop` makes."""

    lr: Hyperparameter
    alpha: Hyperparameter = 0.99
    eps: Hyperparameter = 1e-8
    weight_decay: Hyperparameter = 0.0
    momentum: Hyperparameter = 0.0
    centered: bool = False
    maximize: bool = False

    call, State = "rmsprop(...)", RMSpropState
    hyper = ("lr", "alpha", "eps", "weight_decay", "momentum")
    fractions = ("alpha",)

    @property
    def decays_linearly(self) -> bool:
        """A step with a zero gradient is not linear in the parameters: their decay goes through the root."""
        return False

    def slots(self, param: Tensor) -> tuple[Tensor | None, ...]:
        """Return averages and a velocity of zero, as far as there are such."""
        zeros = torch.zeros_like(param)
        return zeros, zeros if self.centered else None, zeros if is_used(self.momentum) else None

    def move(
        self,
        step: float | Tensor,
        w: Tensor,
        g: Tensor,
        square: Tensor,
        mean: Tensor | None,
        velocity: Tensor | None,
        *,
        lr: float | Tensor,
        alpha: float | Tensor,
        eps: float | Tensor,
        weight_decay: float | Tensor,
        momentum: float | Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Return a parameter, its averages and its velocity after one step."""
        if is_used(weight_decay):
            g = plus_scaled(g, weight_decay, w)
        square = average(square, alpha, g * g)
        variance = square
        if mean is not None:
            mean = average(mean, alpha, g)
            variance = square - mean * mean
        direction = g / (root(variance) + eps)
        if velocity is not None:
            direction = velocity = plus_scaled(direction, momentum, velocity)
        return plus_scaled(w, lr, direction, sign=-1), square, mean, velocity


def rmsprop(
    lr: Hyperparameter = 1e-2,
    *,
    alpha: Hyperparameter = 0.99,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    momentum: Hyperparameter = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> RMSprop:
    r"""Make the rule of RMSprop; equal to ``torch.optim.RMSprop`` step for step.

    .. math::
        v_t &= \alpha v_{t-1} + (1 - \alpha) g_t^2, \qquad
        b_t = \mu b_{t-1} + \frac{g_t}{\sqrt{v_t - \bar g_t^2} + \epsilon} \\
        w_t &= w_{t-1} - \eta \, b_t

    with the average gradient :math:`\bar g_t = \alpha \bar g_{t-1} + (1 - \alpha) g_t` if ``centered``, else 0.
    The rule can be differentiated where a gradient is exactly zero: the derivative of the root is taken as 0
    there.

    Args:
        lr: The step size :math:`\eta`, in the forms of :data:`Hyperparameter`; may require grad, as may the rest.
        alpha: How much of the average of squares is kept, from 0 to below 1.
        eps: What is added to the root, which bounds the step where gradients vanish.
        weight_decay: The factor of the parameters that is added to their gradients.
        momentum: The share :math:`\mu` of the last velocity that is kept; 0 keeps none.
        centered: Divide by the root of the variance of the gradients instead of their second moment.
        maximize: Climb: take the gradient with the other sign.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``.

    Raises:
        ValueError: A number is out of its range; in ``update``, a value for a step or a parameter is missing.
        TypeError: A hyper-parameter is of an unknown form; in ``init``, a parameter is complex; in ``update``, a
            gradient is sparse: use ``rowwise``.

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
    return RMSprop(
        lr=lr,
        alpha=alpha,
        eps=eps,
        weight_decay=weight_decay,
        momentum=momentum,
        centered=centered,
        maximize=maximize,
    )
