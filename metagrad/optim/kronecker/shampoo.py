"""Shampoo: a matrix for each axis of a parameter, whose inverse roots precondition the gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from metagrad.distributed.shares import of_matrices
from metagrad.optim.arithmetic import average, matrix_norm, plus_scaled, root
from metagrad.optim.hyperparameters import check_count, count, is_used
from metagrad.optim.kronecker.matrix_roots import inverse_roots
from metagrad.optim.kronecker.per_axis import (
    AxisMatrices,
    axis_gram,
    axis_product,
    block_at,
    blocks_of,
    joined_blocks,
)
from metagrad.optim.per_parameter import Values
from metagrad.optim.rule import Hyperparameter, Params, functional_optimizer, hyperparameter, option
from metagrad.optim.torch_optim.optimizer import GROUP, Group, Option, RuleOptimizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Matrices: TypeAlias = "tuple[tuple[Tensor, ...], ...]"
"""For each block of a parameter, a matrix for each axis."""


class ShampooState(NamedTuple):
    """The state of :class:`ShampooRule`.

    Attributes:
        step: Steps taken.
        velocity: Sums of the steps, in the shapes of the parameters.
        square: Averages or sums of the squares of the gradients, for the length of a step; None unless grafted on it.
        statistics: Sums or averages of the products of gradients along each axis.
        roots: Their inverse roots, as of the last time.
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

    A tensor of k axes has k matrices, and :math:`p = 2 k`; a vector one, a convolution kernel four or so; a scalar is
    a vector of one element, moved as by Adagrad. The rule can be differentiated at every order, also where
    eigenvalues of the statistics are equal.

    Raises:
        ValueError: ``decay`` is above 1, ``graft`` is unknown, or ``block_size``, ``root_every`` or ``exponent`` is
            no whole number of at least 1.

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

    lr: Hyperparameter = hyperparameter(default=0.1, doc=r"The step size :math:`\eta`.")
    _: KW_ONLY
    momentum: Hyperparameter = hyperparameter(
        default=0.9, doc=r"How much of the last steps is kept, :math:`\mu`."
    )
    decay: Hyperparameter = hyperparameter(
        default=1.0,
        doc=r"How much of the statistics is kept: 1, the number, sums them as the paper does; below 1 they are "
        r"averages :math:`L_t = \beta L_{t-1} + (1 - \beta) G_t G_t^\top`, divided by :math:`1 - \beta^t`.",
    )
    eps: Hyperparameter = hyperparameter(
        default=1e-6,
        doc=r"What is added to the eigenvalues of the statistics; in the paper :math:`L_0 = \epsilon I`. It "
        r"should be above 0, for statistics of few gradients are singular.",
    )
    weight_decay: Hyperparameter = hyperparameter(
        default=0.0,
        doc=r"The factor :math:`\lambda` of the step :math:`\eta \lambda w` that shrinks the parameters.",
    )
    graft: Literal["sgd", "adagrad", "adam"] | None = option(
        default=None,
        doc='Give each parameter\'s step the length that it has with another rule: ``"sgd"``, ``"adagrad"`` or '
        "``\"adam\"`` (without momentum); then ``lr`` is that rule's. None keeps Shampoo's own.",
    )
    graft_decay: Hyperparameter = hyperparameter(
        default=0.999, doc='How much of the average of squares is kept, by ``"adam"``.', below=1.0
    )
    graft_eps: Hyperparameter = hyperparameter(
        default=1e-8, doc='What is added to the root of the squares, by ``"adagrad"`` and ``"adam"``.'
    )
    exponent: int | None = option(default=None, doc="The p of the roots, for all parameters; None is 2 k.")
    block_size: int = option(
        default=1024,
        doc="Longer axes are cut into parts of at most this length, and each block of the parameter has matrices of "
        "its own.",
    )
    root_every: int = option(
        default=1,
        doc="Steps from one computation of the roots to the next; they are computed at each of the first so "
        "many steps as well, when statistics change fast.",
    )
    maximize: bool = option(
        default=False, doc="Climb: take the gradient with the other sign; weights decay all the same."
    )
    batch_ndim: int = 0
    group: ProcessGroup | None = None
    """Processes that have the same statistics, and share the computation of roots."""

    call, State = "shampoo(...)", ShampooState

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.decay, (int, float)) and self.decay > 1:
            raise ValueError(f"{self.call}: decay must be at most 1, which sums, got {self.decay}.")
        for name in ("block_size", "root_every"):
            check_count(self.call, name, getattr(self, name))
        if self.exponent is not None:
            check_count(self.call, "exponent", self.exponent)
        if self.graft not in (None, "sgd", "adagrad", "adam"):
            raise ValueError(
                f"{self.call}: graft must be 'sgd', 'adagrad', 'adam' or None, got {self.graft!r}."
            )

    def slots(self, param: Tensor) -> tuple[Tensor | Matrices | None, ...]:
        """Return a momentum and statistics of zero, and the roots of the identity."""
        zeros = torch.zeros_like(param)
        blocks = [
            [part.stop - part.start for part in block]
            for block in blocks_of(self.axes_of(param), self.block_size)
        ]
        return (
            zeros,
            zeros if self.graft in ("adagrad", "adam") else None,
            tuple(self.identities(param, sizes, 0.0) for sizes in blocks),
            tuple(self.identities(param, sizes) for sizes in blocks),
        )

    def moved(
        self, state: ShampooState, params: Params, gradients: Params, *others: Mapping[str, Tensor | None]
    ) -> tuple[Params, ShampooState]:
        """Move every parameter, by roots that are computed before: of several processes each computes a share."""
        statistics = dict(state.statistics)
        damped: dict[str, list[tuple[Tensor, int]]] = {}
        at = dict(zip(params, self._at(state.step, params), strict=True))
        for key, w in params.items():
            if not w.numel():
                continue
            h, step = at[key], count(state.step, w.dtype)
            self.refuse_elements(decay=h.decay, eps=h.eps)
            pairs = zip(statistics[key], self._blocks(gradients[key]), strict=True)
            statistics[key] = tuple(self._gathered(*pair, h.decay) for pair in pairs)
            if self._is_due(step) is not False:
                damped[key] = self._damped(h, step, statistics[key])
        roots = {**state.roots, **self._roots(state, damped)}
        return super().moved(state._replace(statistics=statistics, roots=roots), params, gradients, *others)

    def move(
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
        """Return a parameter and its state after one step, by statistics and roots of this step."""
        direction = self._preconditioned(g, roots)
        if self.graft is not None:
            square = self._squared(g, square, h.graft_decay)
            other = self._unlike_zero(g)
            grafted = self._grafted(h, step, other, square)
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
        return tuple(average(old, decay, gram).to(old.dtype) for old, gram in pairs)

    def _is_due(self, step: float | Tensor) -> bool | Tensor:
        # Statistics of few gradients have no full rank, and old roots would blow up what is outside of it: so long
        # as there are fewer than the steps between two times, roots are new at every step.
        return (step % self.root_every == 0) | (step < self.root_every)

    def _damped(self, h: Values, step: float | Tensor, statistics: Matrices) -> list[tuple[Tensor, int]]:
        """Return the matrices of a parameter whose roots are taken, and which."""
        correction = 1.0 if _sums(h.decay) else 1 - h.decay ** (step + 1)
        return [
            (matrix / correction + h.eps * _eye(matrix), self.exponent or 2 * len(block))
            for block in statistics
            for matrix in block
        ]

    def _roots(self, state: ShampooState, damped: dict[str, list[tuple[Tensor, int]]]) -> dict[str, Matrices]:
        """Return new roots of each parameter; where it is a tensor whether they are due, those or the old ones."""
        found = self._shared(damped) if self.group is not None else map(_inverse_roots, damped.values())
        every: dict[str, Matrices] = {}
        for key, own in zip(damped, found, strict=True):
            old = state.roots[key]
            news = iter(own)
            new = tuple(tuple(next(news).to(root.dtype) for root in block) for block in old)
            is_due = self._is_due(state.step)
            every[key] = _where(is_due, new, old) if isinstance(is_due, Tensor) else new
        return every

    def _shared(self, damped: dict[str, list[tuple[Tensor, int]]]) -> list[list[Tensor]]:
        """Return the roots of all parameters, of which each process computes some."""
        assert self.group is not None
        pairs = [pair for own in damped.values() for pair in own]
        found = of_matrices(
            f"{self.call}.update",
            lambda numbers: _inverse_roots([pairs[number] for number in numbers]),
            [matrix for matrix, _ in pairs],
            self.group,
        )
        supply = iter(found)
        return [[next(supply) for _ in own] for own in damped.values()]

    def _blocks(self, value: Tensor) -> list[Tensor]:
        blocks = blocks_of(self.axes_of(value), self.block_size)
        return [block_at(self.in_axes(value), block) for block in blocks]

    def _preconditioned(self, value: Tensor, roots: Matrices) -> Tensor:
        blocks = self._blocks(value)
        for axis in range(len(self.axes_of(value))):
            matrices = [matrices[axis] for matrices in roots]
            blocks = [
                axis_product(*pair, axis, self.batch_ndim) for pair in zip(blocks, matrices, strict=True)
            ]
        return (
            joined_blocks(blocks, self.axes_of(value), self.block_size).reshape(value.shape).to(value.dtype)
        )

    def _squared(self, g: Tensor, square: Tensor | None, decay: float | Tensor) -> Tensor | None:
        if square is None:
            return None
        return square + g * g if self.graft == "adagrad" else average(square, decay, g * g)

    def _grafted(self, h: Values, step: float | Tensor, g: Tensor, square: Tensor | None) -> Tensor:
        """Return the step of the rule whose length is to be taken."""
        if square is None:
            return g
        correction = (1 - h.graft_decay ** (step + 1)) ** 0.5 if self.graft == "adam" else 1
        return g / (root(square) / correction + h.graft_eps)

    def _unlike_zero(self, g: Tensor) -> Tensor:
        """Replace a gradient of zero by ones, where it matters.

        Both lengths are zero there. Before the first gradient both rules only scale their input, so that any other
        one has the ratio which makes the derivative of the step continuous.
        """
        if not torch.is_grad_enabled():
            return g
        own = tuple(range(self.batch_ndim, g.ndim))
        return torch.where((g == 0).all(own, keepdim=True) if own else g == 0, 1, g)

    def _ratio(self, wanted: Tensor, own: Tensor) -> Tensor:
        """Divide the lengths of what each task has of a parameter; by a length of 0, as 0."""
        batch = own.shape[: self.batch_ndim]
        numerator, divisor = (matrix_norm(value.reshape((*batch, 1, -1))) for value in (wanted, own))
        ratio = torch.where(divisor == 0, 0, numerator / torch.where(divisor == 0, 1, divisor))
        return ratio.reshape((*batch, *[1] * (own.ndim - self.batch_ndim)))


shampoo = ShampooRule


def _sums(decay: float | Tensor) -> bool:
    return isinstance(decay, (int, float)) and decay == 1


def _inverse_roots(pairs: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
    return inverse_roots([matrix for matrix, _ in pairs], [p for _, p in pairs])


def _where(condition: Tensor, new: Matrices, old: Matrices) -> Matrices:
    return tuple(
        tuple(torch.where(condition, *pair) for pair in zip(*blocks, strict=True))
        for blocks in zip(new, old, strict=True)
    )


def _eye(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


class Shampoo(RuleOptimizer, rule=ShampooRule):
    r"""Optimize by Shampoo: a matrix for each axis of a parameter, whose inverse roots precondition the gradient.

    .. math:: W_t = (1 - \eta \lambda) W_{t-1} - \eta V_t, \qquad
              V_t = \mu V_{t-1} + (L_t + \epsilon I)^{-1/4} \, G_t \, (R_t + \epsilon I)^{-1/4}

    Sparse gradients are refused. Of several processes, whose gradients are averaged before the step, each computes
    the roots of a share of the blocks, by ``group``.

    Raises:
        ValueError: A hyper-parameter is out of its range.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

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

    elementwise = False
    options: ClassVar[Mapping[str, Option]] = {**RuleOptimizer.options, "group": GROUP}

    def _rule(self, group: Group) -> ShampooRule:
        rule = super()._rule(group)
        return rule if self.group is None else dataclasses.replace(rule, group=self.group)
