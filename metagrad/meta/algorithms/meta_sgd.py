"""Meta-SGD: step sizes that are learned, one for every entry of the parameters."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from metagrad.meta.execution.tables import check_tables
from metagrad.meta.maml import MAML
from metagrad.meta.objective.task_loss import LossFn
from metagrad.optim.rules import Hyperparameter, Params, sgd

PER = ("entry", "tensor", "step")


class MetaSGD(MAML):
    r"""Meta-SGD: learn the initialisation, and with it the direction and the length of the inner steps.

    .. math:: \phi_{t+1} = \phi_t - \alpha \circ \nabla L_i^{\mathrm{support}}(\phi_t)

    with :math:`\alpha` of the shape of the parameters and learned as they are, by the loss of the query examples.
    Nothing keeps a learned rate positive. The paper takes one step, on 4-conv networks.

    Args:
        model: As of :class:`MAML`.
        loss_fn: As of :class:`MAML`.
        lr: The rate that all entries start from; the paper draws it from [0.005, 0.1].
        steps: The number of inner steps.
        per: Whether there is a rate for every ``"entry"`` of every parameter, as in the paper; for every
            ``"tensor"``; or for every ``"step"``, so that an evaluation takes no more steps than the training.
        **arguments: As of :class:`MAML`.

    Raises:
        ValueError: ``per`` is unknown, ``lr`` is negative, or :class:`MAML` refuses the other arguments.

    Example:
        >>> meta_sgd = metagrad.MetaSGD(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, lr=0.1, steps=1)
        >>> {name: tuple(p.shape) for name, p in meta_sgd.named_parameters() if "inner" in name}
        {'inner_lr_weight': (1, 2), 'inner_lr_bias': (1,)}

    References:
        Li, Zhou, Chen, Li, "Meta-SGD: learning to learn quickly for few-shot learning", arXiv:1707.09835,
        equation 4 and algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        lr: float,
        steps: int = 1,
        per: Literal["entry", "tensor", "step"] = "entry",
        **arguments: Any,
    ) -> None:
        if per not in PER:
            raise ValueError(f"MetaSGD(..., per): expected one of {', '.join(map(repr, PER))}, got {per!r}.")
        super().__init__(model, loss_fn, inner=sgd(lr=lr), steps=steps, **arguments)
        params = self._adapted_parameters()
        rule = sgd(lr=_rates(params, lr, per, steps))
        self.sparse = check_tables(model, self.sparse, rule, params)
        self.inner = rule


def _rates(params: Params, lr: float, per: str, steps: int) -> Hyperparameter:
    if per == "step":
        first = next(iter(params.values()))
        return nn.Parameter(first.detach().new_full((steps,), lr))

    def rate(param: Tensor) -> nn.Parameter:
        return nn.Parameter(torch.full_like(param if per == "entry" else param.new_empty(()), lr))

    return {name: rate(param.detach()) for name, param in params.items()}
