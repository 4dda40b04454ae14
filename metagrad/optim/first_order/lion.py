"""Lion: steps of the same length in every element, along the sign of a momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.optim.arithmetic import average, plus_scaled
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.per_parameter import PerParameter
from metagrad.optim.rule import Hyperparameter, Params


class LionState(NamedTuple):
    """What :class:`Lion` carries from step to step."""

    step: int  # steps taken
    mean: Params  # averages of the gradients, in the shapes of the parameters


@dataclass(frozen=True, eq=False)
class Lion(PerParameter):
    """The rule that :func:`lion` makes."""

    lr: Hyperparameter = 1e-4
    betas: tuple[Hyperparameter, Hyperparameter] = (0.9, 0.99)
    weight_decay: Hyperparameter = 0.0
    maximize: bool = False

    call, State = "lion(...)", LionState
    hyper = ("lr", "betas", "weight_decay")
    fractions = ("betas",)

    @property
    def decays_linearly(self) -> bool:
        """A step with a zero gradient is linear in the parameters, but for the sign of an average of zero: zero."""
        return True

    def slots(self, param: Tensor) -> tuple[Tensor]:
        """Return an average of zero."""
        return (torch.zeros_like(param),)

    def move(
        self,
        step: float | Tensor,
        w: Tensor,
        g: Tensor,
        mean: Tensor,
        *,
        lr: float | Tensor,
        beta1: float | Tensor,
        beta2: float | Tensor,
        weight_decay: float | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return a parameter and its average after one step."""
        direction = average(mean, beta1, g).sign()
        if is_used(weight_decay):
            w = w * (1 - lr * weight_decay)
        return plus_scaled(w, lr, direction, sign=-1), average(mean, beta2, g)


def lion(
    lr: Hyperparameter = 1e-4,
    *,
    betas: tuple[Hyperparameter, Hyperparameter] = (0.9, 0.99),
    weight_decay: Hyperparameter = 0.0,
    maximize: bool = False,
) -> Lion:
    r"""Make the rule of Lion.

    .. math::
        w_t = w_{t-1} - \eta \bigl(\operatorname{sign}(\beta_1 m_{t-1} + (1 - \beta_1) g_t) + \lambda w_{t-1}\bigr),
        \qquad m_t = \beta_2 m_{t-1} + (1 - \beta_2) g_t

    The derivative of the sign is zero, so a meta-gradient flows through ``lr``, the decay and the parameters
    themselves, and not through gradients or ``betas``: those have a gradient of exactly zero.

    Args:
        lr: The step size :math:`\eta`, in the forms of :data:`Hyperparameter`; may require grad. Every element
            moves by it, so it is 3 to 10 times smaller than Adam's.
        betas: The share of the average in the direction, and how much of the average is kept, each from 0 to
            below 1.
        weight_decay: The factor :math:`\lambda` of the step :math:`\eta \lambda w` that shrinks the parameters, as
            much larger than Adam's as ``lr`` is smaller.
        maximize: Climb: take the gradient with the other sign; weights decay all the same.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``.

    Raises:
        ValueError: A number is out of its range; in ``update``, a value for a step or a parameter is missing.
        TypeError: A hyper-parameter is of an unknown form; in ``init``, a parameter is complex; in ``update``, a
            gradient is sparse: use ``rowwise``.

    Example:
        >>> rule = metagrad.optim.rules.lion(lr=0.5, weight_decay=0.5)
        >>> params = {"w": torch.tensor([1.0, 2.0, 4.0])}
        >>> new, state = rule.update({"w": torch.tensor([3.0, -0.1, 0.0])}, rule.init(params), params)
        >>> new["w"]
        tensor([0.2500, 2.0000, 3.0000])

    References:
        Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2 and section 5.
    """
    return Lion(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize)
