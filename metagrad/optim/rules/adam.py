"""Adam, and with decoupled weight decay AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

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


class AdamState(NamedTuple):
    """What :class:`Adam` carries from step to step."""

    step: int  # steps taken
    mean: Params  # averages of the gradients, in the shapes of the parameters
    square: Params  # averages of their squares


@dataclass(frozen=True, eq=False)
class Adam:
    """The rule that :func:`adam` makes."""

    lr: Hyperparameter
    betas: tuple[Hyperparameter, Hyperparameter] = (0.9, 0.999)
    eps: Hyperparameter = 1e-8
    weight_decay: Hyperparameter = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_hyperparameter("adam(...)", name, getattr(self, name))
        for index, beta in enumerate(self.betas):
            check_fraction("adam(...)", f"betas[{index}]", beta)

    @property
    def decays_linearly(self) -> bool:
        """A step with a zero gradient is linear in the parameters and the state."""
        return self.decoupled

    def init(self, params: Params) -> AdamState:
        """Return the state before the first step."""
        zeros = {key: torch.zeros_like(p) for key, p in params.items()}
        return AdamState(0, zeros, dict(zeros))

    def update(
        self, grads: Params, state: AdamState, params: Params, curvature: object | None = None
    ) -> tuple[Params, AdamState]:
        """Take one step; ``curvature`` is not used."""
        at = {name: self._values(name, state.step, params) for name in ("lr", "eps", "weight_decay")}
        first = values_at("betas[0]", self.betas[0], state.step, params)
        second = values_at("betas[1]", self.betas[1], state.step, params)
        olds, directions = list(params.values()), strided("adam(...)", grads, params)
        if is_used(self.weight_decay) and not self.decoupled:
            directions = plus_scaled(directions, at["weight_decay"], olds)
        elif is_used(self.weight_decay):
            olds = [w * (1 - lr * d) for w, lr, d in zip(olds, at["lr"], at["weight_decay"], strict=True)]
        means = [average(state.mean[k], b, g) for k, b, g in zip(params, first, directions, strict=True)]
        squares = [
            average(state.square[k], b, g * g) for k, b, g in zip(params, second, directions, strict=True)
        ]
        steps = state.step + 1
        news = [
            w - (lr / (1 - b1**steps)) * m / (root(v) / (1 - b2**steps) ** 0.5 + eps)
            for w, m, v, lr, b1, b2, eps in zip(
                olds, means, squares, at["lr"], first, second, at["eps"], strict=True
            )
        ]
        return dict(zip(params, news, strict=True)), AdamState(
            steps, dict(zip(params, means, strict=True)), dict(zip(params, squares, strict=True))
        )

    def _values(self, name: str, step: int, params: Params) -> list[float | Tensor]:
        return values_at(name, getattr(self, name), step, params)


def adam(
    lr: Hyperparameter = 1e-3,
    *,
    betas: tuple[Hyperparameter, Hyperparameter] = (0.9, 0.999),
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decoupled: bool = False,
) -> Adam:
    r"""Make the rule of Adam; equal to ``torch.optim.Adam`` and ``AdamW`` step for step.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        w_t &= w_{t-1} - \eta \, \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    The rule can be differentiated where a gradient is exactly zero: the derivative of the root is taken as 0
    there. Where it is merely tiny, the step is the sign of the gradient, and its derivative is as large as
    :math:`\eta / \epsilon`.

    Args:
        lr: The step size :math:`\eta`, in the forms of :data:`Hyperparameter`; may require grad, as may the rest.
        betas: How much of the averages of gradients and of their squares is kept, each from 0 to below 1.
        eps: What is added to the root; it bounds the step where gradients vanish.
        weight_decay: The factor :math:`\lambda` of the parameters that is added to their gradients; if
            ``decoupled``, of the step :math:`\eta \lambda w` that shrinks them beside Adam's.
        decoupled: Decay the weights apart from the gradients (AdamW, whose default decay is 0.01).

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``.

    Raises:
        ValueError: A number is out of its range; in ``update``, a value for a step or a parameter is missing.
        TypeError: A hyper-parameter is of an unknown form; in ``update``, a gradient is sparse: use ``rowwise``.

    Example:
        The first step is as long as ``lr``, whatever the gradient:

        >>> rule = metagrad.optim.rules.adam(lr=0.5, eps=0.0)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> new, state = rule.update({"w": torch.tensor([10.0, -0.1])}, rule.init(params), params)
        >>> new["w"]
        tensor([0.5000, 2.5000])

    References:
        Kingma, Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1; Loshchilov, Hutter,
        "Decoupled weight decay regularization", ICLR 2019, algorithm 2.
    """
    return Adam(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled=decoupled)
