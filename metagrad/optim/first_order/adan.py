"""Adan: Adam with Nesterov's momentum, by differences of gradients in place of a gradient further along."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.optim.arithmetic import average, average_square, minus_quotient, plus_scaled, root
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.per_parameter import PerParameter, Values
from metagrad.optim.rule import Hyperparameter, Params, functional_optimizer, hyperparameter, option
from metagrad.optim.torch_optim.optimizer import RuleOptimizer


class AdanState(NamedTuple):
    """The state of :class:`AdanRule`.

    Attributes:
        step: Steps taken.
        last: The gradients of the last step, in the shapes of the parameters.
        mean: Averages of the gradients.
        difference: Averages of the differences of successive gradients.
        square: Averages of the squares of the gradients that these extrapolate.
    """

    step: int
    last: Params
    mean: Params
    difference: Params
    square: Params


@functional_optimizer
class AdanRule(PerParameter):
    r"""The functional form of Adan.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad
        v_t = \beta_2 v_{t-1} + (1 - \beta_2) (g_t - g_{t-1}) \\
        n_t &= \beta_3 n_{t-1} + (1 - \beta_3) \bigl(g_t + \beta_2 (g_t - g_{t-1})\bigr)^2 \\
        w_t &= \frac{1}{1 + \eta \lambda}
               \Bigl(w_{t-1} - \eta \, \frac{m_t + \beta_2 v_t}{\sqrt{n_t} + \epsilon}\Bigr)

    At the first step :math:`m = g`, :math:`v = 0` and :math:`n = g^2`, as in the paper, whose ``betas`` are the
    shares that averages lose; here they are those that stay, as in Adam.

    Example:
        The first step is as long as ``lr``, whatever the gradient:

        >>> rule = metagrad.optim.rules.adan(lr=0.5, eps=0.0)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> new, state = rule.update({"w": torch.tensor([10.0, -0.1])}, rule.init(params), params)
        >>> new["w"]
        tensor([0.5000, 2.5000])

    References:
        Xie et al., "Adan: adaptive Nesterov momentum algorithm for faster optimizing deep models",
        arXiv:2208.06677, 2022, algorithm 1, without its restarts.
    """

    lr: Hyperparameter = hyperparameter(default=1e-3, doc=r"The step size :math:`\eta`.")
    _: KW_ONLY
    betas: tuple[Hyperparameter, Hyperparameter, Hyperparameter] = hyperparameter(
        default=(0.98, 0.92, 0.99),
        doc="How much of the averages of gradients, their differences and squares is kept, each from 0 to below 1.",
        below=1.0,
    )
    eps: Hyperparameter = hyperparameter(
        default=1e-8, doc="What is added to the root; it bounds the step where gradients vanish."
    )
    weight_decay: Hyperparameter = hyperparameter(
        default=0.0, doc=r"The factor :math:`\lambda` of the proximal step that shrinks the parameters."
    )
    maximize: bool = option(
        default=False, doc="Climb: take the gradient with the other sign; weights decay all the same."
    )

    call, State = "adan(...)", AdanState
    decays_linearly = True

    def slots(self, param: Tensor) -> tuple[Tensor, ...]:
        """Return a gradient and averages of zero."""
        return (torch.zeros_like(param),) * 4

    def move(
        self,
        h: Values,
        step: float | Tensor,
        w: Tensor,
        g: Tensor,
        last: Tensor,
        mean: Tensor,
        difference: Tensor,
        square: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return a parameter, its gradient and the averages after one step."""
        begun = step.clamp(max=1) if isinstance(step, Tensor) else min(step, 1)  # 0 at the first step, else 1
        change = begun * (g - last)
        mean = average(mean, begun * h.beta1, g)
        difference = average(difference, h.beta2, change)
        square = average_square(square, begun * h.beta3, plus_scaled(g, h.beta2, change))
        w = minus_quotient(w, h.lr, plus_scaled(mean, h.beta2, difference), root(square) + h.eps)
        return w / (1 + h.lr * h.weight_decay) if is_used(h.weight_decay) else w, g, mean, difference, square


adan = AdanRule


class Adan(RuleOptimizer, rule=AdanRule):
    r"""Optimize by Adan: Adam with Nesterov's momentum, by differences of successive gradients.

    .. math::
        w_t = \frac{1}{1 + \eta \lambda} \Bigl(w_{t-1} - \eta \, \frac{m_t + \beta_2 v_t}{\sqrt{n_t} + \epsilon}\Bigr)

    with averages :math:`m`, :math:`v`, :math:`n` of :math:`g_t`, :math:`g_t - g_{t-1}` and
    :math:`(g_t + \beta_2 (g_t - g_{t-1}))^2`.

    Raises:
        ValueError: A hyper-parameter is out of its range.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim import Adan
        >>> w = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> opt = Adan([w], lr=0.5)
        >>> (w**2).sum().backward()
        >>> opt.step()
        >>> w
        tensor([ 0.5000, -1.5000], requires_grad=True)

    References:
        Xie et al., "Adan: adaptive Nesterov momentum algorithm for faster optimizing deep models",
        arXiv:2208.06677, 2022, algorithm 1.
    """
