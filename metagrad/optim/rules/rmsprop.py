"""RMSprop: gradients over the root of a running average of their squares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from metagrad.optim.rules.rule import (
    Hyperparameter,
    Params,
    average,
    check_fraction,
    check_hyperparameter,
    is_used,
    plus_scaled,
    root,
    strided,
    values_at,
)


class RMSpropState(NamedTuple):
    """What :class:`RMSprop` carries from step to step."""

    step: int  # steps taken
    square: Params  # averages of the squares of the gradients, in the shapes of the parameters
    mean: Params | None  # averages of the gradients; None unless centered
    momentum: Params | None  # velocities; None without momentum


@dataclass(frozen=True, eq=False)
class RMSprop:
    """The rule that :func:`rmsprop` makes."""

    lr: Hyperparameter
    alpha: Hyperparameter = 0.99
    eps: Hyperparameter = 1e-8
    weight_decay: Hyperparameter = 0.0
    momentum: Hyperparameter = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "momentum"):
            check_hyperparameter("rmsprop(...)", name, getattr(self, name))
        check_fraction("rmsprop(...)", "alpha", self.alpha)

    @property
    def decays_linearly(self) -> bool:
        """A step with a zero gradient is not linear in the parameters: their decay goes through the root."""
        return False

    def init(self, params: Params) -> RMSpropState:
        """Return the state before the first step."""

        def zeros(wanted: bool) -> Params | None:
            return {key: torch.zeros_like(p) for key, p in params.items()} if wanted else None

        squares = zeros(True)
        assert squares is not None
        return RMSpropState(0, squares, zeros(self.centered), zeros(is_used(self.momentum)))

    def update(
        self, grads: Params, state: RMSpropState, params: Params, curvature: object | None = None
    ) -> tuple[Params, RMSpropState]:
        """Take one step; ``curvature`` is not used."""
        lrs, alphas, epsilons, decays, momenta = (
            values_at(name, getattr(self, name), state.step, params)
            for name in ("lr", "alpha", "eps", "weight_decay", "momentum")
        )
        olds, directions = list(params.values()), strided("rmsprop(...)", grads, params)
        if is_used(self.weight_decay):
            directions = plus_scaled(directions, decays, olds)
        squares = [
            average(state.square[k], a, g * g) for k, a, g in zip(params, alphas, directions, strict=True)
        ]
        means, variances = None, squares
        if state.mean is not None:
            means = [average(state.mean[k], a, g) for k, a, g in zip(params, alphas, directions, strict=True)]
            variances = [square - m * m for square, m in zip(squares, means, strict=True)]
        moves = [g / (root(v) + eps) for g, v, eps in zip(directions, variances, epsilons, strict=True)]
        if state.momentum is not None:
            moves = plus_scaled(moves, momenta, [state.momentum[key] for key in params])
        news = plus_scaled(olds, lrs, moves, sign=-1)
        return dict(zip(params, news, strict=True)), RMSpropState(
            state.step + 1,
            dict(zip(params, squares, strict=True)),
            None if means is None else dict(zip(params, means, strict=True)),
            None if state.momentum is None else dict(zip(params, moves, strict=True)),
        )


def rmsprop(
    lr: Hyperparameter = 1e-2,
    *,
    alpha: Hyperparameter = 0.99,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    momentum: Hyperparameter = 0.0,
    centered: bool = False,
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

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``.

    Raises:
        ValueError: A number is out of its range; in ``update``, a value for a step or a parameter is missing.
        TypeError: A hyper-parameter is of an unknown form; in ``update``, a gradient is sparse: use ``rowwise``.

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
        lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered
    )
