"""Compiled losses whose gradient is computed along with them, by one graph.

A training step needs the gradient of the losses of a meta-batch with them; one graph of both is smaller than two, and
only the gradient is kept. If cotangents are more than weights of the losses, another graph computes their product,
from the start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from metagrad.autograd.compile.compiled import (
    Compiled,
    Fallback,
    checked_before,
    exchanged,
    operand,
    pass_gate,
)
from metagrad.autograd.recompute.checkpoint import Backward, attached, vjp
from metagrad.core.capture import AutocastState
from metagrad.core.tree import is_differentiable


class Losses(Protocol):
    """A function of tensors; a named tuple, which Dynamo's guards match by value."""

    def __call__(self, tensors: Sequence[Tensor], /) -> list[Tensor]:
        """Return losses, and what else there is."""
        ...


Weighted = Callable[[Sequence[Tensor], Tensor], "Sequence[Tensor] | None"]
"""The gradient of the sum of the losses, and a weight for each, to the gradient of the weighted sum, if that is all
that it takes."""


def _values(losses: Losses, tensors: list[Tensor]) -> list[Tensor]:
    pass_gate()
    return losses(tensors)


def _gradient(
    losses: Losses, place: int, wanted: tuple[int, ...], tensors: list[Tensor]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    pass_gate()

    def total(*chosen: Tensor) -> tuple[Tensor, list[Tensor]]:
        results = losses(exchanged(tensors, wanted, chosen))
        return results[place].sum(), results

    numbers = tuple(range(len(wanted)))
    with torch.enable_grad():
        return torch.func.grad(total, numbers, has_aux=True)(*(tensors[index] for index in wanted))


def _pull(
    losses: Losses,
    wanted: tuple[int, ...],
    present: tuple[int, ...],
    tensors: list[Tensor],
    cotangents: list[Tensor],
) -> tuple[Tensor, ...]:
    pass_gate()

    def outputs(*chosen: Tensor) -> tuple[Tensor, ...]:
        results = losses(exchanged(tensors, wanted, chosen))
        return tuple(results[index] for index in present)

    with torch.enable_grad():
        return torch.func.vjp(outputs, *(tensors[index] for index in wanted))[1](tuple(cotangents))


class ValueAndGrad:
    """Functions that return losses, compiled together with the gradient of the losses.

    Args:
        fallback: What to do where compiled code cannot be had.
        options: Of torch.compile.
        place: Where the losses stand among the results.
        weighted: What their cotangent makes of the gradient of their sum.
    """

    def __init__(
        self, fallback: Fallback, options: Mapping[str, Any], place: int, weighted: Weighted
    ) -> None:
        self.fallback, self.place, self.weighted = fallback, place, weighted
        self.values = Compiled(_values, options)
        self.gradient = Compiled(_gradient, options)
        self.pull = Compiled(_pull, options)

    def __call__(
        self, check: Callable[[], None], losses: Losses, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Call a function; ``check`` is called before it is compiled. The results are on the tape."""
        operands = [operand(tensor) for tensor in tensors]
        wanted = tuple(i for i, tensor in enumerate(tensors) if tensor.requires_grad)
        if not wanted or not torch.is_grad_enabled():
            return tuple(self.values(check, losses, operands))
        with torch.no_grad():
            grads, results = self.gradient(check, losses, self.place, wanted, operands)
        pull = functools.partial(self._pulled_back, losses, wanted, AutocastState())
        outputs = [result.detach().requires_grad_(is_differentiable(result)) for result in results]
        return tuple(attached(losses, tensors, outputs, kept=grads, pull=pull))

    def _pulled_back(
        self, losses: Losses, wanted: tuple[int, ...], autocast: AutocastState, backward: Backward
    ) -> Sequence[Tensor | None]:
        """Return the cotangents of the tensors: weighted gradients, or else products of a graph of their own."""
        tensors, grads, needed, cotangents = backward
        given = {i: cotangent for i, cotangent in enumerate(cotangents) if cotangent is not None}

        def placed(products: Sequence[Tensor]) -> Sequence[Tensor | None]:
            found = dict(zip(wanted, products, strict=True))
            return [found.get(i) for i in range(len(tensors))]

        def compiled() -> Sequence[Tensor | None]:
            handed = [operand(tensor) for tensor in tensors], [operand(c) for c in given.values()]
            return placed(self.pull(checked_before, losses, wanted, tuple(given), *handed))

        products = self.weighted(grads, given[self.place]) if list(given) == [self.place] else None
        if products is not None:
            return placed(products)
        with autocast.restored():
            return self.fallback.attempt(compiled, lambda: vjp(losses, tensors, needed, cotangents))
