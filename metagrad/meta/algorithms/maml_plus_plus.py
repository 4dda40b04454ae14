"""MAML++: MAML with a multi-step loss, learned learning rates, and separate norms for each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from metagrad.core.checks import check_count, is_a, is_list_or_tuple, refuse
from metagrad.core.tree import LossFn, Params
from metagrad.meta.maml import MAML
from metagrad.meta.objective.norms import Norm
from metagrad.meta.options import refuse_fixed
from metagrad.optim.rules import sgd

QueryWeights: TypeAlias = "Sequence[float | Tensor] | Tensor"
"""One weight for each inner step."""

T = TypeVar("T")


def _annealed(read: Callable[[Any], T], assigned: str) -> T:
    """Return a property for an attribute of :class:`MAML`.

    The assigned value is stored under another name.
    """

    def write(self: nn.Module, value: T) -> None:
        setattr(self, assigned, value)

    return cast(T, property(read, write))


class MAMLPlusPlus(MAML):
    r"""MAML++: MAML with a multi-step loss, and separate learning rates and norms for each step.

    .. math::
        \min_{\theta, \alpha} \; \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T} \sum_{t=1}^{T}
            w_t L_i^{\mathrm{query}}(\phi_t), \qquad
        \phi_{t+1}^p = \phi_t^p - \alpha_t^p \nabla_{\phi^p} L_i^{\mathrm{support}}(\phi_t)

    Every parameter :math:`p` has learned learning rates :math:`\alpha_t^p`. After update :math:`e` of :math:`E`
    (``multi_step_updates``) the weights are :math:`w_t = (1 - e/E) / T` for :math:`t < T` and
    :math:`w_T = 1 - (T - 1)(1 - e/E) / T`. So all steps count equally at first, and only the last step counts in the
    end. Inner gradients are constants during the first ``first_order_updates``. Call :meth:`advance` after each
    update of the meta-parameters. The buffer ``updates`` counts these calls.

    The paper also uses a cosine schedule for the outer learning rate, as ``CosineAnnealingLR`` does
    (``schedule=cosine`` in the experiments).

    Args:
        model: The model, as in :class:`MAML`.
        loss_fn: The loss function, as in :class:`MAML`.
        lr: The initial learning rate of all parameters and steps.
        steps: The number of inner steps. An evaluation cannot use more steps.
        multi_step_updates: The number of updates after which only the last query loss counts.
        first_order_updates: The number of initial updates that treat inner gradients as constants.
        norm: The statistics of normalization layers, as in :class:`MAML`. Pass None for models without batch
            normalization. The paper describes running statistics of each step, ``"per_step"``. Its code uses the
            statistics of the current set, also in evaluation, which is the default here. Use the same policy in
            training and evaluation, since adaptation may diverge otherwise.
        order: The order after the first-order updates.
        query_weights: The weights of the query losses after each inner step, numbers or 0-d tensors. Tensors may be
            learned. They replace the annealed weights. If a call takes a different number of steps, only its
            last loss counts.
        **arguments: Other arguments of :class:`MAML`, except ``inner``.

    Raises:
        ValueError: If a number of updates or ``lr`` is negative, or :class:`MAML` raises for another argument.

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
        """Count an update of the meta-parameters. This advances the schedules."""
        self.updates += 1

    def _order_now(self) -> int:
        """Return the order at this update."""
        is_first = self.first_order_updates and int(self.updates) < self.first_order_updates
        return 1 if is_first else self._order

    def _query_weights_now(self) -> QueryWeights | None:
        """Return the weights of the query losses at this update."""
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
    """Raise unless there is one weight for each step, and one weight is not zero."""
    if weights is None:
        return
    call = "MAMLPlusPlus(..., query_weights)"
    if not (is_list_or_tuple(weights) or is_a(weights, Tensor)) or len(weights) != steps:
        refuse(call, f"a sequence with a weight for each of {steps} steps", weights)
    numbers: list[Any] = [weight for weight in weights if not isinstance(weight, Tensor)]
    if not all(isinstance(weight, (int, float)) and 0 <= weight < math.inf for weight in numbers):
        raise ValueError(f"{call}: weights must be finite and at least 0, got {weights!r}.")
    if len(numbers) == steps and not any(numbers):
        raise ValueError(
            f"{call}: all weights are 0, so that nothing is learned. Give the last step a weight."
        )


def _rates(params: Params, lr: float) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(p.detach().new_full((), lr)) for name, p in params.items()}
