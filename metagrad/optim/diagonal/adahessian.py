"""AdaHessian: Adam whose second moment is that of the Hessian's diagonal."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad.optim.arithmetic import average, average_square, is_differentiated, minus_quotient
from metagrad.optim.curvature import Diagonal, checked_diagonal
from metagrad.optim.hyperparameters import check_count, is_used
from metagrad.optim.per_parameter import PerParameter, Values, checked_gradients
from metagrad.optim.rule import Hyperparameter, Params, functional_optimizer, hyperparameter, option
from metagrad.optim.torch_optim.diagonal_optimizer import DiagonalOptimizer


class AdaHessianState(NamedTuple):
    """The state of :class:`AdaHessianRule`.

    Attributes:
        step: Steps taken.
        mean: Averages of the gradients, in the shapes of the parameters.
        square: Averages of the squares of the Hessian's diagonal.
    """

    step: int
    mean: Params
    square: Params


@functional_optimizer
class AdaHessianRule(PerParameter):
    r"""The functional form of AdaHessian.

    .. math::
        D_t &= \frac{1}{S} \sum_{s=1}^{S} z_s \odot H_t z_s, \qquad z_s \in \{-1, 1\}^n \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) \bar D_t^2 \\
        w_t &= (1 - \eta \lambda) w_{t-1}
               - \eta \, \frac{m_t / (1 - \beta_1^t)}{\bigl(v_t / (1 - \beta_2^t)\bigr)^{k / 2} + \epsilon}

    where :math:`\bar D` is :math:`D`, averaged over the positions of each convolution kernel.

    Example:
        The first step is Newton's, whatever the scale of a parameter, if the Hessian is diagonal:

        >>> from metagrad.optim.diagonal.adahessian import adahessian
        >>> from metagrad.optim.tape_curvature import TapeCurvature
        >>> rule = adahessian(lr=1.0, eps=0.0)
        >>> params = {"w": torch.tensor([1.0, 2.0], requires_grad=True)}
        >>> loss = (torch.tensor([1.0, 100.0]) * (params["w"] - 3) ** 2).sum()
        >>> grads = metagrad.grad(loss, params, create_graph=True)
        >>> new, state = rule.update(grads, rule.init(params), params, TapeCurvature(params, grads))
        >>> new["w"].tolist()
        [3.0, 3.0]

    References:
        Yao, Gholami, Shen, Mustafa, Keutzer, Mahoney, "ADAHESSIAN: an adaptive second order optimizer for machine
        learning", AAAI 2021, algorithm 1 and equations 8 to 12.
    """

    lr: Hyperparameter = hyperparameter(
        default=0.15,
        doc=r"The step size :math:`\eta`. A step has the length of Newton's times ``lr``, so that it is larger"
        r" than for Adam.",
    )
    _: KW_ONLY
    betas: tuple[Hyperparameter, Hyperparameter] = hyperparameter(
        default=(0.9, 0.999),
        doc="How much of the averages of gradients and of squared diagonals is kept, each from 0 to below 1.",
        below=1.0,
    )
    eps: Hyperparameter = hyperparameter(
        default=1e-4, doc="What is added to the diagonal; it bounds the step where there is no curvature."
    )
    weight_decay: Hyperparameter = hyperparameter(
        default=0.0,
        doc=r"The factor :math:`\lambda` of the step :math:`\eta \lambda w` that shrinks the parameters.",
    )
    hessian_power: Hyperparameter = hyperparameter(
        default=1.0,
        doc="The power :math:`k` of the diagonal: 1 is Newton's step, 0 that of momentum without curvature.",
    )
    samples: int = option(
        default=1, doc="Probes for each step, :math:`S`; each costs a product with the Hessian."
    )
    spatial_average: bool = option(
        default=True,
        doc="Average the diagonal over the dimensions behind the first two of a parameter, which are the "
        "positions in the kernel of a convolution of any number of dimensions. The paper's own program "
        "averages absolute values there, this rule the values, as the paper says.",
    )
    maximize: bool = option(
        default=False, doc="Climb: take the gradient with the other sign; weights decay all the same."
    )
    batch_ndim: int = 0

    call, State = "adahessian(...)", AdaHessianState
    decays_linearly = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.call, "samples", self.samples)

    @property
    def request(self) -> Diagonal:
        """The estimate that the rule works with."""
        return Diagonal("hessian", self.samples, "rademacher")

    def needs_curvature(self, step: int) -> bool:
        """Say that every step does."""
        return True

    def slots(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Return averages of zero."""
        zeros = torch.zeros_like(param)
        return zeros, zeros

    def update(
        self, grads: Params, state: AdaHessianState, params: Params, curvature: object | None = None
    ) -> tuple[Params, Any]:
        """Take one step; ``curvature`` is a :class:`~metagrad.optim.curvature.Curvature`."""
        gradients = checked_gradients(self.call, grads, params)
        diagonals = checked_diagonal(self.call, curvature, self.request, params)
        missing = [key for key, diagonal in diagonals.items() if diagonal is None]
        if missing:
            raise ValueError(
                f"{self.call}.update: curvature.diagonal(...) has no {missing[0]!r}. Every parameter needs an "
                "estimate at every step."
            )
        if self.maximize:
            gradients = {key: -g for key, g in gradients.items()}
        return self.moved(state, params, gradients, diagonals)

    def move(
        self,
        h: Values,
        step: float | Tensor,
        w: Tensor,
        g: Tensor,
        diagonal: Tensor,
        mean: Tensor,
        square: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return a parameter and its averages after one step."""
        if self.spatial_average:
            diagonal = spatially_averaged(diagonal, self.batch_ndim)
        if is_used(h.weight_decay):
            w = w * (1 - h.lr * h.weight_decay)
        steps = step + 1
        mean, square = average(mean, h.beta1, g), average_square(square, h.beta2, diagonal)
        # Both corrections of bias as one factor of the step: a pass over the parameter less.
        correction = (1 - h.beta2**steps) ** (h.hessian_power / 2)
        scale = power(square, h.hessian_power / 2) + h.eps * correction
        return minus_quotient(w, h.lr * correction / (1 - h.beta1**steps), mean, scale), mean, square


adahessian = AdaHessianRule


def spatially_averaged(diagonal: Tensor, batch_ndim: int = 0) -> Tensor:
    """Average over the positions of convolution kernels ``[out, in, *positions]``; other shapes pass."""
    average = diagonal
    for position in range(batch_ndim + 2, diagonal.ndim):
        # One by one: inductor (torch 2.13) fails on means of more than 8 numbers in what is then written in place.
        average = average.mean(position, keepdim=True)
    return average.expand_as(diagonal)


def power(value: Tensor, exponent: float | Tensor) -> Tensor:
    """Raise to a power of 0 or more, with all derivatives 0 at zero, where a root's would be infinite."""
    if not isinstance(exponent, Tensor) and not is_differentiated(value):
        return value**exponent  # a fifth of the time
    zero = value == 0
    at_zero = (exponent == 0).to(value.dtype) if isinstance(exponent, Tensor) else float(exponent == 0)
    return torch.where(zero, at_zero, torch.where(zero, 1, value) ** exponent)


class AdaHessian(DiagonalOptimizer, rule=AdaHessianRule):
    r"""Optimize by AdaHessian: Adam whose second moment is that of the Hessian's diagonal.

    .. math::
        w_t = (1 - \eta \lambda) w_{t-1}
              - \eta \, \frac{m_t / (1 - \beta_1^t)}{\bigl(v_t / (1 - \beta_2^t)\bigr)^{k / 2} + \epsilon}

    with :math:`v` the average of the squares of :math:`z \odot H z`. A closure of the usual form works,
    or ``opt.backward(loss)`` in place of ``loss.backward()``, also with a ``GradScaler``; for what does not work, see
    :class:`~metagrad.optim.torch_optim.curvature_optimizer.CurvatureOptimizer`. A step costs two to three gradients.

    Raises:
        ValueError: A hyper-parameter is out of its range.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

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
        learning", AAAI 2021.
    """
