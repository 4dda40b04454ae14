"""Adam, and with decoupled weight decay AdamW."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.core.tree import Params
from metagrad.optim.arithmetic import average, average_square, minus_quotient, plus_scaled, root
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.per_parameter import PerParameter, Values
from metagrad.optim.rule import Hyperparameter, functional_optimizer, hyperparameter


class AdamState(NamedTuple):
    """The state of :class:`AdamRule`.

    Attributes:
        step: Steps taken.
        mean: Averages of the gradients, in the shapes of the parameters.
        square: Averages of their squares.
        peak: Largest averages of squares so far. None unless ``amsgrad``.
    """

    step: int
    mean: Params
    square: Params
    peak: Params | None


@functional_optimizer
class AdamRule(PerParameter):
    r"""The functional form of Adam. It takes the steps of ``torch.optim.Adam``.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        w_t &= w_{t-1} - \eta \, \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t) + \epsilon_r} + \epsilon}

    The rule is differentiable at a gradient of exactly zero, where the derivative of the root is taken as 0.
    If a gradient is tiny but not zero, the step is its sign, and the derivative of the step is as large as
    :math:`\eta / \epsilon`. A positive ``eps_root``, :math:`\epsilon_r`, bounds it.

    These arguments take every form of :data:`Hyperparameter`, and may require grad: lr, betas, eps, eps_root,
    weight_decay.

    Args:
        lr: The learning rate :math:`\eta`.
        betas: Decay rates of the averages of gradients and of their squares, each from 0 to below 1.
        eps: Added to the square root in the denominator. It bounds the step where gradients vanish.
        eps_root: Added inside the square root, as in optax. It makes a training smooth in its data and
            hyperparameters.
        weight_decay: The factor :math:`\lambda` of the parameters that is added to their gradients. With
            ``decoupled``, the factor of a separate step :math:`\eta \lambda w` that shrinks the parameters.
        decoupled: Decay the weights separately from the gradients, as AdamW does.
        amsgrad: Divide by the root of the largest :math:`v` so far, instead of the root of :math:`v`.
        maximize: Maximize the loss: negate the gradient.

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

    lr: Hyperparameter = hyperparameter(default=1e-3)
    _: KW_ONLY
    betas: tuple[Hyperparameter, Hyperparameter] = hyperparameter(default=(0.9, 0.999), below=1.0)
    eps: Hyperparameter = hyperparameter(default=1e-8)
    eps_root: Hyperparameter = hyperparameter(default=0.0)
    weight_decay: Hyperparameter = hyperparameter(default=0.0)
    decoupled: bool = False
    amsgrad: bool = False
    maximize: bool = False

    call, State = "adam(...)", AdamState

    @property
    def decays_linearly(self) -> bool:
        """A step with a zero gradient is linear in the parameters and the state."""
        return self.decoupled

    def init_slots(self, param: Tensor) -> tuple[Tensor | None, ...]:
        """Return averages of zero, and a peak of zero with ``amsgrad``."""
        zeros = torch.zeros_like(param)
        return zeros, zeros, zeros if self.amsgrad else None

    def update_param(
        self,
        h: Values,
        step: float | Tensor,
        w: Tensor,
        g: Tensor,
        mean: Tensor,
        square: Tensor,
        peak: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Return a parameter, its averages and their peak after one step."""
        if is_used(h.weight_decay):
            if self.decoupled:
                w = w * (1 - h.lr * h.weight_decay)
            else:
                g = plus_scaled(g, h.weight_decay, w)
        steps = step + 1
        mean, square = average(mean, h.beta1, g), average_square(square, h.beta2, g)
        peak = None if peak is None else torch.maximum(peak, square)
        # Both bias corrections are one factor of the step, which saves a pass over the parameter.
        correction = (1 - h.beta2**steps) ** 0.5
        second = square if peak is None else peak
        if is_used(h.eps_root):
            second = second + h.eps_root * correction**2
        scale = root(second) + h.eps * correction
        w = minus_quotient(w, h.lr * correction / (1 - h.beta1**steps), mean, scale)
        return w, mean, square, peak


adam = AdamRule


@functional_optimizer
class AdamWRule(AdamRule):
    r"""The functional form of AdamW. It takes the steps of ``torch.optim.AdamW``.

    .. math:: w_t = (1 - \eta \lambda) \, w_{t-1} - \text{the step of Adam}

    These arguments take every form of :data:`Hyperparameter`, and may require grad: lr, betas, eps, eps_root,
    weight_decay.

    Args:
        lr: The learning rate :math:`\eta`.
        betas: Decay rates of the averages of gradients and of their squares, each from 0 to below 1.
        eps: Added to the square root in the denominator. It bounds the step where gradients vanish.
        eps_root: Added inside the square root, as in optax. It makes a training smooth in its data and
            hyperparameters.
        weight_decay: Decoupled weight decay :math:`\lambda`: each step subtracts :math:`\eta \lambda w`.
        decoupled: If False, add ``weight_decay`` times the parameters to their gradients, as Adam does.
        amsgrad: Divide by the root of the largest :math:`v` so far, instead of the root of :math:`v`.
        maximize: Maximize the loss: negate the gradient.

    Example:
        Without a gradient only the weights decay:

        >>> rule = metagrad.optim.rules.adamw(lr=0.5, weight_decay=0.5)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> rule.update({"w": torch.zeros(2)}, rule.init(params), params)[0]["w"]
        tensor([0.7500, 1.5000])

    References:
        Loshchilov, Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2; the decay is that of
        torch, scaled by :math:`\eta`.
    """

    _: KW_ONLY
    weight_decay: Hyperparameter = hyperparameter(default=1e-2)
    decoupled: bool = True

    call = "adamw(...)"


adamw = AdamWRule
