"""Inner problems differentiated at their minimum, not through steps: proximal terms, implicit derivatives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from metagrad.hypergrad import Nystrom
from metagrad.hypergrad.attach import attach, check_inverse
from metagrad.hypergrad.implicit import ImplicitMethod
from metagrad.meta.objective.norms import OF_STEPS
from metagrad.meta.objective.task_loss import Loss
from metagrad.meta.objective.tasks import Tasks, task_squares
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.rules import Params, Rule
from metagrad.optim.walk import hyperparameters_in

CALL = "MAML(..., hypergradient)"


class Proximal(NamedTuple):
    r"""The term :math:`\frac{\lambda}{2} |\phi - \theta|^2` of the loss of each task."""

    start: Params  # theta, what tasks start from
    weight: float | Tensor  # lambda

    def gradients(self, params: Params) -> Params:
        """Return its gradient."""
        return {name: self.weight * (p - self.start[name]) for name, p in params.items()}

    def losses(self, params: Params, num_axes: int) -> Tensor:
        """Return its value; of parameters whose first axis counts tasks, for each."""
        return self.weight / 2 * task_squares((p - self.start[name] for name, p in params.items()), num_axes)


def at_minimum(
    loss: Loss, params: Params, tasks: Tasks, proximal: Proximal | None, method: ImplicitMethod
) -> Params:
    """Give adapted parameters the derivative of the minimum of the support loss and its proximal term."""

    def losses(values: Params) -> Tensor:
        found, _ = loss(values, tasks.support_x, tasks.support_y)
        return found if proximal is None else found + proximal.losses(values, found.ndim)

    return attach(losses, params, method=method, call=CALL)


def check_proximal(weight: object) -> None:
    """Raise if the weight is neither None nor a number above 0."""
    if weight is None:
        return
    if isinstance(weight, Tensor):
        if weight.ndim:
            raise ValueError(f"MAML(..., proximal): expected one number, got shape {tuple(weight.shape)}.")
    elif not isinstance(weight, (int, float)) or not (weight > 0 and math.isfinite(weight)):
        raise ValueError(f"MAML(..., proximal): expected None or a number above 0, got {weight!r}.")


def check_hypergradient(
    method: object,
    rule: Rule | None,
    *,
    order: int,
    truncate: int | None,
    memory: object,
    query_weights: object,
    norm: object,
) -> None:
    """Refuse arguments that have no meaning with an implicit derivative."""
    if method is None:
        return
    check_inverse(CALL, method)
    if isinstance(method, Nystrom):
        raise ValueError(f"{CALL}: Nystrom approximates one Hessian, and tasks have one each. Take CG.")
    others = {
        "order": (
            order != 2,
            "the derivative of a minimum has no order to choose; FOMAML is order=1 without it",
        ),
        "truncate": (truncate is not None, "it differentiates through no step"),
        "memory": (memory != "full", "it keeps none of the steps, whatever their number"),
        "query_weights": (
            query_weights is not None,
            "losses before the last step are not those of a minimum",
        ),
        "norm": (norm in OF_STEPS, "a minimum has no statistics of each step"),
    }
    for name, (is_there, why) in others.items():
        if is_there:
            raise ValueError(f"MAML(..., hypergradient, {name}): {why}. Leave out one of the two.")
    if rule is not None:
        _check_rule(rule)


def _check_rule(rule: Rule) -> None:
    """Refuse hyper-parameters that are learned, and decay, which moves the minimum."""
    learned = [name for name, value in hyperparameters_in(rule) if value.requires_grad]
    if learned:
        raise ValueError(
            f"{CALL}: {', '.join(learned)} of the inner rule would be learned, and does not influence a minimum. "
            "Give numbers, or differentiate through the steps (leave hypergradient out)."
        )
    if any(is_used(value) for value in _decays(rule)):
        raise ValueError(
            f"{CALL}: weight_decay of the inner rule moves its steps to another minimum than that of the loss. Put "
            "the penalty into the loss."
        )


def _decays(rule: Any) -> Iterator[Any]:
    """Yield the weight decay of a rule, and of the rules that it is made of."""
    if isinstance(rule, (tuple, list)):
        for part in rule:
            yield from _decays(part)
    elif dataclasses.is_dataclass(rule) and not isinstance(rule, type):
        for field in dataclasses.fields(rule):
            value = getattr(rule, field.name)
            if field.name == "weight_decay":
                yield value
            else:
                yield from _decays(value)
