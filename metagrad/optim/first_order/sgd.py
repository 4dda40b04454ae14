"""Stochastic gradient descent, with momentum, Nesterov's momentum and weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.optim.arithmetic import plus_scaled
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.per_parameter import PerParameter
from metagrad.optim.rule import Hyperparameter, Params


class SGDState(NamedTuple):
    """What :class:`SGD` carries from step to step."""

    step: int  # steps taken
    momentum: Params | None  # velocities, in the shapes of the parameters; None without momentum


@dataclass(frozen=True, eq=False)
class SGD(PerParameter):
    """The rule that :func:`sgd` makes."""

    lr: Hyperparameter
    momentum: Hyperparameter = 0.0
    dampening: Hyperparameter = 0.0
    weight_decay: Hyperparameter = 0.0
    nesterov: bool = False
    maximize: bool = False

    call, State = "sgd(...)", SGDState
    hyper = ("lr", "momentum", "dampening", "weight_decay")
    takes_rows = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not is_used(self.momentum):
            raise ValueError("sgd(..., nesterov=True): Nesterov's momentum needs momentum, got 0.")
        if self.nesterov and isinstance(self.dampening, (int, float)) and self.dampening != 0:
            raise ValueError(
                f"sgd(..., nesterov=True): Nesterov's momentum is not dampened, got dampening={self.dampening}."
            )

    @property
    def decays_linearly(self) -> bool:
        """A step with a zero gradient is linear in the parameters and the velocities."""
        return True

    def slots(self, param: Tensor) -> tuple[Tensor | None]:
        """Return a velocity of zero, if there is one."""
        return (torch.zeros_like(param) if is_used(self.momentum) else None,)

    def move(
        self,
        step: float | Tensor,
        w: Tensor,
        g: Tensor,
        velocity: Tensor | None,
        *,
        lr: float | Tensor,
        momentum: float | Tensor,
        dampening: float | Tensor,
        weight_decay: float | Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Return a parameter and its velocity after one step."""
        if is_used(weight_decay):
            g = plus_scaled(g, weight_decay, w)
        if velocity is not None:
            fresh = g
            if is_used(dampening):
                begun = step.clamp(max=1) if isinstance(step, Tensor) else min(step, 1)
                fresh = g * (1 - begun * dampening)
            velocity = plus_scaled(fresh, momentum, velocity)
            g = plus_scaled(g, momentum, velocity) if self.nesterov else velocity
        return plus_scaled(w, lr, g, sign=-1), velocity


def sgd(
    lr: Hyperparameter,
    *,
    momentum: Hyperparameter = 0.0,
    dampening: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> SGD:
    r"""Make the rule of stochastic gradient descent; equal to ``torch.optim.SGD`` step for step.

    .. math::
        d_t &= g_t + \lambda w_t, \qquad v_{t+1} = \mu v_t + (1 - \tau) d_t \\
        w_{t+1} &= w_t - \eta \, (d_t + \mu v_{t+1} \text{ if nesterov, else } v_{t+1})

    Every hyper-parameter is a number or a tensor that may require grad, and takes the forms of
    :data:`Hyperparameter`: one value, one for each step, one for each parameter by name.

    Args:
        lr: The step size :math:`\eta`. A dict of tensors in the parameters' shapes is Meta-SGD.
        momentum: The share :math:`\mu` of the last velocity that is kept; 0 keeps none.
        dampening: The share :math:`\tau` of a gradient that its velocity leaves out, but in the first step.
        weight_decay: The factor :math:`\lambda` of the parameters that is added to their gradients.
        nesterov: Look ahead along the new velocity.
        maximize: Climb: take the gradient with the other sign.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``.

    Raises:
        ValueError: A number is negative, ``nesterov`` without momentum or with dampening; in ``update``, a value
            for a step or a parameter is missing, or a gradient.
        TypeError: A hyper-parameter is of an unknown form; in ``init``, a parameter is complex.

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
    return SGD(
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
    )
