"""Compiled losses whose gradient is computed along with them, by one graph.

A training step needs the gradient of the losses of a meta-batch with them; one graph of both is smaller than two, and
only the gradient is kept. If cotangents are more than weights of the losses, another graph computes their product,
from the start.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from metagrad.autograd.compile.compiled import (
    Compiled,
    Fallback,
    Ran,
    checked_before,
    exchanged,
    operand,
    pass_gate,
)
from metagrad.autograd.recompute.checkpoint import Backward, Look, attached, vjp
from metagrad.autograd.recompute.surroundings import Reached, Surroundings
from metagrad.core import _torch
from metagrad.core.tree import is_differentiable


class Losses(Protocol):
    """A function of tensors; a named tuple, which Dynamo's guards match by value."""

    def __call__(self, tensors: Sequence[Tensor], /) -> list[Tensor]:
        """Return losses, and what else there is."""
        ...


Weighted = Callable[[Sequence[Tensor], Mapping[int, Tensor]], "Sequence[Tensor] | None"]
"""Weight gradients: from the gradient of the sum of the losses, and the cotangents of results by position, to the
cotangents of the tensors; the same object where all weights are 1, None where the gradient does not give them."""


def _values(losses: Losses, tensors: list[Tensor]) -> list[Tensor]:
    pass_gate()
    return losses(tensors)


def _gradient(losses: Losses, place: int, wanted: tuple[int, ...], tensors: list[Tensor]) -> list[Tensor]:
    """Return the gradient of the sum of the losses, the results, and a sum, finite only if all these are."""
    pass_gate()

    def total(*chosen: Tensor) -> tuple[Tensor, list[Tensor]]:
        results = losses(exchanged(tensors, wanted, chosen))
        return results[place].sum(), results

    numbers = tuple(range(len(wanted)))
    with torch.enable_grad():
        grads, results = torch.func.grad(total, numbers, has_aux=True)(*(tensors[index] for index in wanted))
    found = [*grads, *results]
    return [*found, _sum([tensor.detach() for tensor in found if is_differentiable(tensor)])]


def _sum(tensors: list[Tensor]) -> Tensor:
    """Add up the entries of tensors."""
    real = [tensor.abs() if tensor.is_complex() else tensor for tensor in tensors]
    return torch.stack([tensor.sum().to(tensors[-1].device, torch.float32) for tensor in real]).sum()


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


