"""Sophia: a momentum divided by the Hessian's diagonal, clipped element by element."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.optim.arithmetic import average, plus_scaled
from metagrad.optim.curvature import Diagonal, checked_diagonal
from metagrad.optim.hyperparameters import check_count, is_used
from metagrad.optim.per_parameter import PerParameter, Values, checked_gradients
from metagrad.optim.rule import Hyperparameter, Params, functional_optimizer, hyperparameter, option
from metagrad.optim.torch_optim.diagonal_optimizer import DiagonalOptimizer


class SophiaState(NamedTuple):
    """The state of :class:`SophiaHRule`.

    Attributes:
        step: Steps taken.
        mean: Averages of the gradients, in the shapes of the parameters.
        hessian: Averages of the diagonal.
    """

    step: int
    mean: Params
    hessian: Params


@functional_optimizer
class SophiaHRule(PerParameter):
    r"""The functional form of Sophia-H, which estimates the diagonal of the Hessian by Hutchinson's probes.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        h_t &= \beta_2 h_{t-k} + (1 - \beta_2) \, u \odot (H_t u), \quad u \sim \mathcal{N}(0, I),
               \qquad \text{every } k \text{ steps, else } h_t = h_{t-1} \\
        w_t &= (1 - \eta \lambda) w_{t-1}
               - \eta \, \operatorname{clip}\bigl(m_t / \max(\gamma h_t, \epsilon), 1\bigr)

    Where curvature is small or negative the step is the sign of the momentum, as long as ``lr``; where it is large,
    it is a share of Newton's. The derivative of a clipped step is zero but for ``lr`` and the decay.

    Example:
        >>> from metagrad.optim.curvature import KnownDiagonal
        >>> from metagrad.optim.diagonal.sophia import sophia_h
        >>> rule = sophia_h(lr=1.0, betas=(0.0, 0.0), gamma=1.0)
        >>> params = {"w": torch.tensor([1.0, 1.0, 1.0])}
        >>> curvature = KnownDiagonal({"w": torch.tensor([4.0, 0.1, -1.0])})
        >>> new, state = rule.update({"w": torch.tensor([1.0, 1.0, -1.0])}, rule.init(params), params, curvature)
        >>> new["w"]
        tensor([0.7500, 0.0000, 2.0000])

    References:
        Liu, Li, Hall, Liang, Ma, "Sophia: a scalable stochastic second-order optimizer for language model
        pre-training", ICLR 2024, algorithms 1 and 3.
    """

    lr: Hyperparameter = hyperparameter(
        default=4e-3,
        doc=r"The step size :math:`\eta`. No element moves by more. In the paper 0.8 times Adam's for language"
        r" models of 125 million parameters and more, 2e-4 to 6e-4; the default is for small models, which"
        r" move further in fewer steps.",
    )
    _: KW_ONLY
    betas: tuple[Hyperparameter, Hyperparameter] = hyperparameter(
        default=(0.96, 0.99),
        doc="How much of the averages of gradients and of diagonals is kept, each from 0 to below 1.",
        below=1.0,
    )
    gamma: Hyperparameter = hyperparameter(
        default=0.01, doc="The factor of the diagonal, which decides how many elements are clipped."
    )
    eps: Hyperparameter = hyperparameter(
        default=1e-12, doc="The least that a momentum is divided by; above 0."
    )
    weight_decay: Hyperparameter = hyperparameter(
        default=0.0,
        doc=r"The factor :math:`\lambda` of the step :math:`\eta \lambda w` that shrinks the parameters; in the "
        r"paper, 0.2.",
    )
    curvature_every: int = option(
        default=10, doc="Steps from one estimate to the next, :math:`k`; the first step makes one."
    )
    samples: int = option(default=1, doc="Probes for each estimate.")
    maximize: bool = option(
        default=False,
        doc="Climb: take gradient and curvature with the other sign; weights decay all the same.",
    )
    matrix: ClassVar[Literal["hessian", "gauss_newton"]] = "hessian"

    call, State = "sophia_h(...)", SophiaState
    decays_linearly = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.call, "curvature_every", self.curvature_every)
        check_count(self.call, "samples", self.samples)

    @property
    def request(self) -> Diagonal:
        """The estimate that the rule works with."""
        return Diagonal(self.matrix, self.samples, "normal")

    def needs_curvature(self, step: int) -> bool:
        """Say whether the step, of which the first is 0, renews the average of the diagonal."""
        return step % self.curvature_every == 0

    def slots(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Return averages of zero."""
        zeros = torch.zeros_like(param)
        return zeros, zeros

    def update(
        self, grads: Params, state: SophiaState, params: Params, curvature: object | None = None
    ) -> tuple[Params, Any]:
        """Take one step; ``curvature`` renews the average of the diagonal wherever it is given."""
        gradients = checked_gradients(self.call, grads, params)
        diagonals = dict.fromkeys(params)
        if curvature is not None or self.needs_curvature(state.step):
            diagonals = checked_diagonal(self.call, curvature, self.request, params)
        if self.maximize:
            gradients = {key: -g for key, g in gradients.items()}
            diagonals = {key: None if d is None else -d for key, d in diagonals.items()}
        return self.moved(state, params, gradients, diagonals)

    def move(
        self,
        h: Values,
        step: float | Tensor,
        w: Tensor,
        g: Tensor,
        diagonal: Tensor | None,
        mean: Tensor,
        hessian: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return a parameter and its averages after one step."""
        mean = average(mean, h.beta1, g)
        if diagonal is not None:
            hessian = average(hessian, h.beta2, diagonal)
        if is_used(h.weight_decay):
            w = w * (1 - h.lr * h.weight_decay)
        direction = (mean / torch.clamp(h.gamma * hessian, min=h.eps)).clamp(-1, 1)
        return plus_scaled(w, h.lr, direction, sign=-1), mean, hessian


sophia_h = SophiaHRule


@functional_optimizer
class SophiaGRule(SophiaHRule):
    r"""The functional form of Sophia-G, which estimates the diagonal of the Gauss-Newton matrix from drawn labels.

    .. math::
        h_t = \beta_2 h_{t-k} + (1 - \beta_2) \, B \, \hat g_t^2, \qquad
        \hat g_t = \frac{1}{B} \sum_{n=1}^{B} \nabla \ell_n(\hat y_n), \qquad \hat y_n \sim p(\cdot | x_n)

    and otherwise the equations of :class:`SophiaHRule`. The estimate is never negative, and costs one backward pass.
    It needs a loss that is a negative log-likelihood of known form, with any reduction and weights: cross-entropy,
    squares, binary cross-entropy.

    Example:
        >>> from metagrad.optim.curvature import KnownDiagonal
        >>> from metagrad.optim.diagonal.sophia import sophia_g
        >>> rule = sophia_g(lr=1.0, betas=(0.0, 0.5), gamma=1.0, curvature_every=2)
        >>> params = {"w": torch.tensor([1.0])}
        >>> curvature = KnownDiagonal({"w": torch.tensor([8.0])})
        >>> params, state = rule.update({"w": torch.tensor([1.0])}, rule.init(params), params, curvature)
        >>> params["w"], state.hessian["w"]
        (tensor([0.7500]), tensor([4.]))
        >>> rule.update({"w": torch.tensor([1.0])}, state, params)[0]["w"]
        tensor([0.5000])

    References:
        Liu, Li, Hall, Liang, Ma, "Sophia: a scalable stochastic second-order optimizer for language model
        pre-training", ICLR 2024, algorithms 2 and 3; the identity is Bartlett's.
    """

    _: KW_ONLY
    gamma: Hyperparameter = hyperparameter(
        default=0.05, doc="The factor of the diagonal, which decides how many elements are clipped."
    )
    samples: int = option(default=1, doc="Draws of the labels for each estimate.")

    call, matrix = "sophia_g(...)", "gauss_newton"


sophia_g = SophiaGRule


class SophiaH(DiagonalOptimizer, rule=SophiaHRule):
    r"""Optimize by Sophia-H: a momentum divided by the Hessian's diagonal, clipped element by element.

    .. math:: w_t = (1 - \eta \lambda) w_{t-1}
                    - \eta \, \operatorname{clip}\bigl(m_t / \max(\gamma h_t, \epsilon), 1\bigr)

    with :math:`h` the average of :math:`u \odot H u` at every ``curvature_every``-th step. A closure of the usual
    form works, or ``opt.backward(loss)`` in place of ``loss.backward()``, also with a ``GradScaler``; for what does
    not work, see :class:`~metagrad.optim.torch_optim.curvature_optimizer.CurvatureOptimizer`. Steps between two
    estimates cost a gradient.

    Raises:
        ValueError: A hyper-parameter is out of its range.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim import SophiaH
        >>> w = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> opt = SophiaH([w], lr=0.5)
        >>> opt.backward((w**2).sum())
        >>> opt.step()
        >>> w
        tensor([ 0.5000, -1.5000], requires_grad=True)

    References:
        Liu, Li, Hall, Liang, Ma, "Sophia: a scalable stochastic second-order optimizer for language model
        pre-training", ICLR 2024, algorithms 1 and 3.
    """


class SophiaG(SophiaH, rule=SophiaGRule):
    r"""Optimize by Sophia-G: Sophia with the diagonal of the Gauss-Newton matrix, from labels drawn from the model.

    .. math:: h_t = \beta_2 h_{t-k} + (1 - \beta_2) \, B \, \hat g_t^2, \qquad
              \hat g_t = \frac{1}{B} \sum_{n=1}^{B} \nabla \ell_n(\hat y_n), \qquad \hat y_n \sim p(\cdot | x_n)

    An estimate costs one backward pass more. The loss is to be computed inside the closure, or within ``with
    opt.recording():``, where calls of ``F.cross_entropy``, ``F.mse_loss``,
    ``F.nll_loss``, ``F.gaussian_nll_loss``, ``F.binary_cross_entropy`` and
    ``F.binary_cross_entropy_with_logits`` (also by their modules) are noted, with their weights in the whole. What
    else the loss contains, such as a penalty on the weights, does not enter the estimate.

    Raises:
        ValueError: A hyper-parameter is out of its range; in ``backward``, the loss contains none of known form.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim import SophiaG
        >>> model = torch.nn.Linear(4, 3)
        >>> opt = SophiaG(model.parameters(), lr=0.1)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.cross_entropy(model(torch.eye(4)), torch.tensor([0, 1, 2, 0]))
        ...     loss.backward()
        ...     return loss
        >>> losses = [float(opt.step(closure)) for _ in range(20)]
        >>> losses[-1] < losses[0] / 2
        True

    References:
        Liu, Li, Hall, Liang, Ma, "Sophia: a scalable stochastic second-order optimizer for language model
        pre-training", ICLR 2024, algorithms 2 and 3.
    """

    notes_losses = True
    differentiates_twice = False
