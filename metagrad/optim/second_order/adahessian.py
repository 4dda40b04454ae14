"""AdaHessian: Adam with the squared diagonal of the Hessian as second moment."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from metagrad.optim.second_order.curvature_optimizer import options_of
from metagrad.optim.second_order.diagonal_optimizer import DiagonalOptimizer
from metagrad.optim.torch_optim.optimizer import Group, ParameterGroups, as_number


class AdaHessian(DiagonalOptimizer):
    r"""Optimize by AdaHessian: Adam with the squared diagonal of the Hessian as second moment.

    .. math::
        D_t &= \frac{1}{S} \sum_{s=1}^{S} z_s \odot H_t z_s, \qquad z_s \in \{-1, 1\}^n \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) \bar D_t^2 \\
        w_t &= (1 - \eta \lambda) w_{t-1}
               - \eta \, \frac{m_t / (1 - \beta_1^t)}{\bigl(v_t / (1 - \beta_2^t)\bigr)^{k / 2} + \epsilon}

    where :math:`\bar D` is :math:`D`, averaged over the positions of each convolution kernel. Use a closure of the
    usual form, or ``opt.backward(loss)`` instead of ``loss.backward()``. Both work with a ``GradScaler``. Limits are
    listed in :class:`~metagrad.optim.second_order.curvature_optimizer.CurvatureOptimizer`. Sparse gradients raise an
    error. A step costs two to four gradients.

    Args:
        params: Parameters, with or without names, or groups of parameters with their own hyperparameters.
        lr: The learning rate :math:`\eta`. The learning rate multiplies a Newton step, so it is larger than
            for Adam.
        betas: Decay rates of the averages of gradients and of squared diagonals, each from 0 to below 1.
        eps: Added to the diagonal. It bounds the step where there is no curvature.
        weight_decay: Decoupled weight decay :math:`\lambda`: each step subtracts :math:`\eta \lambda w`.
        hessian_power: The power :math:`k` of the diagonal: 1 is Newton's step, 0 is momentum without curvature.
        samples: Probes for each step, :math:`S`. Each probe costs a Hessian-vector product.
        spatial_average: Average the diagonal over the dimensions after the first two, which are the positions in the
            kernel of a convolution. As in the paper, values are averaged. The paper's code averages absolute
            values.
        maximize: Maximize the loss instead of minimizing it. Weights decay as before.
        nonfinite: Reaction if the loss, a gradient or the curvature is NaN or infinite. ``"raise"`` raises an
            error. ``"skip"`` leaves the step out and counts it in ``opt.stats``. Parameters and state do not change.
        seed: Seed of the random numbers, which also depend on the number of the step. None means
            ``torch.initial_seed()``.

    Raises:
        ValueError: A hyperparameter is out of its range.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

    Example:
        With a diagonal Hessian the first step is Newton's, to the minimum:

        >>> from metagrad.optim import AdaHessian
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> opt = AdaHessian([w], lr=1.0, eps=0.0)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (torch.tensor([1.0, 100.0]) * (w - 3) ** 2).sum()
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure), w
        (tensor(104.), tensor([3., 3.], requires_grad=True))

    References:
        Yao, Gholami, Shen, Mustafa, Keutzer, Mahoney, "ADAHESSIAN: an adaptive second order optimizer for machine
        learning", AAAI 2021, algorithm 1 and equations 8 to 12.
    """

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 0.15,
        *,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-4,
        weight_decay: float | Tensor = 0.0,
        hessian_power: float | Tensor = 1.0,
        samples: int = 1,
        spatial_average: bool = True,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
        seed: int | None = None,
    ) -> None:
        self._initialize(params, options_of(locals()))

    def _moved(
        self, group: Group, p: Tensor, g: Tensor, diagonal: Tensor | None, state: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        lr, eps, decay, power = map(
            as_number, (group[n] for n in ("lr", "eps", "weight_decay", "hessian_power"))
        )
        beta1, beta2 = as_number(group["betas"])
        assert diagonal is not None
        if group["spatial_average"] and p.ndim > 2:
            diagonal = diagonal.mean(tuple(range(2, p.ndim)), keepdim=True)
        mean, square = (state[n] if n in state else torch.zeros_like(p) for n in ("mean", "square"))
        mean = beta1 * mean + (1 - beta1) * g
        square = beta2 * square + (1 - beta2) * diagonal.square()
        steps = state.get("step", 0) + 1
        # Both bias corrections are one factor of the step, which saves a pass over the parameter.
        correction = (1 - beta2**steps) ** (power / 2)
        scale = square ** (power / 2) + eps * correction
        move = lr * correction / (1 - beta1**steps) * mean / scale
        return (1 - lr * decay) * p - move, {"mean": mean, "square": square}
