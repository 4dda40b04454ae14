"""Loops of a compiled step that keep states, and walk back by the compiled vector-Jacobian product of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metagrad.autograd.compile.compiled import operand
from metagrad.autograd.recompute.checkpoint import vjp
from metagrad.autograd.unrolling.compiled_loop import Loop
from metagrad.autograd.unrolling.compiled_steps import Wanted
from metagrad.core.tree import Tree, is_differentiable


def swept(loop: Loop, stride: int) -> tuple[Tree, Tree]:
    """Run a loop that keeps every ``stride``-th state; its result is on the tape."""
    return loop.fill(_Swept.apply(Sweep(loop, stride), *loop.tensors))  # type: ignore[arg-type]


class _Swept(torch.autograd.Function):
    """A loop whose derivative sweeps back over its steps."""

    @staticmethod
    def forward(ctx, sweep, *tensors):
        ctx.set_materialize_grads(False)
        ctx.sweep = sweep
        outputs, kept = sweep.forward(tensors)
        ctx.versions = sweep.loop.versions()
        ctx.save_for_backward(*tensors, *kept)
        ctx.mark_non_differentiable(*(output for output in outputs if not is_differentiable(output)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *cotangents):
        loop, needed = ctx.sweep.loop, ctx.needs_input_grad[1:]
        ctx.versions.check(loop.kernels.call)
        tensors, kept = ctx.saved_tensors[: len(needed)], ctx.saved_tensors[len(needed) :]

        def eager() -> list[Tensor | None]:
            return vjp(loop.eager, tensors, needed, cotangents)

        def compiled() -> list[Tensor | None]:
            return ctx.sweep.backward(tensors, kept, needed, cotangents)

        if torch.is_grad_enabled():
            return (None, *eager())
        with loop.surroundings():
            return (None, *loop.kernels.attempt(compiled, eager))


class Sweep:
    """The walk forward and back over the steps of a loop, which keeps every ``stride``-th state.

    Args:
        loop: The loop.
        stride: How many steps lie between two states that are kept.
    """

    def __init__(self, loop: Loop, stride: int) -> None:
        self.loop = loop
        self.stride = stride

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the last state with the stacked aux, and what to keep."""
        width = self.loop.width
        state, shared = [operand(t) for t in tensors[:width]], [operand(t) for t in tensors[width:]]
        kept, collected = [], []
        for index in range(len(self.loop.times)):
            if index % self.stride == 0:
                kept.extend(state)
            state, aux = self.loop.advance(state, index, shared)
            collected.append(aux)
        return [*state, *map(torch.stack, zip(*collected, strict=True))], kept

    def backward(
        self,
        tensors: Sequence[Tensor],
        kept: Sequence[Tensor],
        needed: Sequence[bool],
        cotangents: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Return the cotangents of the loop's tensors."""
        width = self.loop.width
        flowing = tuple(i for i in range(width) if is_differentiable(tensors[i]))
        asked = tuple(i for i in range(len(tensors) - width) if needed[width + i])
        reports = {i: c for i, c in enumerate(cotangents) if i >= width and c is not None}
        wanted = Wanted(flowing, asked, (*flowing, *reports))
        shared = [operand(tensor) for tensor in tensors[width:]]
        current = [_materialized(cotangents[i], tensors[i]) for i in flowing]
        totals = [torch.zeros_like(shared[i]) for i in asked]
        states: list[list[Tensor]] = []
        pull = self.loop.pulling(wanted)
        for index in reversed(range(len(self.loop.times))):
            states = states or self._states(kept, index, shared)
            incoming = [*current, *(operand(c[index]) for c in reports.values())]
            current, totals = pull(states.pop(), index, shared, incoming, totals)
        found = dict(zip((*flowing, *(width + i for i in asked)), (*current, *totals), strict=True))
        return [found[i] if need else None for i, need in enumerate(needed)]

    def _states(self, kept: Sequence[Tensor], last: int, shared: list[Tensor]) -> list[list[Tensor]]:
        """Return the states from the one kept before step ``last`` to that of step ``last``."""
        first, width = last - last % self.stride, self.loop.width
        place = first // self.stride * width
        states = [list(kept[place : place + width])]
        for index in range(first, last):
            states.append(self.loop.advance(states[-1], index, shared)[0])
        return states


def _materialized(cotangent: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like).contiguous() if cotangent is None else operand(cotangent)
