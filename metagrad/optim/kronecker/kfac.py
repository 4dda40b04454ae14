"""K-FAC: gradients multiplied with the inverses of Kronecker-factored Fisher matrices of layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.optim.curvature import Kronecker, checked_factors
from metagrad.optim.diagonal.adahessian import check_count
from metagrad.optim.first_order.sgd import SGDRule, SGDState
from metagrad.optim.hyperparameters import at_step, check_hyperparameter, values_at
from metagrad.optim.kronecker.factors import (
    Factors,
    averaged_factors,
    inverses_of,
    kl_length,
    preconditioned,
)
from metagrad.optim.kronecker.layers import joined, split
from metagrad.optim.per_parameter import checked_gradients
from metagrad.optim.rule import Hyperparameter, Params, RuleNode, functional_optimizer, hyperparameter, option
from metagrad.sparse.tables.row_sparse import RowSparse


class Block(NamedTuple):
    """What is kept of a layer's block of the Fisher matrix."""

    updates: int  # estimates of the factors so far
    factors: Factors  # their running averages
    inverses: Factors  # of the factors as of the last time, damped


class KFACState(NamedTuple):
    """What :class:`KFACRule` carries from step to step."""

    step: int  # steps taken
    momentum: Params | None  # velocities, in the shapes of the parameters; None without momentum
    blocks: dict[str, Block]  # by the names of weights that may be those of layers


class _Descent(SGDRule):
    """The rule of the directions, whose errors are K-FAC's."""

    call = "kfac(...)"


