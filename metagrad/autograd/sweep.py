"""A loop as one operation: forward without graphs, and back step by step, the last first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from metagrad._tree import Structure, Tree, dissect, tree_flatten
from metagrad.autograd.recompute import apply_visibly, vjp
from metagrad.autograd.replay import Call, Recording, record
from metagrad.autograd.steps import StateCheck, checked_pair, stack


def unroll_recomputed(
    step: Callable[..., tuple[Tree, Tree]], state: Tree, args: tuple, times: range
) -> tuple[Tree, Tree]:
    """Run without graphs, and put the whole loop on the tape as one operation."""
    check = StateCheck(state)
    sweep = Sweep(state, args, len(times))
    structure = None
    for t in times:
        recording = record(step, (state, t, *args), {}, name=f"unroll(step, ...) at t={t}")
        state, aux = checked_pair(recording.structure.fill(recording.outputs), t)
        check(state, t)
        structure = sweep.append(recording, state, aux)
    assert structure is not None
    return sweep.attach(structure)


class Sweep:
    """The recorded steps of one loop.

    A state is known by its tensors; the tensors of step ``t`` are those of its state, those of ``args``, and
    the free tensors that the step was seen to read.
    """

    def __init__(self, state: Tree, args: tuple, steps: int) -> None:
        self.initial, _ = dissect(state)
        self.shared, _ = dissect(args)
        self.width = len(self.initial)
        self.num_args = len(self.shared)
        self.num_steps = steps
        self.calls: list[Call] = []
        self.free: list[list[int]] = []
        self.states: list[list[Tensor]] = []
        self.aux: list[Tensor] = []
        self._free_slots: dict[int, int] = {}

    def append(self, recording: Recording, state: Tree, aux: Tree) -> tuple[Structure, Structure]:
        """Add a step; return the structures of its state and aux."""
        self.calls.append(recording.call)
        self.free.append([self._slot(tensor) for tensor in recording.call.reads.differentiable])
        state_tensors, state_structure = dissect(state)
        aux_tensors, aux_structure = dissect(aux)
        if any(leaf is not None for leaf in tree_flatten(aux)[0] if not isinstance(leaf, Tensor)):
            stack([aux])
        self.states.append(state_tensors)
        self._write_aux(aux_tensors)
        return state_structure, aux_structure

    def _slot(self, tensor: Tensor) -> int:
        if id(tensor) not in self._free_slots:
            self._free_slots[id(tensor)] = len(self.shared)
            self.shared.append(tensor)
        return self._free_slots[id(tensor)]

    def _write_aux(self, tensors: list[Tensor]) -> None:
        """Keep aux in one buffer for all steps, so that what a step leaves behind is its state alone."""
        t = len(self.calls) - 1
        if t == 0:
            self.aux = [
                a.new_empty((self.num_steps, *a.shape)).requires_grad_(a.requires_grad) for a in tensors
            ]
        if [tuple(a.shape) for a in tensors] != [tuple(b.shape[1:]) for b in self.aux]:
            raise ValueError("unroll(step, ...): aux must have the same structure and shapes at every step.")
        with torch.no_grad():
            for buffer, value in zip(self.aux, tensors, strict=True):
                buffer[t] = value

    def attach(self, structure: tuple[Structure, Structure]) -> tuple[Tree, Tree]:
        """Put the loop on the tape, as a function of its first state, its arguments and its free tensors."""
        results = apply_visibly(_Unrolled, (self,), self.initial + self.shared)
        end = self.width * self.num_steps
        return structure[0].fill(results[end - self.width : end]), structure[1].fill(results[end:])

    def release(self) -> None:
        """Forget the tensors, which the tape keeps from now on."""
        self.initial, self.shared, self.states, self.aux = [], [], [], []

    def operands(self, t: int, states: list[Sequence[Tensor]], shared: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of step ``t``, in the order in which it was recorded."""
        return [*states[t], *shared[: self.num_args], *(shared[slot] for slot in self.free[t])]


class _Unrolled(torch.autograd.Function):
    """A loop whose derivative sweeps back over its steps, the last first, rebuilding one step at a time.

    All states are outputs: saved outputs stay on the tape, which is what makes the sweep differentiable.
    """

    @staticmethod
    def forward(ctx, sweep, *tensors):
        ctx.set_materialize_grads(False)
        ctx.sweep = sweep
        outputs = [tensor for state in sweep.states for tensor in state] + sweep.aux
        results = [output.detach() for output in outputs]
        ctx.mark_non_differentiable(
            *(r for r, output in zip(results, outputs, strict=True) if not output.requires_grad)
        )
        kept = results[: sweep.width * (sweep.num_steps - 1)]
        ctx.needed = [output.requires_grad for output in outputs[: len(kept)]]
        ctx.save_for_backward(*tensors, *kept)
        sweep.release()
        return tuple(results)

    @staticmethod
    def backward(ctx, *cotangents):
        sweep = ctx.sweep
        width, saved = sweep.width, ctx.saved_tensors
        num_inputs = len(ctx.needs_input_grad) - 1
        inputs, kept = saved[:num_inputs], saved[num_inputs:]
        states = [inputs[:width], *_rows(kept, sweep.num_steps - 1)]
        needed = [ctx.needs_input_grad[1 : 1 + width], *_rows(ctx.needed, sweep.num_steps - 1)]
        incoming = _rows(cotangents[: width * sweep.num_steps], sweep.num_steps)
        aux = cotangents[width * sweep.num_steps :]
        shared, needs_shared = inputs[width:], ctx.needs_input_grad[1 + width :]
        totals: list[Tensor | None] = [None] * len(shared)
        current: Sequence[Tensor | None] = [None] * width
        for t in reversed(range(sweep.num_steps)):
            slots = [*range(sweep.num_args), *sweep.free[t]]
            grads = vjp(
                sweep.calls[t],
                sweep.operands(t, states, shared),
                [*needed[t], *(needs_shared[slot] for slot in slots)],
                [*_add(current, incoming[t]), *(None if a is None else a[t] for a in aux)],
            )
            current = grads[:width]
            for slot, gradient in zip(slots, grads[width:], strict=True):
                totals[slot] = plus(totals[slot], gradient)
        return (None, *current, *totals)


def _rows(flat: Sequence, num_rows: int) -> list[Sequence]:
    width = len(flat) // max(num_rows, 1)
    return [flat[row * width : (row + 1) * width] for row in range(num_rows)]


def _add(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [plus(a, b) for a, b in zip(left, right, strict=True)]


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Add two cotangents, of which None is zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
