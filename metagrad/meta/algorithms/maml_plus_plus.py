"""MAML++: a loss after every step, learned rates, norms of their own for every step, and schedules of these."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from metagrad.core.checks import check_count, is_a, is_list_or_tuple
from metagrad.core.tree import LossFn, Params
from metagrad.meta.maml import MAML
from metagrad.meta.objective.norms import Norm
from metagrad.meta.options import refuse_fixed
from metagrad.optim.rules import sgd

QueryWeights: TypeAlias = "Sequence[float | Tensor] | Tensor"
"""A weight for each inner step."""

T = TypeVar("T")


def _annealed(read: Callable[[Any], T], assigned: str) -> T:
    """Make a property of an attribute of :class:`MAML`: what was assigned is kept under a name of its own."""

    def write(self: nn.Module, value: T) -> None:
        setattr(self, assigned, value)

    return cast(T, property(read, write))


class MAMLPlusPlus(MAML):
    r"""MAML++: MAML with a multi-step loss, rates for every parameter and step, and norms of their own for each step.

    .. math::
        \min_{\theta, \alpha} \; \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T} \sum_{t=1}^{T}
            w_t L_i^{\mathrm{query}}(\phi_t), \qquad
        \phi_{t+1}^p = \phi_t^p - \alpha_t^p \nabla_{\phi^p} L_i^{\mathrm{support}}(\phi_t)

    for every parameter :math:`p`, with the learned rates :math:`\alpha_t^p`. After update :math:`e` of :math:`E`
    (``multi_step_updates``) the weights are :math:`w_t = (1 - e/E) / T` for :math:`t < T` and
    :math:`w_T = 1 - (T - 1)(1 - e/E) / T`: at first all steps count alike, then the last alone. Inner gradients are
    constants for the first ``first_order_updates``. Call :meth:`advance` after each update of the meta-parameters;
    the count is a buffer, ``updates``, and is saved with the state.

    The paper also lets the outer learning rate fall along a cosine, as ``CosineAnnealingLR`` does
    (``schedule=cosine`` of the experiments).

    Args:
        model: As of :class:`MAML`.
        loss_fn: As of :class:`MAML`.
        lr: The rate that all parameters and steps start from.
        steps: The number of inner steps; an evaluation takes no more.
        multi_step_updates: After how many updates the last query loss alone counts; 0 from the first on.
        first_order_updates: How many updates take inner gradients as constants.
        norm: As of :class:`MAML`; None for models without batch normalisation. The paper speaks of running
            statistics of each step, ``"per_step"``; its code normalises by those of the set at hand, in evaluation
            too, which is the default. A model that is trained so and evaluated with running ones adapts by gradients
            it has never seen, and may diverge.
        order: The order after those; assigned, it is that.
        query_weights: The weights of the query losses after each inner step in ``out.loss``, numbers or 0-d tensors,
            which may be learned; they take the place of those that anneal. A call with another number of steps than
            there are weights counts only the last loss.
        **arguments: As of :class:`MAML`.

    Raises:
        ValueError: A number of updates is negative, ``lr`` is negative, or :class:`MAML` refuses the other arguments.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
        >>> learner = metagrad.MAMLPlusPlus(model, torch.nn.functional.mse_loss, steps=2, multi_step_updates=2,
        ...                                 first_order_updates=1)
        >>> schedule = []
        >>> for update in range(3):
        ...     schedule.append((learner.order, learner.query_weights))
        ...     learner.advance()
        >>> schedule
        [(1, [0.5, 0.5]), (2, [0.25, 0.75]), (2, None)]
        >>> learner.per_step_norms.get_parameter("1_weight").shape
        torch.Size([2, 2])

    References:
        Antoniou, Edwards, Storkey, "How to train your MAML", ICLR 2019, section 4.
    """

    updates: Tensor
    _order: int
    _query_weights: QueryWeights | None
    multi_step_updates: int = 0
    first_order_updates: int = 0

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        lr: float = 0.1,
        steps: int = 5,
        multi_step_updates: int = 0,
        first_order_updates: int = 0,
        norm: Norm | None = "per_step_transductive",
        order: int = 2,
        query_weights: QueryWeights | None = None,
        **arguments: Any,
    ) -> None:
        refuse_fixed("MAMLPlusPlus", arguments, inner="it is SGD with learned rates. Pass lr=, or use MAML.")
        check_count("MAMLPlusPlus(..., multi_step_updates)", multi_step_updates, 0)
        check_count("MAMLPlusPlus(..., first_order_updates)", first_order_updates, 0)
        self._query_weights = None
        super().__init__(model, loss_fn, inner=sgd(lr=lr), steps=steps, norm=norm, order=order, **arguments)
        self.query_weights = query_weights
        self._check()
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.multi_step_updates, self.first_order_updates = multi_step_updates, first_order_updates
        params = self._adapted_parameters()
        self.inner = sgd(lr=[_rates(params, lr) for _ in range(steps)]) if steps else sgd(lr=lr)

    def advance(self) -> None:
        """Count an update of the meta-parameters, which moves what anneals."""
        self.updates += 1

    def _order_now(self) -> int:
        """The order at this update."""
        is_first = self.first_order_updates and int(self.updates) < self.first_order_updates
        return 1 if is_first else self._order

    def _query_weights_now(self) -> QueryWeights | None:
        """The weights of the query losses at this update, unless others were given."""
        if self._query_weights is not None or not self.multi_step_updates or not self.steps:
            return self._query_weights
        early = max(0.0, 1 - int(self.updates) / self.multi_step_updates) / self.steps
        return [*[early] * (self.steps - 1), 1 - (self.steps - 1) * early] if early else None

    def _check(self) -> None:
        super()._check()
        _check_query_weights(self._query_weights, self.steps)

    def _step_weights(self, steps: int) -> QueryWeights | None:
        weights = self.query_weights
        return None if weights is None or len(weights) != steps else weights

    order: int = _annealed(_order_now, "_order")
    query_weights: QueryWeights | None = _annealed(_query_weights_now, "_query_weights")


def _check_query_weights(weights: Any, steps: int) -> None:
    """Raise for what is not a weight for each of the steps, and for weights that are all zero."""
    if weights is None:
        return
    call = "MAMLPlusPlus(..., query_weights)"
    if not (is_list_or_tuple(weights) or is_a(weights, Tensor)) or len(weights) != steps:
        raise ValueError(
            f"{call}: expected a sequence with a weight for each of {steps} steps, got {weights!r}."
        )
    numbers: list[Any] = [weight for weight in weights if not isinstance(weight, Tensor)]
    if not all(isinstance(weight, (int, float)) and 0 <= weight < math.inf for weight in numbers):
        raise ValueError(f"{call}: weights must be finite and at least 0, got {weights!r}.")
    if len(numbers) == steps and not any(numbers):
        raise ValueError(
            f"{call}: all weights are 0, so that nothing is learned. Give the last step a weight."
        )


def _rates(params: Params, lr: float) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(p.detach().new_full((), lr)) for name, p in params.items()}