class _Made(NamedTuple):
    """A call whose results are on the tape.

    Attributes:
        losses: The function.
        place: Where the losses stand among the results.
        wanted: Which of the tensors to differentiate with respect to.
        surroundings: Of the call.
        ran: The code that was called.
        look: As :meth:`ValueAndGrad.kept` takes it.
        are_finite: Whether the results and the gradient of the losses are known to be finite.
        are_own: Whether the gradient is known to share memory with nothing else.
    """

    losses: Losses
    place: int
    wanted: tuple[int, ...]
    surroundings: Surroundings
    ran: Ran
    look: Look | None = None
    are_finite: bool = False
    are_own: bool = False

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the function once more, without compiling it."""
        with self.restored(tensors):
            return self.losses(tensors)

    def restored(self, tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
        """Set up the surroundings of the call, within a ``with`` block."""
        operands = list(map(operand, tensors))
        return self.ran.restored(self.surroundings, self.losses, self.place, self.wanted, operands)


class ValueAndGrad:
    """Functions that return losses, compiled together with the gradient of the losses.

    Args:
        fallback: What to do where compiled code cannot be had.
        options: Of torch.compile.
        place: Where the losses stand among the results.
        weighted: Weights the gradient of their sum by cotangents.
        compiles_products: Whether a product with cotangents that are no weights is compiled, too.
    """

    def __init__(
        self,
        fallback: Fallback,
        options: Mapping[str, Any],
        place: int,
        weighted: Weighted,
        *,
        compiles_products: bool = True,
    ) -> None:
        self.fallback, self.place, self.weighted = fallback, place, weighted
        self.compiles_products = compiles_products
        self.values = Compiled(_values, options)
        self.gradient = Compiled(_gradient, options)
        self.pull = Compiled(_pull, options)
        self._reached = Reached()

    def __call__(
        self, check: Callable[[], list[Tensor]], losses: Losses, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Call a function, whose results are on the tape.

        Args:
            check: Is called before it is compiled, and returns the tensors that it reads and is not handed.
            losses: The function.
            tensors: What it is of.
        """

        def checked() -> None:
            self._reached.note(self, losses, check())

        operands = [operand(tensor) for tensor in tensors]
        wanted = tuple(i for i, tensor in enumerate(tensors) if tensor.requires_grad)
        if not wanted or not torch.is_grad_enabled():
            return tuple(self.values(checked, losses, operands))
        with torch.no_grad():
            found, ran = self.gradient.run(checked, losses, self.place, wanted, operands)
        surroundings = self._surroundings(losses)
        surroundings.note_read([*surroundings.modules.buffers(), *(self._reached.read(self) or ())])
        return self._attached(tensors, _Made(losses, self.place, wanted, surroundings, ran), found)

    def kept(
        self, losses: Losses, tensors: Sequence[Tensor], look: Look
    ) -> tuple[tuple[Tensor, ...], bool] | None:
        """Call a function in grad mode, if that is a call of code that was compiled before; None otherwise.

        Args:
            losses: The function.
            tensors: What it is of.
            look: Is handed the cotangents of the results and of the tensors, and returns the latter; not where they
                are weighted gradients that are finite.

        Returns:
            The results, and whether they and the gradient are known to be finite.
        """
        operands = [operand(tensor) for tensor in tensors]
        wanted = tuple(i for i, tensor in enumerate(tensors) if tensor.requires_grad)
        with torch.no_grad():
            args = losses, self.place, wanted, operands
            kept = self.gradient.kept(*args)
            if kept is None:
                return None
            found = kept.graph(operands)  # a list of the tensors that are among the arguments to a list
        are_finite = math.isfinite(found[-1].item())
        surroundings, ran = self._surroundings(losses), Ran(self.gradient, kept.code, grad_mode=False)
        made = _Made(losses, self.place, wanted, surroundings, ran, look, are_finite, not kept.shares)
        return self._attached(tensors, made, found), are_finite

    def _surroundings(self, losses: Losses) -> Surroundings:
        modules = self._reached.modules(self, losses)
        return Surroundings(self.fallback.call, "model or the loss", modules)

    def _attached(
        self,
        tensors: Sequence[Tensor],
        made: _Made,
        found: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Put the results on the tape, of what :func:`_gradient` returns."""
        grads, results = found[: len(made.wanted)], found[len(made.wanted) : -1]
        pull = functools.partial(self._pulled_back, made)
        outputs = [result.detach().requires_grad_(is_differentiable(result)) for result in results]
        return tuple(attached(made.again, tensors, outputs, kept=grads, pull=pull, look=made.look))

    def _pulled_back(self, made: _Made, backward: Backward) -> Sequence[Tensor | None]:
        """Return the cotangents of the tensors: weighted gradients, or else products of a graph of their own."""
        tensors, grads, needed, cotangents = backward
        given = {i: cotangent for i, cotangent in enumerate(cotangents) if cotangent is not None}

        def placed(products: Sequence[Tensor]) -> Sequence[Tensor | None]:
            found = dict(zip(made.wanted, products, strict=True))
            return [found.get(i) for i in range(len(tensors))]

        def compiled() -> Sequence[Tensor | None]:
            handed = [operand(tensor) for tensor in tensors], [operand(c) for c in given.values()]
            with made.restored(tensors):
                return placed(self.pull(checked_before, made.losses, made.wanted, tuple(given), *handed))

        products = self.weighted(grads, given)
        if products is not None:
            if products is grads and not (made.are_own and not _torch.keeps_graph()):
                products = [gradient.clone() for gradient in grads]
            found = placed(products)
            if made.are_finite:  # products of them may overflow: that is for whoever scaled the loss to see
                return found
        else:
            eager = functools.partial(vjp, made.again, tensors, needed, cotangents)
            found = self.fallback.attempt(compiled, eager) if self.compiles_products else eager()
        return found if made.look is None else made.look(cotangents, found)
