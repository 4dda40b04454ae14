"""Shampoo: a matrix for each axis of a parameter, whose inverse roots precondition the gradient."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from metagrad.core.checks import check_count
from metagrad.core.tree import Params
from metagrad.optim.arithmetic import average, matrix_norm, plus_scaled, root
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.kronecker.matrix_roots import inverse_root
from metagrad.optim.kronecker.per_axis import (
    AxisMatrices,
    axis_gram,
    block_at,
    blocks_of,
    chosen,
    joined_blocks,
    products_along,
)
from metagrad.optim.per_parameter import Values
from metagrad.optim.rule import Hyperparameter, functional_optimizer, hyperparameter
from metagrad.optim.torch_optim.optimizer import RuleOptimizer

Matrices: TypeAlias = "tuple[tuple[Tensor, ...], ...]"
"""A list of the blocks of a parameter, with a matrix for each axis of a block."""


class ShampooState(NamedTuple):
    """The state of :class:`ShampooRule`.

    Attributes:
        step: Steps taken.
        velocity: Momentum: decaying sums of the preconditioned gradients, in the shapes of the parameters.
        square: Averages of the squares of the gradients, for the length of a step. None unless ``graft``.
        statistics: Sums or averages of the products of gradients along each axis.
        roots: Inverse roots of the statistics, from their last computation.
    """

    step: int
    velocity: Params
    square: Params | None
    statistics: dict[str, Matrices]
    roots: dict[str, Matrices]


@functional_optimizer
class ShampooRule(AxisMatrices):
    r"""The functional form of Shampoo.

    For a matrix, with :math:`p = 4`,

    .. math::
        L_t &= L_{t-1} + G_t G_t^\top, \qquad R_t = R_{t-1} + G_t^\top G_t \\
        V_t &= \mu V_{t-1} + (L_t + \epsilon I)^{-1/p} \, G_t \, (R_t + \epsilon I)^{-1/p} \\
        W_t &= (1 - \eta \lambda) W_{t-1} - \eta V_t

    A tensor of k axes has k matrices, and :math:`p = 2 k`. A vector has one matrix. The kernel of a 2-d convolution
    has four matrices. A scalar is a vector of one element, which gives Adagrad's step. The rule is differentiable at
    every order, also at equal eigenvalues of the statistics.

    Rounding errors hide eigenvalues below n times the machine precision times the largest eigenvalue. If this bound
    is above ``eps``, it replaces ``eps``.

    These arguments take every form of :data:`Hyperparameter`, and may require grad: lr, momentum, decay, eps,
    weight_decay, graft_decay, graft_eps.

    Args:
        lr: The learning rate :math:`\eta`.
        momentum: Momentum :math:`\mu`, the share of the last steps that is kept.
        decay: Decay rate of the statistics. With 1 they are sums, as in the paper. Below 1 they are averages
            :math:`L_t = \beta L_{t-1} + (1 - \beta) G_t G_t^\top`, divided by :math:`1 - \beta^t`.
        eps: Added to the eigenvalues of the statistics. In the paper :math:`L_0 = \epsilon I`. It should be above 0,
            because the statistics of a few gradients are singular.
        weight_decay: Decoupled weight decay :math:`\lambda`: each step subtracts :math:`\eta \lambda w`.
        graft: Give each parameter's step the length of Adam's step without momentum. Use Adam's ``lr`` with this
            option.
        graft_decay: Decay rate of the average of squares, if ``graft``.
        graft_eps: Added to the root of the squares, if ``graft``.
        block_size: Longer axes are divided into parts of at most this length. Each block of the parameter has its own
            matrices.
        root_every: Steps from one computation of the roots to the next. They are also computed at each of the first
            ``root_every`` steps, because the statistics change fast there.
        maximize: Maximize the loss: negate the gradient. Weight decay keeps its sign.

    Raises:
        ValueError: ``decay`` is above 1, or ``block_size`` or ``root_every`` is not an integer of at least 1.

    Example:
        The first step is the gradient with all singular values 1:

        >>> from metagrad.optim.kronecker.shampoo import shampoo
        >>> rule = shampoo(lr=1.0, eps=0.0)
        >>> params = {"w": torch.zeros(2, 2)}
        >>> new, state = rule.update({"w": torch.tensor([[0.0, 4.0], [9.0, 0.0]])}, rule.init(params), params)
        >>> new["w"].round(decimals=4) + 0.0
        tensor([[ 0., -1.],
                [-1.,  0.]])

    References:
        Gupta, Koren, Singer, "Shampoo: preconditioned stochastic tensor optimization", ICML 2018, algorithms 1 and 2;
        Anil, Gupta, Koren, Regan, Singer, "Scalable second order optimization for deep learning", arXiv:2002.09018,
        for averages, blocks, roots at intervals and grafting (after Agarwal et al., arXiv:2002.11803).
    """

    lr: Hyperparameter = hyperparameter(default=0.1)
    _: KW_ONLY
    momentum: Hyperparameter = hyperparameter(default=0.9)
    decay: Hyperparameter = hyperparameter(default=1.0)
    eps: Hyperparameter = hyperparameter(default=1e-6)
    weight_decay: Hyperparameter = hyperparameter(default=0.0)
    graft: bool = False
    graft_decay: Hyperparameter = hyperparameter(default=0.999, below=1.0)
    graft_eps: Hyperparameter = hyperparameter(default=1e-8)
    block_size: int = 1024
    root_every: int = 1
    maximize: bool = False
    batch_ndim: int = 0

    call, State = "shampoo(...)", ShampooState

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.decay, (int, float)) and self.decay > 1:
            raise ValueError(f"{self.call}: decay must be at most 1, which sums, got {self.decay}.")
        for name in ("block_size", "root_every"):
            check_count(f"shampoo(..., {name})", getattr(self, name))

    def init_slots(self, param: Tensor) -> tuple[Tensor | Matrices | None, ...]:
        """Return a momentum and statistics of zero, and the roots of the identity."""
        zeros = torch.zeros_like(param)
        blocks = [
            [part.stop - part.start for part in block]
            for block in blocks_of(self.axes_of(param), self.block_size)
        ]
        return (
            zeros,
            zeros if self.graft else None,
            tuple(self.identities(param, sizes, 0.0) for sizes in blocks),
            tuple(self.identities(param, sizes) for sizes in blocks),
        )

    def update_param(
        self,
        h: Values,
        step: float | Tensor,
        w: Tensor,
        g: Tensor,
        velocity: Tensor,
        square: Tensor | None,
        statistics: Matrices,
        roots: Matrices,
    ) -> tuple[Tensor | Matrices | None, ...]:
        """Return a parameter and its state after one step."""
        self.refuse_elements(decay=h.decay, eps=h.eps)
        pairs = zip(statistics, self._blocks(g), strict=True)
        statistics = tuple(self._gathered(*pair, h.decay) for pair in pairs)
        # Statistics of few gradients are rank-deficient, and old roots would amplify gradients outside of
        # their range. So during the first ``root_every`` steps, the roots are computed at every step.
        is_due = (step % self.root_every == 0) | (step < self.root_every)
        roots = chosen(is_due, lambda: self._roots(h, step, statistics), roots)
        direction = self._preconditioned(g, roots)
        if square is not None:
            square = average(square, h.graft_decay, g * g)
            other = self._unlike_zero(g)
            correction = (1 - h.graft_decay ** (step + 1)) ** 0.5
            grafted = other / (root(square) / correction + h.graft_eps)
            own = direction if other is g else self._preconditioned(other, roots)
            direction = direction * self._ratio(grafted, own)
        velocity = plus_scaled(direction, h.momentum, velocity)
        if is_used(h.weight_decay):
            w = w * (1 - h.lr * h.weight_decay)
        return plus_scaled(w, h.lr, velocity, sign=-1), velocity, square, statistics, roots

    def _gathered(
        self, statistics: tuple[Tensor, ...], block: Tensor, decay: float | Tensor
    ) -> tuple[Tensor, ...]:
        grams = [axis_gram(block, axis, self.batch_ndim) for axis in range(len(statistics))]
        pairs = zip(statistics, grams, strict=True)
        if _sums(decay):
            return tuple(old + gram for old, gram in pairs)
        return tuple(average(old, decay, gram) for old, gram in pairs)

    def _roots(self, h: Values, step: float | Tensor, statistics: Matrices) -> Matrices:
        correction = 1.0 if _sums(h.decay) else 1 - h.decay ** (step + 1)
        return tuple(
            tuple(inverse_root(m / correction + h.eps * _eye(m), 2 * len(block)) for m in block)
            for block in statistics
        )

    def _blocks(self, value: Tensor) -> list[Tensor]:
        blocks = blocks_of(self.axes_of(value), self.block_size)
        return [block_at(self.in_axes(value), block) for block in blocks]

    def _preconditioned(self, value: Tensor, roots: Matrices) -> Tensor:
        axes = self.axes_of(value)
        blocks = [
            products_along(block, enumerate(matrices), self.batch_ndim)
            for block, matrices in zip(self._blocks(value), roots, strict=True)
        ]
        return joined_blocks(blocks, axes, self.block_size).reshape(value.shape).to(value.dtype)

    def _unlike_zero(self, g: Tensor) -> Tensor:
        """Replace a zero gradient by ones if the step is differentiated.

        Both step lengths are zero at a gradient of zero. Before the first nonzero gradient, both Shampoo and
        the grafted optimizer only scale their input. So any other input has the ratio that makes the
        derivative of the step continuous.
        """
        if not torch.is_grad_enabled():
            return g
        own = tuple(range(self.batch_ndim, g.ndim))
        return torch.where((g == 0).all(own, keepdim=True) if own else g == 0, 1, g)

    def _ratio(self, wanted: Tensor, own: Tensor) -> Tensor:
        """Return the ratio of two norms of a parameter for each task, or 0 if the denominator is 0."""
        batch = own.shape[: self.batch_ndim]
        numerator, divisor = (matrix_norm(value.reshape((*batch, 1, -1))) for value in (wanted, own))
        ratio = torch.where(divisor == 0, 0, numerator / torch.where(divisor == 0, 1, divisor))
        return ratio.reshape((*batch, *[1] * (own.ndim - self.batch_ndim)))


shampoo = ShampooRule


def _sums(decay: float | Tensor) -> bool:
    return isinstance(decay, (int, float)) and decay == 1


def _eye(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


class Shampoo(RuleOptimizer, rule=ShampooRule):
    r"""Optimize by Shampoo: a matrix for each axis of a parameter, whose inverse roots precondition the gradient.

    .. math:: W_t = (1 - \eta \lambda) W_{t-1} - \eta V_t, \qquad
              V_t = \mu V_{t-1} + (L_t + \epsilon I)^{-1/4} \, G_t \, (R_t + \epsilon I)^{-1/4}

    Sparse gradients raise an error.

    Args:
        params: Parameters, with or without names, or groups of parameters with their own hyperparameters.
        lr: The learning rate :math:`\eta`.
        momentum: Momentum :math:`\mu`, the share of the last steps that is kept.
        decay: Decay rate of the statistics. With 1 they are sums, as in the paper. Below 1 they are averages
            :math:`L_t = \beta L_{t-1} + (1 - \beta) G_t G_t^\top`, divided by :math:`1 - \beta^t`.
        eps: Added to the eigenvalues of the statistics. In the paper :math:`L_0 = \epsilon I`. It should be above 0,
            because the statistics of a few gradients are singular.
        weight_decay: Decoupled weight decay :math:`\lambda`: each step subtracts :math:`\eta \lambda w`.
        graft: Give each parameter's step the length of Adam's step without momentum. Use Adam's ``lr`` with this
            option.
        graft_decay: Decay rate of the average of squares, if ``graft``.
        graft_eps: Added to the root of the squares, if ``graft``.
        block_size: Longer axes are divided into parts of at most this length. Each block of the parameter has its own
            matrices.
        root_every: Steps from one computation of the roots to the next. They are also computed at each of the first
            ``root_every`` steps, because the statistics change fast there.
        maximize: Maximize the loss: negate the gradient. Weight decay keeps its sign.
        nonfinite: Reaction if the loss, a gradient or the curvature is NaN or infinite, or a matrix cannot be
            factorized. ``"raise"`` raises an error. ``"skip"`` leaves the step out and counts it in ``opt.stats``.
            Parameters and state do not change.

    Raises:
        ValueError: A hyperparameter is out of its range.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

    Example:
        The first step is along the gradient with all singular values 1:

        >>> from metagrad.optim import Shampoo
        >>> w = torch.zeros(2, 2, requires_grad=True)
        >>> opt = Shampoo([w], lr=1.0)
        >>> (w * torch.tensor([[0.0, 4.0], [9.0, 0.0]])).sum().backward()
        >>> opt.step()
        >>> w.detach().round(decimals=4) + 0.0
        tensor([[ 0., -1.],
                [-1.,  0.]])

    References:
        Gupta, Koren, Singer, "Shampoo: preconditioned stochastic tensor optimization", ICML 2018; Anil et al.,
        "Scalable second order optimization for deep learning", arXiv:2002.09018.
    """
