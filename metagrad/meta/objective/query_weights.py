"""Weights of the query losses after each inner step: the multi-step loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

QueryWeights: TypeAlias = "Sequence[float | Tensor] | Tensor | Callable[[int], float | Tensor]"
"""A weight for each inner step: in a sequence, in a tensor ``[steps]``, or by the number of the step."""

_CALL = "MAML(..., query_weights)"


def check_query_weights(weights: object, steps: int) -> None:
    """Refuse what is not a weight for each of the steps, and weights that are all zero."""
    if weights is None or (callable(weights) and not isinstance(weights, Tensor)):
        return
    if isinstance(weights, Tensor):
        if weights.shape != (steps,):
            raise ValueError(f"{_CALL}: expected a tensor of shape ({steps},), got {tuple(weights.shape)}.")
        return
    if not isinstance(weights, Sequence) or isinstance(weights, str):
        raise TypeError(
            f"{_CALL}: expected a sequence or a tensor with a weight for each step, a function of the number of the "
            f"step, or None, got {type(weights).__name__}."
        )
    if len(weights) != steps:
        raise ValueError(f"{_CALL}: expected a weight for each of {steps} steps, got {len(weights)}.")
    for step, weight in enumerate(weights):
        _check_weight(weight, step)
    if steps:
        _check_any(weights)


def weights_at(weights: QueryWeights | None, steps: int) -> Sequence[float | Tensor] | Tensor | None:
    """Return the weights of so many steps; None where the loss after the last step alone counts.

    Weights that were listed are those of as many steps; with another number of steps the last alone counts.
    """
    if weights is None or not steps:
        return None
    if callable(weights) and not isinstance(weights, Tensor):
        weights = [_check_weight(weights(step), step) for step in range(steps)]
        _check_any(weights)
    return weights if len(weights) == steps else None


def count_before_the_last(weights: Sequence[float | Tensor] | Tensor | None) -> bool:
    """Say whether query losses before the last step count."""
    return weights is not None and (isinstance(weights, Tensor) or any(map(_counts, weights[:-1])))


def weighted(
    weights: Sequence[float | Tensor] | Tensor | None, path: Tensor | None, query_losses: Tensor
) -> Tensor:
    """Return the weighted sum of the query losses of each task, ``[tasks]``."""
    if weights is None:
        return query_losses
    each = [query_losses] if path is None else [*path.unbind(1), query_losses]
    terms = zip(weights[-len(each) :], each, strict=True)
    # A weight of 0 leaves out a loss that was not computed.
    return torch.stack([weight * loss for weight, loss in terms if _counts(weight)]).sum(0)


def _counts(weight: float | Tensor) -> bool:
    return isinstance(weight, Tensor) or weight != 0


def _check_any(weights: Sequence[float | Tensor]) -> None:
    if not any(map(_counts, weights)):
        raise ValueError(
            f"{_CALL}: all weights are 0, so that nothing is learned. Give the last step a weight."
        )


def _check_weight(weight: object, step: int) -> float | Tensor:
    if isinstance(weight, Tensor) and weight.ndim == 0:
        return weight
    if not isinstance(weight, (int, float)):
        shown = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise TypeError(f"{_CALL}: the weight of step {step} must be a number or a 0-d tensor, got {shown}.")
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"{_CALL}: the weight of step {step} must be finite and at least 0, got {weight}.")
    return weight
