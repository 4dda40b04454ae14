"""Adagrad: step sizes that shrink with the squares of all gradients so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from metagrad.optim.rules.rule import (
    Hyperparameter,
    Params,
    check_hyperparameter,
    is_used,
    plus_scaled,
    root,
    strided,
    values_at,
)


class AdagradState(NamedTuple):
    """What :class:`Adagrad` carries from step to step."""

    step: int  # steps taken
    total: Params  # sums of the squares of the gradients, in the shapes of the parameters


@dataclass(frozen=True, eq=False)
class Adagrad:
    """The rule that :func:`adagrad` makes."""

    lr: Hyperparameter
    lr_decay: Hyperparameter = 0.0
    eps: Hyperparameter = 1e-10
    weight_decay: Hyperparameter = 0.0
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value"):
            check_hyperparameter("adagrad(...)", name, getattr(self, name))

    @property
    def decays_linearly(self) -> bool:
        """A step with a zero gradient is not linear in the parameters: their decay goes through the root."""
        return False

    def init(self, params: Params) -> AdagradState:
        """Return the state before the first step."""
        start = self.initial_accumulator_value
        return AdagradState(0, {key: torch.full_like(p, start) for key, p in params.items()})

    def update(
        self, grads: Params, state: AdagradState, params: Params, curvature: object | None = None
    ) -> tuple[Params, AdagradState]:
        """Take one step; ``curvature`` is not used."""
        lrs, shrinkages, epsilons, decays = (
            values_at(name, getattr(self, name), state.step, params)
            for name in ("lr", "lr_decay", "eps", "weight_decay")
        )
        olds, directions = list(params.values()), strided("adagrad(...)", grads, params)
        if is_used(self.weight_decay):
            directions = plus_scaled(directions, decays, olds)
        totals = [state.total[key] + g * g for key, g in zip(params, directions, strict=True)]
        news = [
            w - (lr / (1 + state.step * shrinkage)) * g / (root(total) + eps)
            for w, g, total, lr, shrinkage, eps in zip(
                olds, directions, totals, lrs, shrinkages, epsilons, strict=True
            )
        ]
        return dict(zip(params, news, strict=True)), AdagradState(
            state.step + 1, dict(zip(params, totals, strict=True))
        )


def adagrad(
    lr: Hyperparameter = 1e-2,
    *,
    lr_decay: Hyperparameter = 0.0,
    eps: Hyperparameter = 1e-10,
    weight_decay: Hyperparameter = 0.0,
    initial_accumulator_value: float = 0.0,
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
        initial_accumulator_value: The sum :math:`s_0` before the first step, a number.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``.

    Raises:
        ValueError: A number is negative; in ``update``, a value for a step or a parameter is missing.
        TypeError: A hyper-parameter is of an unknown form; in ``update``, a gradient is sparse: use ``rowwise``.

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
    )
