"""K-FAC: gradients multiplied with the inverses of Kronecker-factored Fisher matrices of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.tree import widened
from metagrad.optim.arithmetic import plus_scaled
from metagrad.optim.curvature import Kronecker
from metagrad.optim.first_order.sgd import SGDRule
from metagrad.optim.hyperparameters import at_step, check_count, check_hyperparameter, is_used, values_at
from metagrad.optim.kronecker.factors import Block, FactorEstimate, Factors, FisherBlock, kl_length, renewed
from metagrad.optim.kronecker.layers import joined
from metagrad.optim.per_parameter import Values
from metagrad.optim.rule import Hyperparameter, Params, RuleNode, functional_optimizer, hyperparameter, option
from metagrad.sparse.tables.row_sparse import RowSparse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Blocks: TypeAlias = "Mapping[str, Block]"
"""The state of layers, by the names of their weights."""


class KFACState(NamedTuple):
    """The state of :class:`KFACRule`.

    Attributes:
        step: Steps taken.
        momentum: Velocities, in the shapes of the parameters; None without momentum.
        blocks: By the names of weights that may be those of layers.
    """

    step: int
    momentum: Params | None
    blocks: Blocks


@functional_optimizer
class Descent(SGDRule):
    """SGD along the directions, shortened with what momentum keeps; errors name K-FAC."""

    length: Tensor | None = option(default=None, doc="How much is left of each task's step; None, all.")

    call = "kfac(...)"

    def move(
        self, h: Values, step: float | Tensor, w: Tensor, g: Tensor, velocity: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return a parameter and its velocity after one step."""
        change = g if velocity is None else plus_scaled(g, h.momentum, velocity)
        if self.length is not None:
            own = self.length.to(change.device, change.dtype)
            change = change * (own.reshape(*own.shape, *[1] * (w.ndim - own.ndim)) if own.ndim else own)
        if is_used(h.weight_decay):
            change = plus_scaled(change, h.weight_decay, w)
        return plus_scaled(w, h.lr, change, sign=-1), None if velocity is None else change


