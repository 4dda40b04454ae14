"""Lion: steps of the same length in every element, along the sign of a momentum."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad.core.tree import Params, widened
from metagrad.optim.arithmetic import average, plus_scaled
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.per_parameter import PerParameter, Values
from metagrad.optim.rule import Hyperparameter, functional_optimizer, hyperparameter
from metagrad.optim.torch_optim.optimizer import Group, ParamsWithGrad, RuleOptimizer, as_number
from metagrad.optim.torch_optim.state import ParameterState, PendingUpdate


class LionState(NamedTuple):
    """The state of :class:`LionRule`.

    Attributes:
        step: Steps taken.
        mean: Averages of the gradients, in the shapes of the parameters.
    """

    step: int
    mean: Params


@functional_optimizer
class LionRule(PerParameter):
    r"""The functional form of Lion.

    .. math::
        w_t = w_{t-1} - \eta \bigl(\operatorname{sign}(\beta_1 m_{t-1} + (1 - \beta_1) g_t) + \lambda w_{t-1}\bigr),
        \qquad m_t = \beta_2 m_{t-1} + (1 - \beta_2) g_t

    The derivative of the sign is zero. So a meta-gradient flows through ``lr``, the decay and the parameters. The
    meta-gradients of gradients and ``betas`` are exactly zero.

    These arguments take every form of :data:`Hyperparameter`, and may require grad: lr, betas, weight_decay.

    Args:
        lr: The learning rate :math:`\eta`. Every element changes by ``lr`` in a step, so ``lr`` is 3 to 10 times
            smaller than for Adam.
        betas: The share of the average in the direction, and the decay rate of the average, each from 0 to below 1.
        weight_decay: Decoupled weight decay :math:`\lambda`: each step subtracts :math:`\eta \lambda w`. It is 3 to
            10 times larger than for Adam, because ``lr`` is smaller.
        maximize: Maximize the loss: negate the gradient. Weight decay keeps its sign.

    Example:
        >>> rule = metagrad.optim.rules.lion(lr=0.5, weight_decay=0.5)
        >>> params = {"w": torch.tensor([1.0, 2.0, 4.0])}
        >>> new, state = rule.update({"w": torch.tensor([3.0, -0.1, 0.0])}, rule.init(params), params)
        >>> new["w"]
        tensor([0.2500, 2.0000, 3.0000])

    References:
        Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2 and section 5.
    """

    lr: Hyperparameter = hyperparameter(default=1e-4)
    _: KW_ONLY
    betas: tuple[Hyperparameter, Hyperparameter] = hyperparameter(default=(0.9, 0.99), below=1.0)
    weight_decay: Hyperparameter = hyperparameter(default=0.0)
    maximize: bool = False

    call, State = "lion(...)", LionState
    decays_linearly = True

    def init_slots(self, param: Tensor) -> tuple[Tensor]:
        """Return a momentum of zeros."""
        return (torch.zeros_like(param),)

    def update_param(
        self, h: Values, step: float | Tensor, w: Tensor, g: Tensor, mean: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a parameter and its average after one step."""
        direction = average(mean, h.beta1, g).sign()
        if is_used(h.weight_decay):
            w = w * (1 - h.lr * h.weight_decay)
        return plus_scaled(w, h.lr, direction, sign=-1), average(mean, h.beta2, g)


lion = LionRule


_LARGE = 1e30
"""A step of this length cannot make a finite float32 infinite: it is lost in rounding for the largest
numbers."""


@dataclass(frozen=True)
class LionUpdate(PendingUpdate):
    """A step of Lion that is computed while it is written, with one temporary tensor per parameter.

    Finite inputs give a finite step, so results need no check before they are written.
    """

    group: Group = field(default_factory=dict[str, Any])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing, because gradients and parameters were checked."""
        yield from ()

    def write(self, kept: MutableMapping[Tensor, ParameterState]) -> None:
        """Write parameters in place, and their state into the state of an optimizer."""
        lr, decay = as_number(self.group["lr"]), as_number(self.group["weight_decay"])
        beta1, beta2 = as_number(self.group["betas"])
        for key, p in self.params.items():
            state, w, g = kept[p], widened(p), widened(self.moved[key])
            g = -g if self.group["maximize"] else g
            mean = state.get("mean")
            mean = torch.zeros_like(w) if mean is None else mean
            if decay:
                w.mul_(1 - lr * decay)
            w.add_(average(mean, beta1, g).sign_(), alpha=-lr)
            if w is not p:
                p.copy_(w)
            state.update(step=state.get("step", 0) + 1, mean=average(mean, beta2, g))


class Lion(RuleOptimizer, rule=LionRule):
    r"""Optimize by Lion: steps of the same length in every element, along the sign of a momentum.

    .. math:: w_t &= w_{t-1} - \eta \bigl(\operatorname{sign}(\beta_1 m_{t-1} + (1 - \beta_1) g_t)
                     + \lambda w_{t-1}\bigr) \\
              m_t & = \beta_2 m_{t-1} + (1 - \beta_2) g_t

    Args:
        params: Parameters, with or without names, or groups of parameters with their own hyperparameters.
        lr: The learning rate :math:`\eta`. Every element changes by ``lr`` in a step, so ``lr`` is 3 to 10 times
            smaller than for Adam.
        betas: The share of the average in the direction, and the decay rate of the average, each from 0 to below 1.
        weight_decay: Decoupled weight decay :math:`\lambda`: each step subtracts :math:`\eta \lambda w`. It is 3 to
            10 times larger than for Adam, because ``lr`` is smaller.
        maximize: Maximize the loss: negate the gradient. Weight decay keeps its sign.
        nonfinite: Reaction if the loss, a gradient or the curvature is NaN or infinite, or a matrix cannot be
            factorized. ``"raise"`` raises an error. ``"skip"`` leaves the step out and counts it in ``opt.stats``.
            Parameters and state do not change.

    Raises:
        ValueError: A hyperparameter is out of its range.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

    Example:
        >>> from metagrad.optim import Lion
        >>> w = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> opt = Lion([w], lr=0.5)
        >>> (w**2).sum().backward()
        >>> opt.step()
        >>> w
        tensor([ 0.5000, -1.5000], requires_grad=True)

    References:
        Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
    """

    def _observed(self, work: ParamsWithGrad) -> Iterator[tuple[str, Tensor]]:
        yield from super()._observed(work)
        yield from ((f"the value of {key!r}", p) for key, p in work.params.items())

    def _updates(self, work: ParamsWithGrad) -> Iterator[PendingUpdate]:
        lr, decay = as_number(work.group["lr"]), as_number(work.group["weight_decay"])
        self._rule(work.group)
        if lr < _LARGE and lr * decay <= 2:
            yield LionUpdate(work.params, work.grads, {}, group=work.group)
        else:
            yield from super()._updates(work)