@functional_optimizer
class KFACRule(RuleNode):
    r"""The functional form of K-FAC; equal to :class:`metagrad.optim.KFAC` step for step.

    .. math::
        A_k &= \epsilon_k A_{k-1} + (1 - \epsilon_k) \, \mathbb{E}[a a^\top], \qquad
        G_k = \epsilon_k G_{k-1} + (1 - \epsilon_k) \, \mathbb{E}[g g^\top], \qquad
        \epsilon_k = \min(1 - 1/k, \beta) \\
        D &= \Bigl(G + \frac{\sqrt{\gamma}}{\pi} I\Bigr)^{-1} \nabla W \, \bigl(A + \pi \sqrt{\gamma} I\bigr)^{-1},
        \qquad \pi^2 = \frac{\operatorname{tr}(A) / \dim A}{\operatorname{tr}(G) / \dim G} \\
        V &\leftarrow \nu (\mu V + D) + \lambda W, \qquad W \leftarrow W - \eta V, \qquad
        \nu = \min\bigl(1, \sqrt{\kappa / (\eta^2 D^\top \nabla)}\bigr)

    with :math:`a` the inputs of a layer, a 1 for its bias among them, and :math:`g` the gradients of its outputs. The
    layers are the ``nn.Linear`` and ``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d`` of the model; all other
    parameters move along the plain gradient, which is their part of :math:`D`. Everything can be differentiated at
    every order, through the factors, their inverses and the clipping.

    With ``fisher="empirical"``, the default, the step is near to Newton's only where the model fits its data well in
    the sense of likelihood: the squares of the gradients stand for the curvature. On a regression by squared errors
    they grow with the residuals, as the Hessian does not, so that steps are short where the fit is bad and long where
    it is good; there ``"sampled"`` is the Fisher matrix, which is the Gauss-Newton matrix.

    In :class:`metagrad.MAML` the curvature is given, and each task has factors of its own. By hand it is a
    :class:`~metagrad.optim.kronecker.layer_objective.LayerObjective`, or anything with a method
    ``kronecker_factors(request)`` that returns the factors of layers by the names of their weights.

    What does not work: grouped convolutions, and layers that are shared or called twice, which are refused by name;
    ``memory="block"``; ``compile`` in MAML, which says so and runs the steps as they are; the corrected eigenvalues
    that ``metagrad.optim.KFAC(eigen=True)`` has, for eigenvectors have no derivative where eigenvalues coincide, as
    those of factors of few examples do.

    Example:
        The outputs' factor of a loss that is linear is the square of its slope, that of the inputs their square, and
        the product of both divides the gradient:

        >>> from metagrad.optim.kronecker.layer_objective import LayerObjective
        >>> from metagrad.optim.kronecker.kfac import kfac
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> params = {"weight": torch.tensor([[1.0]], requires_grad=True)}
        >>> rule = kfac(lr=1.0, momentum=0.0, damping=1e-12, kl_clip=None)
        >>> x, y = torch.tensor([[2.0]]), torch.zeros(1, 1)
        >>> objective = LayerObjective(model, lambda z, y: 5 * (z - y).sum(), x, y, params)
        >>> new, state = rule.update(objective.grads, rule.init(params), params, objective)
        >>> round(new["weight"].item(), 4), [factor.item() for factor in state.blocks["weight"].factors]
        (0.9, [4.0, 25.0])

    References:
        Martens, Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML 2015;
        Grosse, Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers", ICML 2016; Ba,
        Grosse, Martens, "Distributed second-order optimization using Kronecker-factored approximations", ICLR 2017,
        for ``kl_clip``; Kunstner, Balles, Hennig, "Limitations of the empirical Fisher approximation for natural
        gradient descent", NeurIPS 2019, for what ``"empirical"`` is not.
    """

    lr: Hyperparameter = hyperparameter(
        default=0.1,
        doc=r"The step size :math:`\eta`.",
    )
    _: KW_ONLY
    momentum: Hyperparameter = hyperparameter(
        default=0.9, doc=r"How much of the last steps is kept, :math:`\mu`."
    )
    damping: Hyperparameter = hyperparameter(
        default=1e-2,
        doc=r"What is added to the Fisher matrix, :math:`\gamma`, one number for all layers; above 0, since the "
        r"factors of few examples are singular.",
    )
    weight_decay: Hyperparameter = hyperparameter(
        default=0.0,
        doc=r"The factor :math:`\lambda` of the parameters that is added to the direction.",
    )
    decay: Hyperparameter = hyperparameter(
        default=0.95,
        below=1.0,
        doc=r"How much of the running averages is kept, :math:`\beta`, one number below 1; of the first, ``1 -"
        r" 1 / k`` if that is less.",
    )
    curvature_every: int = option(
        default=10,
        doc="Steps from one estimate of the factors to the next; the first step makes one.",
    )
    inverse_every: int = option(
        default=10, doc="Steps from one inverse to the next, a multiple of ``curvature_every``."
    )
    kl_clip: Hyperparameter | None = hyperparameter(
        default=1e-3,
        doc=r"The most that :math:`\eta^2 D^\top \nabla` may be over all parameters of a task or a group, "
        r":math:`\kappa`; a longer direction is shortened by :math:`\nu`, and so is what momentum keeps, which would "
        r"carry steps beyond the limit. None: no limit. The first steps of an inner loop are often long: a limit "
        r"that binds at each of them makes their length, not ``lr``, what is learned.",
    )
    fisher: Literal["empirical", "sampled"] = option(
        default="empirical",
        doc='Of what labels: ``"empirical"``, those of the data, or ``"sampled"``, drawn from the model, for '
        "losses of known form.",
    )
    loss_reduction: Literal["mean", "sum"] = option(
        default="mean",
        doc='Whether the loss is the ``"mean"`` over examples, or the ``"sum"``; it matters for ``"empirical"``.',
    )
    maximize: bool = option(default=False, doc="Climb: take the gradient with the other sign.")
    batch_ndim: int = 0

    call = "kfac(...)"

    def __post_init__(self) -> None:
        for name in self.hyper:
            value = getattr(self, name)
            if name != "kl_clip" or value is not None:
                check_hyperparameter(self.call, name, value, below=self.below[name])
            if name in ("damping", "decay", "kl_clip") and isinstance(value, Mapping):
                raise TypeError(f"{self.call}: {name} is one number for all layers, got a dict.")
        for name in ("curvature_every", "inverse_every"):
            check_count(self.call, name, getattr(self, name))
        if self.inverse_every % self.curvature_every:
            raise ValueError(
                f"{self.call}: inverse_every must be a multiple of curvature_every, got {self.inverse_every} and "
                f"{self.curvature_every}."
            )
        for name, choices in (("fisher", ("empirical", "sampled")), ("loss_reduction", ("mean", "sum"))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{self.call}: {name} must be {choices[0]!r} or {choices[1]!r}, got {getattr(self, name)!r}."
                )

    def needs_curvature(self, step: int) -> bool:
        """Say whether the step, of which the first is 0, renews the factors."""
        return step % self.curvature_every == 0

    def needs_layers(self, step: int) -> bool:
        """Say the same: the curvature is that of layers."""
        return self.needs_curvature(step)

    def init(self, params: Params) -> KFACState:
        """Return the state before the first step."""
        _, momentum = self.descent.init(params)
        blocks = {key: self._empty(key, params) for key in params if self._may_be_layer(key, params[key])}
        return KFACState(0, momentum, blocks)

    def update(
        self, grads: Params, state: KFACState, params: Params, curvature: object | None = None
    ) -> tuple[Params, KFACState]:
        """Take one step; ``curvature`` is a :class:`~metagrad.optim.curvature.LayerCurvature`."""
        gradients = checked_gradients(self.call, grads, params, takes_rows=True)
        blocks = state.blocks
        if self.needs_curvature(state.step):
            request = Kronecker(self.fisher, self.loss_reduction)
            blocks = self._renewed(state, checked_factors(self.call, curvature, request))
        directions, velocities = self._directions(gradients, blocks, params), state.momentum
        if self.kl_clip is not None:
            length = self._length(state.step, directions, gradients, params)
            directions = _times(length, directions)
            velocities = None if velocities is None else _times(length, velocities)
        directions = {key: direction.to(grads[key].dtype) for key, direction in directions.items()}
        moved, (step, momentum) = self.descent.update(directions, SGDState(state.step, velocities), params)
        return moved, KFACState(step, momentum, blocks)

    @functools.cached_property
    def descent(self) -> SGDRule:
        """The rule that moves parameters along the directions."""
        return _Descent(
            self.lr, momentum=self.momentum, weight_decay=self.weight_decay, maximize=self.maximize
        )

    def _may_be_layer(self, key: str, param: Tensor) -> bool:
        return key.rpartition(".")[2] == "weight" and param.ndim - self.batch_ndim > 1

    def _empty(self, key: str, params: Params) -> Block:
        """Return a block of zeros, which has no memory of its own: the weight may be that of no layer."""
        weight = params[key]
        matrix = joined(weight, params.get(_bias_of(key)), self.batch_ndim)
        zero = weight.new_zeros((), dtype=torch.promote_types(weight.dtype, torch.float32))
        sizes = (matrix.shape[-1], matrix.shape[-2])
        zeros = Factors(*(zero.expand(*matrix.shape[:-2], size, size) for size in sizes))
        return Block(0, zeros, zeros)

    def _renewed(self, state: KFACState, found: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Block]:
        decay, damping = (at_step(name, getattr(self, name), state.step) for name in ("decay", "damping"))
        blocks = dict(state.blocks)
        for key, old in state.blocks.items():
            if key not in found:
                continue
            updates, new = old.updates + 1, self._fitting(key, old.factors, found[key])
            factors = averaged_factors(old.factors, new, updates, decay)  # type: ignore[arg-type]
            is_due = updates == 1 or state.step % self.inverse_every == 0
            inverses = inverses_of(factors, damping) if is_due else old.inverses  # type: ignore[arg-type]
            blocks[key] = Block(updates, factors, inverses)
        return blocks

    def _fitting(self, key: str, old: Factors, new: tuple[Tensor, Tensor]) -> Factors:
        """Return new factors in the dtype of those before; without the last input if its bias is not adapted here."""
        inputs, outputs = new
        if inputs.shape[-1] == old.inputs.shape[-1] + 1:
            inputs = inputs[..., :-1, :-1]
        found = Factors(inputs.to(old.inputs.dtype), outputs.to(old.outputs.dtype))
        if [factor.shape for factor in found] != [factor.shape for factor in old]:
            raise ValueError(
                f"{self.call}.update: the factors of {key!r} must be {tuple(old.inputs.shape)} and "
                f"{tuple(old.outputs.shape)}, got {tuple(inputs.shape)} and {tuple(outputs.shape)}. Is the curvature "
                "that of this model, and of as many tasks?"
            )
        return found

    def _directions(self, grads: Params, blocks: dict[str, Block], params: Params) -> Params:
        """Return the direction of each parameter: of those that are in no layer, the gradient."""
        parts: Params = dict(grads)
        for key, block in blocks.items():
            if block.updates:
                bias = _bias_of(key) if _bias_of(key) in params else None
                matrix = joined(grads[key], None if bias is None else grads[bias], self.batch_ndim)
                direction = preconditioned(matrix.to(block.inverses.inputs.dtype), block.inverses)
                shape = params[key].shape
                parts[key], column = split(direction, shape, has_bias=bias is not None)
                if bias is not None and column is not None:
                    parts[bias] = column
        return parts

    def _length(self, step: int, parts: Params, grads: Params, params: Params) -> Tensor:
        """Return by how much the directions of each task are shortened, ``[*tasks]``."""
        lr = dict(zip(params, values_at("lr", self.lr, step, params), strict=True))
        changes = [
            (lr[key] ** 2 * wide(part) * wide(grads[key])).reshape(*part.shape[: self.batch_ndim], -1).sum(-1)
            for key, part in parts.items()
        ]
        change = torch.stack([change.to(changes[0].device) for change in changes]).sum(0)
        return kl_length(change, at_step("kl_clip", self.kl_clip, step))  # type: ignore[arg-type]


kfac = KFACRule


def wide(value: Tensor) -> Tensor:
    """Return what a gradient holds, in a dtype that has room for its squares."""
    value = value.values if isinstance(value, RowSparse) else value
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _bias_of(key: str) -> str:
    return key.removesuffix("weight") + "bias"


def _times(length: Tensor, parts: Params) -> Params:
    """Multiply each task's part of every parameter with its length."""
    return {
        key: part
        * length.to(part.device, part.dtype).reshape(*length.shape, *[1] * (part.ndim - length.ndim))
        for key, part in parts.items()
    }
