"""Losses of single examples, from a loss function that returns these losses or their mean."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from metagrad.core._torch import is_functorch_wrapped
from metagrad.core.dispatch import Dispatch
from metagrad.core.tree import LossFn, Tree

MEANS: frozenset[Callable[..., Tensor]] = frozenset(
    {
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.gaussian_nll_loss,
        F.poisson_nll_loss,
        F.soft_margin_loss,
    }
)
"""The losses of torch whose mean can be split into the losses of single examples."""

_CLASSES = (F.cross_entropy, F.nll_loss)
"""The losses that accept class weights and an index of ignored targets."""


def example_losses(loss_fn: LossFn, output: Tree, target: Tree, count: int, *, whole: bool | None) -> Tensor:
    """Return the losses of the examples of a batch, ``[count]`` or ``[count, ...]``.

    Args:
        loss_fn: Returns the losses of the examples, or their mean if it is a loss function of torch.
        output: Output of the model.
        target: Second argument of the loss.
        count: Number of examples.
        whole: True if the batch is a whole mini-batch. Ignored targets and class weights require True. With
            None, the losses are not rescaled.

    Raises:
        ValueError: The loss function returns something else.
    """
    with _Means(whole=whole) as means:
        value = loss_fn(output, target)
    losses = means.elements.get(id(value), (value,))[0]
    if not isinstance(losses, Tensor) or losses.ndim == 0 or len(losses) != count:
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"Training(loss_fn): expected one loss for each of {count} examples, or the mean that a loss of "
            f"torch.nn.functional takes of them, got {got}. Return the losses, as with reduction='none'. A penalty "
            "on the parameters belongs into the optimizer (weight_decay), or is added to each loss."
        )
    return losses


_signature = functools.cache(inspect.signature)


class _Means(Dispatch):
    """Records the terms of each mean that a loss of torch computes."""

    def __init__(self, *, whole: bool | None) -> None:
        super().__init__()
        self.whole = whole
        self.elements: dict[int, tuple[Tensor, Tensor]] = {}

    def called(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function. If it is a known mean, compute the mean from its terms."""
        if function not in MEANS:
            return function(*args, **kwargs)
        bound = _signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["reduction"] != "mean":
            return function(*args, **kwargs)
        bound.arguments["reduction"] = "none"
        terms = function(*bound.args, **bound.kwargs)
        if function in _CLASSES:
            terms = self._rescaled(terms, bound.arguments)
        mean = terms.mean()
        self.elements[id(mean)] = terms, mean  # the mean is kept alive, so that no other tensor gets its id
        return mean

    def _rescaled(self, terms: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Rescale terms if torch divides their sum by a number other than their count."""
        target, weight = arguments["target"], arguments["weight"]
        if self.whole is None or target.is_floating_point():
            return terms
        kept = target != arguments["ignore_index"]
        if weight is None and not is_functorch_wrapped(target) and bool(kept.all()):
            return terms
        if not self.whole:
            raise ValueError(
                "Training(loss_fn, micro_batch, group): the mean has class weights or ignored targets, so it is no "
                "mean of the means of parts. Return losses with reduction='none', or leave both arguments out."
            )
        total = kept.sum() if weight is None else (weight[target.where(kept, 0)] * kept).sum()
        return terms * (terms.numel() / total)
