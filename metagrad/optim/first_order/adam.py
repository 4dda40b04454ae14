"""Adam, and with decoupled weight decay AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.optim.arithmetic import average, plus_scaled, root
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.per_parameter import PerParameter
from metagrad.optim.rule import Hyperparameter, Params


class AdamState(NamedTuple):
    """What :class:`Adam` carries from step to step."""

    step: int  # steps taken
    mean: Params  # averages of the gradients, in the shapes of the parameters
    square: Params  # averages of their squares
    peak: Params | None  # the largest of these so far; None unless amsgrad


@dataclass(frozen=True, eq=False)
class Adam(PerParameter):
    """The rule that :func:`adam` and :func:`adamw` make."""

    lr: Hyperparameter
    betas: tuple[Hyperparameter, Hyperparameter] = (0.9, 0.999)
    eps: Hyperparameter = 1e-8
    weight_decay: Hyperparameter = 0.0
    decoupled: bool = False
    amsgrad: bool = False
    maximize: bool = False

    State = AdamState
    hyper = ("lr", "betas", "eps", "weight_decay")
    fractions = ("betas",)

    @property
    def call(self) -> str:  # type: ignore[reportIncompatibleVariableOverride]
        """The name that users know."""
        return "adamw(...)" if self.decoupled else "adam(...)"

    @property
    def decays_linearly(self) -> bool:
        """A step with a zero gradient is linear in the parameters and the state."""
        return self.decoupled

    def slots(self, param: Tensor) -> tuple[Tensor | None, ...]:
        """Return averages of zero, and no peak unless asked."""
        zeros = torch.zeros_like(param)
        return zeros, zeros, zeros if self.amsgrad else None

    def move(
        self,
        step: float | Tensor,
        w: Tensor,
        g: Tensor,
        mean: Tensor,
        square: Tensor,
        peak: Tensor | None,
        *,
        lr: float | Tensor,
        beta1: float | Tensor,
        beta2: float | Tensor,
        eps: float | Tensor,
        weight_decay: float | Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Return a parameter, its averages and their peak after one step."""
        if is_used(weight_decay):
            if self.decoupled:
                w = w * (1 - lr * weight_decay)
            else:
                g = plus_scaled(g, weight_decay, w)
        steps = step + 1
        mean, square = average(mean, beta1, g), average(square, beta2, g * g)
        peak = None if peak is None else torch.maximum(peak, square)
        scale = root(square if peak is None else peak) / (1 - beta2**steps) ** 0.5
        return w - (lr / (1 - beta1**steps)) * mean / (scale + eps), mean, square, peak


def adam(
    lr: Hyperparameter = 1e-3,
    *,
    betas: tuple[Hyperparameter, Hyperparameter] = (0.9, 0.999),
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decoupled: bool = False,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Adam:
    r"""Make the rule of Adam; equal to ``torch.optim.Adam`` step for step.

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
        decoupled: Decay the weights apart from the gradients, see :func:`adamw`.
        amsgrad: Divide by the root of the largest :math:`v` so far, so that step sizes never grow.
        maximize: Climb: take the gradient with the other sign.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``.

    Raises:
        ValueError: A number is out of its range; in ``update``, a value for a step or a parameter is missing.
        TypeError: A hyper-parameter is of an unknown form; in ``init``, a parameter is complex; in ``update``, a
            gradient is sparse: use ``rowwise``.

    Example:
        The first step is as long as ``lr``, whatever the gradient:

        >>> rule = metagrad.optim.rules.adam(lr=0.5, eps=0.0)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> new, state = rule.update({"w": torch.tensor([10.0, -0.1])}, rule.init(params), params)
        >>> new["w"]
        tensor([0.5000, 2.5000])

    References:
        Kingma, Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1; Reddi, Kale, Kumar, "On
        the convergence of Adam and beyond", ICLR 2018, algorithm 2, whose bias is corrected here as in torch.
    """
    return Adam(
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        amsgrad=amsgrad,
        maximize=maximize,
    )


def adamw(
    lr: Hyperparameter = 1e-3,
    *,
    betas: tuple[Hyperparameter, Hyperparameter] = (0.9, 0.999),
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Adam:
    r"""Make the rule of AdamW; equal to ``torch.optim.AdamW`` step for step.

    .. math:: w_t = (1 - \eta \lambda) \, w_{t-1} - \text{the step of Adam}

    Args:
        lr: The step size :math:`\eta`, in the forms of :data:`Hyperparameter`; may require grad, as may the rest.
        betas: As for :func:`adam`.
        eps: As for :func:`adam`.
        weight_decay: The factor :math:`\lambda` of the step :math:`\eta \lambda w` that shrinks the parameters.
        amsgrad: As for :func:`adam`.
        maximize: Climb: take the gradient with the other sign; weights decay all the same.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``.

    Raises:
        ValueError: As for :func:`adam`.
        TypeError: As for :func:`adam`.

    Example:
        Without a gradient the weights decay alone:

        >>> rule = metagrad.optim.rules.adamw(lr=0.5, weight_decay=0.5)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> rule.update({"w": torch.zeros(2)}, rule.init(params), params)[0]["w"]
        tensor([0.7500, 1.5000])

    References:
        Loshchilov, Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2; the decay is that of
        torch, scaled by :math:`\eta`.
    """
    return adam(
        lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=True,
        amsgrad=amsgrad,
        maximize=maximize,
    )
