"""Adadelta: steps in the units of the parameters, whatever those of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.optim.arithmetic import average, plus_scaled, root
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.per_parameter import PerParameter
from metagrad.optim.rule import Hyperparameter, Params


class AdadeltaState(NamedTuple):
    """What :class:`Adadelta` carries from step to step."""

    step: int  # steps taken
    square: Params  # averages of the squares of the gradients, in the shapes of the parameters
    moved: Params  # averages of the squares of the steps, before they are scaled by lr


@dataclass(frozen=True, eq=False)
class Adadelta(PerParameter):
    """The rule that :func:`adadelta` makes."""

    lr: Hyperparameter = 1.0
    rho: Hyperparameter = 0.9
    eps: Hyperparameter = 1e-6
    weight_decay: Hyperparameter = 0.0
    maximize: bool = False

    call, State = "adadelta(...)", AdadeltaState
    hyper = ("lr", "rho", "eps", "weight_decay")
    fractions = ("rho",)

    @property
    def decays_linearly(self) -> bool:
        """A step with a zero gradient is not linear in the parameters: their decay goes through the root."""
        return False

    def slots(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Return averages of zero."""
        zeros = torch.zeros_like(param)
        return zeros, zeros

    def move(
        self,
        step: float | Tensor,
        w: Tensor,
        g: Tensor,
        square: Tensor,
        moved: Tensor,
        *,
        lr: float | Tensor,
        rho: float | Tensor,
        eps: float | Tensor,
        weight_decay: float | Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a parameter and its averages after one step."""
        if is_used(weight_decay):
            g = plus_scaled(g, weight_decay, w)
        square = average(square, rho, g * g)
        direction = root(moved + eps) / root(square + eps) * g
        return plus_scaled(w, lr, direction, sign=-1), square, average(moved, rho, direction * direction)


def adadelta(
    lr: Hyperparameter = 1.0,
    *,
    rho: Hyperparameter = 0.9,
    eps: Hyperparameter = 1e-6,
    weight_decay: Hyperparameter = 0.0,
    maximize: bool = False,
) -> Adadelta:
    r"""Make the rule of Adadelta; equal to ``torch.optim.Adadelta`` step for step.

    .. math::
        v_t &= \rho v_{t-1} + (1 - \rho) g_t^2, \qquad
        d_t = \frac{\sqrt{u_{t-1} + \epsilon}}{\sqrt{v_t + \epsilon}} \, g_t \\
        u_t &= \rho u_{t-1} + (1 - \rho) d_t^2, \qquad w_t = w_{t-1} - \eta \, d_t

    Args:
        lr: The factor :math:`\eta` of the step, 1 in the paper; in the forms of :data:`Hyperparameter`; may require
            grad, as may the rest.
        rho: How much of both averages is kept, from 0 to below 1.
        eps: What is added below the roots. It sets the first steps going, whose length is
            :math:`\sqrt{\epsilon / (1 - \rho)}`, and must be above 0 for that.
        weight_decay: The factor of the parameters that is added to their gradients.
        maximize: Climb: take the gradient with the other sign.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``.

    Raises:
        ValueError: A number is out of its range; in ``update``, a value for a step or a parameter is missing.
        TypeError: A hyper-parameter is of an unknown form; in ``init``, a parameter is complex; in ``update``, a
            gradient is sparse: use ``rowwise``.

    Example:
        >>> rule = metagrad.optim.rules.adadelta(rho=0.5, eps=1.0)
        >>> params = {"w": torch.tensor(2.0)}
        >>> new, state = rule.update({"w": torch.tensor(4.0)}, rule.init(params), params)  # 4 / sqrt(8 + 1)
        >>> new["w"]
        tensor(0.6667)

    References:
        Zeiler, "ADADELTA: an adaptive learning rate method", arXiv:1212.5701, algorithm 1.
    """
    return Adadelta(lr=lr, rho=rho, eps=eps, weight_decay=weight_decay, maximize=maximize)
