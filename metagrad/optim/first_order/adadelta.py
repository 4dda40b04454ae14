"""Adadelta: steps in the units of the parameters, whatever those of the loss."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.optim.arithmetic import average_square, plus_scaled, root
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.per_parameter import PerParameter, Values
from metagrad.optim.rule import Hyperparameter, Params, functional_optimizer, hyperparameter, option


class AdadeltaState(NamedTuple):
    """The state of :class:`AdadeltaRule`.

    Attributes:
        step: Steps taken.
        square: Averages of the squares of the gradients, in the shapes of the parameters.
        moved: Averages of the squares of the steps, before they are scaled by lr.
    """

    step: int
    square: Params
    moved: Params


@functional_optimizer
class AdadeltaRule(PerParameter):
    r"""The functional form of Adadelta; equal to ``torch.optim.Adadelta`` step for step.

    .. math::
        v_t &= \rho v_{t-1} + (1 - \rho) g_t^2, \qquad
        d_t = \frac{\sqrt{u_{t-1} + \epsilon}}{\sqrt{v_t + \epsilon}} \, g_t \\
        u_t &= \rho u_{t-1} + (1 - \rho) d_t^2, \qquad w_t = w_{t-1} - \eta \, d_t

    Example:
        >>> rule = metagrad.optim.rules.adadelta(rho=0.5, eps=1.0)
        >>> params = {"w": torch.tensor(2.0)}
        >>> new, state = rule.update({"w": torch.tensor(4.0)}, rule.init(params), params)  # 4 / sqrt(8 + 1)
        >>> new["w"]
        tensor(0.6667)

    References:
        Zeiler, "ADADELTA: an adaptive learning rate method", arXiv:1212.5701, algorithm 1.
    """

    lr: Hyperparameter = hyperparameter(
        default=1.0, doc=r"The factor :math:`\eta` of the step, 1 in the paper."
    )
    _: KW_ONLY
    rho: Hyperparameter = hyperparameter(
        default=0.9, doc="How much of both averages is kept, from 0 to below 1.", below=1.0
    )
    eps: Hyperparameter = hyperparameter(
        default=1e-6,
        doc=r"What is added below the roots. It sets the first steps going, whose length is "
        r":math:`\sqrt{\epsilon / (1 - \rho)}`, and must be above 0 for that.",
    )
    weight_decay: Hyperparameter = hyperparameter(
        default=0.0, doc="The factor of the parameters that is added to their gradients."
    )
    maximize: bool = option(default=False, doc="Climb: take the gradient with the other sign.")

    call, State = "adadelta(...)", AdadeltaState
    decays_linearly = False

    def slots(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Return averages of zero."""
        zeros = torch.zeros_like(param)
        return zeros, zeros

    def move(
        self, h: Values, step: float | Tensor, w: Tensor, g: Tensor, square: Tensor, moved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a parameter and its averages after one step."""
        if is_used(h.weight_decay):
            g = plus_scaled(g, h.weight_decay, w)
        square = average_square(square, h.rho, g)
        direction = root(moved + h.eps) / root(square + h.eps) * g
        return plus_scaled(w, h.lr, direction, sign=-1), square, average_square(moved, h.rho, direction)


adadelta = AdadeltaRule
