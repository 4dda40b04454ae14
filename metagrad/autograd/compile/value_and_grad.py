"""Compiled losses whose gradient is computed along with them, by one graph.

A meta-batch is judged in order to be learned from, so the gradient of its losses is wanted with them; one graph of
both is smaller than two, and nothing but the gradient is kept. Cotangents that do not weigh the losses alone pull
back through a graph of their own, which computes everything again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from metagrad.autograd.compile.compiled import Compiled, operand, pass_gate
from metagrad.autograd.compile.fallback import Fallback
from metagrad.autograd.recompute.checkpoint import vjp
from metagrad.autograd.unrolling.compiled_steps import checked_before, exchanged
from metagrad.core.capture import AutocastState
from metagrad.core.tree import is_differentiable


class Losses(Protocol):
    """A function of tensors; a named tuple, so that torch.compile knows it again by what it holds."""

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
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return _ValueAndGrad.apply(self, check, losses, *tensors)  # type: ignore[return-value]
        return tuple(self.values(check, losses, [operand(tensor) for tensor in tensors]))


class _ValueAndGrad(torch.autograd.Function):
    """Losses that keep their gradient."""

    @staticmethod
    def forward(ctx, compiled, check, losses, *tensors):
        ctx.set_materialize_grads(False)
        ctx.compiled, ctx.losses, ctx.autocast = compiled, losses, AutocastState()
        ctx.wanted = tuple(i for i, need in enumerate(ctx.needs_input_grad[3:]) if need)
        operands = [operand(tensor) for tensor in tensors]
        grads, results = compiled.gradient(check, losses, compiled.place, ctx.wanted, operands)
        ctx.save_for_backward(*tensors, *grads)
        ctx.mark_non_differentiable(*(r for r in results if not is_differentiable(r)))
        return tuple(results)

    @staticmethod
    def backward(ctx, *cotangents):
        needed = ctx.needs_input_grad[3:]
        tensors, grads = ctx.saved_tensors[: len(needed)], ctx.saved_tensors[len(needed) :]
        if torch.is_grad_enabled():
            return (None, None, None, *vjp(ctx.losses, tensors, needed, cotangents))
        place = ctx.compiled.place
        present = tuple(i for i, cotangent in enumerate(cotangents) if cotangent is not None)
        products = ctx.compiled.weighted(grads, cotangents[place]) if present == (place,) else None
        if products is None:
            with ctx.autocast.restored():
                products = _pulled(ctx, tensors, needed, cotangents, present)
        found = dict(zip(ctx.wanted, products, strict=True))
        return (None, None, None, *(found.get(i) for i in range(len(needed))))


def _pulled(ctx, tensors, needed, cotangents, present) -> Sequence[Tensor | None]:
    """Pull back cotangents that do not weigh the losses alone."""

    def compiled() -> Sequence[Tensor | None]:
        handed = [operand(tensor) for tensor in tensors], [operand(cotangents[i]) for i in present]
        return ctx.compiled.pull(checked_before, ctx.losses, ctx.wanted, present, *handed)

    def eager() -> Sequence[Tensor | None]:
        found = vjp(ctx.losses, tensors, needed, cotangents)
        return [found[i] for i in ctx.wanted]

    return ctx.compiled.fallback.attempt(compiled, eager)
