"""Stochastic gradient descent, with momentum, Nesterov's momentum and weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.optim.rules.rule import (
    Hyperparameter,
    Params,
    check_hyperparameter,
    is_used,
    plus_scaled,
    values_at,
)


class SGDState(NamedTuple):
    """What :class:`SGD` carries from step to step."""

    step: int  # steps taken
    momentum: Params | None  # velocities, in the shapes of the parameters; None without momentum


@dataclass(frozen=True, eq=False)
class SGD:
    """The rule that :func:`sgd` makes."""

    lr: Hyperparameter
    momentum: Hyperparameter = 0.0
    weight_decay: Hyperparameter = 0.0
    nesterov: bool = False

    @property
    def decays_linearly(self) -> bool:
        """A step with a zero gradient is linear in the parameters and the velocities."""
        return True

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            check_hyperparameter("sgd(...)", name, getattr(self, name))
        if self.nesterov and not is_used(self.momentum):
            raise ValueError("sgd(..., nesterov=True): Nesterov's momentum needs momentum, got 0.")

    def init(self, params: Params) -> SGDState:
        """Return the state before the first step."""
        if not is_used(self.momentum):
            return SGDState(0, None)
        return SGDState(0, {key: torch.zeros_like(p) for key, p in params.items()})

    def update(
        self, grads: Params, state: SGDState, params: Params, curvature: object | None = None
    ) -> tuple[Params, SGDState]:
        """Take one step; ``curvature`` is not used."""
        olds = list(params.values())
        directions = [grads[key] for key in params]
        if is_used(self.weight_decay):
            directions = plus_scaled(directions, self._values("weight_decay", state, params), olds)
        velocities = state.momentum
        if velocities is not None:
            momenta = self._values("momentum", state, params)
            moving = plus_scaled(directions, momenta, [velocities[key] for key in params])
            directions = plus_scaled(directions, momenta, moving) if self.nesterov else moving
            velocities = dict(zip(params, moving, strict=True))
        news = plus_scaled(olds, self._values("lr", state, params), directions, sign=-1)
        return dict(zip(params, news, strict=True)), SGDState(state.step + 1, velocities)

    def _values(self, name: str, state: SGDState, params: Params) -> list[float | Tensor]:
        return values_at(name, getattr(self, name), state.step, params)


def sgd(
    lr: Hyperparameter,
    *,
    momentum: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    nesterov: bool = False,
) -> SGD:
    r"""Make the rule of stochastic gradient descent; equal to ``torch.optim.SGD`` step for step.

    .. math::
        d_t &= g_t + \lambda w_t, \qquad v_{t+1} = \mu v_t + d_t \\
        w_{t+1} &= w_t - \eta \, (d_t + \mu v_{t+1} \text{ if nesterov, else } v_{t+1})

    Every hyper-parameter is a number or a tensor that may require grad, and takes the forms of
    :data:`Hyperparameter`: one value, one for each step, one for each parameter by name.

    Args:
        lr: The step size :math:`\eta`. A dict of tensors in the parameters' shapes is Meta-SGD.
        momentum: The share :math:`\mu` of the last velocity that is kept; 0 keeps none.
        weight_decay: The factor :math:`\lambda` of the parameters that is added to their gradients.
        nesterov: Look ahead along the new velocity.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``.

    Raises:
        ValueError: A number is negative, or ``nesterov`` without momentum; in ``update``, when a value for a
            step or a parameter is missing.
        TypeError: A hyper-parameter is of an unknown form.

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
    return SGD(lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