@functional_optimizer
class KFACRule(RuleNode):
    r"""The functional form of K-FAC, whose steps :class:`metagrad.optim.KFAC` takes in training loops.

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

    Raises:
        TypeError: ``damping``, ``decay`` or ``kl_clip`` is a dict.
        ValueError: ``inverse_every`` is no multiple of ``curvature_every``, or ``fisher`` or ``loss_reduction`` is
            unknown.

    References:
        Martens, Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML 2015;
        Grosse, Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers", ICML 2016; Ba,
        Grosse, Martens, "Distributed second-order optimization using Kronecker-factored approximations", ICLR 2017,
        for ``kl_clip``; Kunstner, Balles, Hennig, "Limitations of the empirical Fisher approximation for natural
        gradient descent", NeurIPS 2019, for what ``"empirical"`` is not.
    """

    lr: Hyperparameter = hyperparameter(default=0.1, doc=r"The step size :math:`\eta`.")
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
        default=0.0, doc=r"The factor :math:`\lambda` of the parameters that is added to the direction."
    )
    decay: Hyperparameter = hyperparameter(
        default=0.95,
        below=1.0,
        doc=r"How much of the running averages is kept, :math:`\beta`, one number below 1; of the first, ``1 -"
        r" 1 / k`` if that is less.",
    )
    curvature_every: int = option(
        default=10, doc="Steps from one estimate of the factors to the next; the first step makes one."
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

    @property
    def request(self) -> Kronecker:
        """Of which Fisher matrix the factors are."""
        return Kronecker(self.fisher, self.loss_reduction)

    def needs_curvature(self, step: int) -> bool:
        """Say whether the step, of which the first is 0, renews the factors."""
        return step % self.curvature_every == 0

    def init(self, params: Params) -> KFACState:
        """Return the state before the first step."""
        _, momentum = self.descent().init(params)
        blocks = {
            key: FisherBlock(0, *self.zeros(key, params) * 2)
            for key in params
            if self._may_be_layer(key, params[key])
        }
        return KFACState(0, momentum, blocks)

    def directions(
        self,
        grads: Params,
        state: KFACState,
        params: Params,
        estimates: Iterable[tuple[str, FactorEstimate]],
        group: ProcessGroup | None = None,
    ) -> tuple[Params, Tensor | None, Blocks]:
        """Return the direction of each parameter, how much of it is taken, and the new blocks.

        Args:
            grads: The gradients.
            state: The blocks are those of layers.
            params: The parameters.
            estimates: What is new of layers, each with the name of its weight; made one by one, they are freed so.
            group: Processes that have all of these, and share the inverses.
        """
        blocks = self._renewed(state, estimates, group)
        directions = self._preconditioned(state.step, grads, blocks, params)
        is_clipped = self.kl_clip is not None
        length = self._length(state.step, directions, grads, params) if is_clipped else None
        return directions, length, blocks

    def descent(self, length: Tensor | None = None) -> Descent:
        """Return the rule that moves parameters along the directions."""
        return Descent(
            self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            maximize=self.maximize,
            length=length,
        )

    def _may_be_layer(self, key: str, param: Tensor) -> bool:
        return key.rpartition(".")[2] == "weight" and param.ndim - self.batch_ndim > 1

    def zeros(self, key: str, params: Params) -> Factors:
        """Return factors of zeros, which have no memory of their own: the weight may be that of no layer."""
        weight = params[key]
        matrix = joined(weight, params.get(_bias_of(key)), self.batch_ndim)
        zero = weight.new_zeros((), dtype=torch.promote_types(weight.dtype, torch.float32))
        outputs, inputs = (zero.expand(*matrix.shape[:-2], size, size) for size in matrix.shape[-2:])
        return Factors(inputs, outputs)

    def _renewed(
        self,
        state: KFACState,
        estimates: Iterable[tuple[str, FactorEstimate]],
        group: ProcessGroup | None,
    ) -> Blocks:
        decay, damping = (at_step(name, getattr(self, name), state.step) for name in ("decay", "damping"))
        fitting = (
            (key, new._replace(factors=self._fitting(key, state.blocks[key], new.factors)))
            for key, new in estimates
            if key in state.blocks
        )
        is_due = state.step % self.inverse_every == 0
        return renewed(state.blocks, fitting, decay, damping, is_due=is_due, group=group)  # type: ignore[arg-type]

    def _fitting(self, key: str, old: Block, new: Factors) -> Factors:
        """Return new factors in the dtype of those before; without the last input if its bias is not adapted here."""
        inputs, outputs = new
        if inputs.shape[-1] == old.inputs.shape[-1] + 1:
            inputs = inputs[..., :-1, :-1]
        if (inputs.shape, outputs.shape) != (old.inputs.shape, old.outputs.shape):
            raise ValueError(
                f"{self.call}.update: the factors of {key!r} must be {tuple(old.inputs.shape)} and "
                f"{tuple(old.outputs.shape)}, got {tuple(inputs.shape)} and {tuple(outputs.shape)}. Is the curvature "
                "that of this model, and of as many tasks?"
            )
        return Factors(inputs.to(old.inputs.dtype), outputs.to(old.outputs.dtype))

    def _preconditioned(self, step: int, grads: Params, blocks: Blocks, params: Params) -> Params:
        """Multiply the gradients of layers with the inverses; the gradients of other parameters pass."""
        parts, damping = dict(grads), at_step("damping", self.damping, step)
        for key, block in blocks.items():
            if block.updates:
                bias = _bias_of(key)
                matrix = joined(grads[key], grads.get(bias), self.batch_ndim).to(block.inputs.dtype)
                weight, *column = block.direction(matrix, damping, has_bias=bias in grads)  # type: ignore[arg-type]
                parts |= {key: weight.reshape(params[key].shape), **dict(zip([bias], column, strict=False))}
        return parts

    def _length(self, step: int, parts: Params, grads: Params, params: Params) -> Tensor:
        """Return by how much the directions of each task are shortened, ``[*tasks]``."""
        lr = dict(zip(params, values_at("lr", self.lr, step, params), strict=True))
        changes = []
        for key, part in parts.items():
            shape, square, part = (*part.shape[: self.batch_ndim], -1), lr[key] ** 2, wide(part)
            if isinstance(square, Tensor) and square.ndim:  # of each element
                square, part = 1.0, square * part
            pair = (part, wide(grads[key]))
            changes.append(square * linalg.vecdot(*(each.reshape(shape) for each in pair)))
        change = torch.stack([change.to(changes[0].device) for change in changes]).sum(0)
        return kl_length(change, at_step("kl_clip", self.kl_clip, step))  # type: ignore[arg-type]


def wide(value: Tensor) -> Tensor:
    """Return the values of a gradient, in a dtype that can hold their squares."""
    return widened(value.values if isinstance(value, RowSparse) else value)


def _bias_of(key: str) -> str:
    return key.removesuffix("weight") + "bias"
