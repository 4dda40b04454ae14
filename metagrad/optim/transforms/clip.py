"""Clipping gradients by their norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.core.tree import Params, widened
from metagrad.optim.arithmetic import root
from metagrad.optim.hyperparameters import at_step, check_hyperparameter
from metagrad.optim.per_parameter import checked_gradients
from metagrad.optim.rule import Hyperparameter, RuleNode
from metagrad.sparse.tables.embedding import over
from metagrad.sparse.tables.row_sparse import RowSparse


class ClipState(NamedTuple):
    """The state of a clip.

    Attributes:
        step: Steps taken.
    """

    step: int


@dataclass(frozen=True, eq=False)
class ClipByNorm(RuleNode):
    """The transform that :func:`clip_by_norm` makes."""

    max_norm: Hyperparameter
    batch_ndim: int = 0

    hyper = ("max_norm",)

    def __post_init__(self) -> None:
        check_hyperparameter("clip_by_norm(...)", "max_norm", self.max_norm)

    def init(self, params: Params) -> ClipState:
        """Return the state before the first step."""
        return ClipState(0)

    def transform(self, grads: Params, state: ClipState, params: Params) -> tuple[Params, ClipState]:
        """Scale down the gradients of all parameters together."""
        grads = checked_gradients("clip_by_norm(...)", grads, params, takes_rows=self.batch_ndim == 0)
        limit = at_step("max_norm", self.max_norm, state.step)
        if not isinstance(limit, (int, float, Tensor)):
            raise TypeError(
                "clip_by_norm(...).transform: max_norm bounds the norm of all parameters together, got a dict by "
                "parameter name. Use mask(chain(clip_by_norm(...), rule), names, other=...)."
            )
        if grads:
            norm = self._norm(grads)
            is_long = norm > limit
            factor = torch.where(is_long, limit / torch.where(is_long, norm, 1), 1)
            grads = {key: g * over(factor, g).to(g.dtype) for key, g in grads.items()}
        return grads, ClipState(state.step + 1)

    def _norm(self, grads: Params) -> Tensor:
        tensors = [g.values if isinstance(g, RowSparse) else g for g in grads.values()]
        # Squares of float16 numbers may overflow float16.
        wide = map(widened, tensors)
        first, *others = [t.reshape(*t.shape[: self.batch_ndim], -1).square().sum(-1) for t in wide]
        return root(sum(others, first))


def clip_by_norm(max_norm: Hyperparameter) -> ClipByNorm:
    r"""Make the transform that scales down gradients with a large norm, for :func:`chain`.

    .. math:: g \leftarrow g \, \min(1, \, c / \|g\|)

    with the Euclidean norm over all parameters. If tasks are stacked, each task has its own norm. Unlike
    ``torch.nn.utils.clip_grad_norm_``, it does not add a constant to the norm. It is differentiable, also at
    a gradient of zero, which stays zero.

    Args:
        max_norm: Largest norm of a gradient, :math:`c`: a number, a tensor that may require grad, or a value
            for each step.

    Raises:
        ValueError: ``max_norm`` is negative.
        TypeError: ``max_norm`` has an unsupported type.

    Example:
        >>> rules = metagrad.optim.rules
        >>> rule = rules.chain(rules.clip_by_norm(1.0), rules.sgd(lr=1.0))
        >>> params = {"a": torch.tensor(0.0), "b": torch.tensor(0.0)}
        >>> gradients = {"a": torch.tensor(30.0), "b": torch.tensor(-40.0)}
        >>> rule.update(gradients, rule.init(params), params)[0]
        {'a': tensor(-0.6000), 'b': tensor(0.8000)}

    References:
        Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", ICML 2013, algorithm 1.
    """
    return ClipByNorm(max_norm)
