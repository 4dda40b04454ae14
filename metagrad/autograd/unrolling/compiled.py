"""Loops of a compiled step: what is compiled, and the counterparts of the eager loops.

What changes from step to step or from call to call is a tensor: the state, the number of the step, the arguments. So
what was compiled once, a step and its vector-Jacobian product or all steps, serves any number of steps.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.autograd.compile.backend import Repeated
from metagrad.autograd.compile.compiled import (
    Compiled,
    CompileOptions,
    Fallback,
    Ran,
    UncompilableError,
    check_compilable,
    checked_before,
    exchanged,
    laid_out,
    operand,
    pass_gate,
)
from metagrad.autograd.compile.retained_graph import held, rooted
from metagrad.autograd.recompute.checkpoint import Backward, attached, vjp
from metagrad.autograd.recompute.surroundings import Reached, Surroundings
from metagrad.autograd.unrolling.schedule import Step, loop_keeping, plain
from metagrad.autograd.unrolling.steps import checked_pair, stack
from metagrad.core.budget import Mode
from metagrad.core.tree import (
    ATOMS,
    HOLE,
    Structure,
    Tree,
    TreeSpec,
    dissect,
    is_differentiable,
    leaf_names,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from metagrad.memory import allocator

Around = Callable[[int], contextlib.AbstractContextManager[object]]
"""The context to enter around the step of a number."""

_ONE_STEP, _SEVERAL_STEPS = range(1), range(5)
_FEW_CALLS = 48
_FEW_ELEMENTS = 2**18


def are_small(num_calls: int, num_elements: int) -> bool:
    """Say whether steps of so many torch functions on so many elements take less time than what is around them."""
    return num_calls <= _FEW_CALLS and num_elements <= _FEW_ELEMENTS


def are_few(steps: int) -> bool:
    """Say whether small steps are few enough to be one piece of compiled code."""
    return 0 < steps <= len(_SEVERAL_STEPS)


_ONE = dissect(torch.empty(0))[1]


class Layout(NamedTuple):
    """Where the tensors of a state and of the arguments stand in their trees."""

    state: Structure
    args: Structure


class Wanted(NamedTuple):
    """Which of the tensors of a step to differentiate with respect to, and which of its results flow back."""

    state: tuple[int, ...]
    shared: tuple[int, ...]
    results: tuple[int, ...]


def _flat_step(
    step: Step, layout: Layout, state: Sequence[Tensor], t: Tensor | int, shared: Sequence[Tensor]
) -> tuple[list[Tensor], Tree]:
    """Take one step, from the tensors of a state to those of the next."""
    result, aux = checked_pair(step(layout.state.fill(state), t, *layout.args.fill(shared)), -1)
    leaves, spec = tree_flatten(result)
    if spec != layout.state.spec:
        raise ValueError("the state that the step returns has another structure than the one it takes")
    new = [leaf for leaf, old in zip(leaves, layout.state.leaves, strict=True) if old is HOLE]
    for before, after in zip(state, new, strict=True):
        if not isinstance(after, Tensor) or (before.shape, before.dtype) != (after.shape, after.dtype):
            raise ValueError(
                "the state that the step returns has other shapes or dtypes than the one it takes"
            )
    return [laid_out(tensor) for tensor in new], aux


def _steps(
    step: Step, layout: Layout, ahead: range, state: Sequence[Tensor], t: Tensor, shared: Sequence[Tensor]
) -> tuple[list[Tensor], Tree]:
    """Take steps, counted from ``t`` on; return the tensors of the last state, and the stacked aux."""
    new, collected = list(state), []
    for number in ahead:
        new, aux = _flat_step(step, layout, new, t + number if number else t, shared)
        collected.append(aux)
    return new, stack(collected)


def _advance(
    step: Step, layout: Layout, ahead: range, state: list[Tensor], t: Tensor, shared: list[Tensor]
) -> tuple[list[Tensor], Tree]:
    """Take steps as one piece of compiled code."""
    pass_gate()
    return _steps(step, layout, ahead, state, t, shared)


def _pull(
    step: Step,
    layout: Layout,
    wanted: Wanted,
    state: list[Tensor],
    t: Tensor,
    shared: list[Tensor],
    cotangents: list[Tensor],
    totals: list[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute the vector-Jacobian product of one step: cotangents of the state, and totals for the arguments."""
    pass_gate()

    def results(states: list[Tensor], args: list[Tensor]) -> tuple[Tensor, ...]:
        now, given = exchanged(state, wanted.state, states), exchanged(shared, wanted.shared, args)
        new, aux = _steps(step, layout, _ONE_STEP, now, t, given)
        found = [*new, *(leaf for leaf in tree_leaves(aux) if isinstance(leaf, Tensor))]
        return tuple(found[index] for index in wanted.results)

    pull = torch.func.vjp(results, [state[i] for i in wanted.state], [shared[i] for i in wanted.shared])[1]
    of_state, of_args = pull(tuple(cotangents))
    return [laid_out(g) for g in of_state], [laid_out(a + b) for a, b in zip(totals, of_args, strict=True)]


class _Entered(NamedTuple):
    """The first call of compiled code by a loop: which code, how many steps, which of its tensors require grad."""

    ran: Ran
    ahead: range
    requires_grad: list[bool]


class CompiledStep(Fallback):
    """A step, its vector-Jacobian product and a loop of it as compiled code, for all loops of the step.

    Args:
        call: How warnings and errors name the loop.
        options: What is compiled, and how.

    Attributes:
        num_calls: How many torch functions a step calls, once that is known.
    """

    def __init__(self, call: str, options: CompileOptions) -> None:
        super().__init__(call)
        self.options = options
        self._advances: dict[range, Compiled] = {}
        self.pull = Compiled(_pull, options.options)
        self.num_calls: int | None = None
        self.reached = Reached()

    def advance(self, ahead: range) -> Compiled:
        """Return what takes steps at once; torch.compile limits how often one piece of code is compiled."""
        if ahead not in self._advances:
            self._advances[ahead] = Compiled(_advance, self.options.options)
        return self._advances[ahead]


class _Loop:
    """A loop with its step, its compiled code, and the structure that all steps have in common.

    Args:
        compiled: What has been compiled so far.
        step: As :func:`unroll_compiled` takes it, and likewise the rest.
        owner: What the step belongs to.
    """

    def __init__(
        self,
        compiled: CompiledStep,
        step: Step,
        state: Tree,
        args: tuple[Any, ...],
        times: range,
        *,
        owner: object,
        around: Around | None,
    ) -> None:
        self.compiled, self.step, self.owner, self.around = compiled, step, owner, around
        self.times = times
        (states, state_spec), (operands, args_spec) = tree_flatten(state), tree_flatten(args)
        tensors = [leaf for leaf in (*states, *operands) if isinstance(leaf, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
        # What changes is a tensor: ints in a state, which count, and floats among the arguments.
        counted = _with_tensors(states, int, torch.int64, device)
        scaled = _with_tensors(operands, float, torch.float64 if is_double else torch.float32, device)
        self.layout = Layout(_structure(counted, state_spec), _structure(scaled, args_spec))
        self.tensors = [leaf for leaf in (*counted, *scaled) if isinstance(leaf, Tensor)]
        self.width = sum(isinstance(leaf, Tensor) for leaf in counted)
        self.numbers = [torch.full((), t, dtype=torch.int64, device=device) for t in times]
        self._note_surroundings()
        self.aux: Structure | None = None
        self.entered: _Entered | None = None
        self._repeated: dict[range, Repeated] = {}

    def split(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of the state, and those of the arguments."""
        return list(tensors[: self.width]), list(tensors[self.width :])

    def fill(self, outputs: Sequence[Tensor]) -> tuple[Tree, Tree]:
        """Return the last state and aux as trees."""
        assert self.aux is not None
        state, aux = self.split(outputs)
        return self.layout.state.fill(state), self.aux.fill(aux)

    def _advance(
        self, state: list[Tensor], piece: range, shared: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Take the steps of consecutive indices; return the tensors of the state and of the stacked aux."""
        ahead, number = range(len(piece)), self.numbers[piece.start]
        repeated = self._repeated.setdefault(ahead, Repeated())
        around = contextlib.nullcontext() if self.around is None else self.around(self.times[piece.start])
        with around:
            return self.split(repeated(functools.partial(self._taken, ahead), state, [number], shared))

    def _taken(
        self, ahead: range, state: list[Tensor], number: list[Tensor], shared: list[Tensor]
    ) -> list[Tensor]:
        check = functools.partial(self._check, [*state, *shared])
        (new, aux), ran = self.compiled.advance(ahead).run(
            check, self.step, self.layout, ahead, state, *number, shared
        )
        if self.entered is None:
            self.entered = _Entered(ran, ahead, [tensor.requires_grad for tensor in (*state, *shared)])
        found, self.aux = ([aux], _ONE) if isinstance(aux, Tensor) else dissect(aux)
        return [*new, *found]

    def run(
        self,
        tensors: Sequence[Tensor],
        pieces: Sequence[range],
        stride: int | None = None,
        before: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Take all steps; return the last state with the stacked aux, and the states that are kept.

        Args:
            tensors: Of the first state and of the arguments.
            pieces: The indices of the steps, by pieces of compiled code.
            stride: The state before every so many pieces is kept; None keeps none.
            before: Applied to the tensors of a state before a piece.
        """
        state, shared = self.split(tensors)
        kept, collected = [], []
        for index, piece in enumerate(pieces):
            state = [before(tensor) for tensor in state]
            if stride is not None and index % stride == 0:
                kept.extend(state)
            state, aux = self._advance(state, piece, shared)
            collected.append(aux)
        return [*state, *map(_joined, zip(*collected, strict=True))], kept

    def _singles(self) -> list[range]:
        return [range(index, index + 1) for index in range(len(self.times))]

    def _several(self) -> list[range]:
        """Take several small steps at once, unless somebody looks at each of them."""
        singles, width = self._singles(), len(_SEVERAL_STEPS)
        if self.around is not None or len(singles) < width or not self._is_small():
            return singles
        whole = len(singles) - len(singles) % width
        return [*(range(first, first + width) for first in range(0, whole, width)), *singles[whole:]]

    def _is_small(self) -> bool:
        num_elements = sum(tensor.numel() for tensor in self.tensors)
        if not are_small(0, num_elements):
            return False
        if self.compiled.num_calls is None:
            self._check(self.tensors)
        return are_small(self.compiled.num_calls or 0, num_elements)

    def pull(
        self,
        stride: int,
        tensors: Sequence[Tensor],
        kept: Sequence[Tensor],
        needed: Sequence[bool],
        cotangents: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Walk back over the steps by compiled vector-Jacobian products; return the cotangents of the tensors."""
        first, shared = self.split([operand(tensor) for tensor in tensors])
        flowing = tuple(i for i, tensor in enumerate(first) if is_differentiable(tensor))
        asked = tuple(i for i in range(len(shared)) if needed[self.width + i])
        reports = {i: c for i, c in enumerate(cotangents) if i >= self.width and c is not None}
        wanted = Wanted(flowing, asked, (*flowing, *reports))
        current = [_materialized(cotangents[i], first[i]) for i in flowing]
        totals = [torch.zeros_like(shared[i]) for i in asked]
        states: list[list[Tensor]] = []
        repeated = Repeated()

        def vjp(state: list[Tensor], number: list[Tensor], *others: list[Tensor]) -> list[Tensor]:
            of_state, totals = self.compiled.pull(
                checked_before, self.step, self.layout, wanted, state, *number, *others
            )
            return [*of_state, *totals]

        for index in reversed(range(len(self.times))):
            states = states or self._states(kept, stride, index, shared)
            incoming = [*current, *(operand(c[index : index + 1]) for c in reports.values())]
            results = repeated(vjp, states.pop(), [self.numbers[index]], shared, incoming, totals)
            current, totals = results[: len(flowing)], results[len(flowing) :]
        found = dict(zip((*flowing, *(self.width + i for i in asked)), (*current, *totals), strict=True))
        return [found[i] if need else None for i, need in enumerate(needed)]

    def _states(
        self, kept: Sequence[Tensor], stride: int, last: int, shared: list[Tensor]
    ) -> list[list[Tensor]]:
        """Return the states from the one kept before step ``last`` to that of step ``last``."""
        first = last - last % stride
        place = first // stride * self.width
        states = [list(kept[place : place + self.width])]
        for single in self._singles()[first:last]:
            states.append(self._advance(states[-1], single, shared)[0])
        return states

    def _check(self, tensors: Sequence[Tensor]) -> None:
        """Run the step without compiling it; refuse what compiling would lose."""
        state, shared = self.split([operand(tensor, True) for tensor in tensors])
        args = self.layout.args.fill(shared)
        handed = (self.layout.state.fill(state), self.numbers[0], *args)
        checked = check_compilable(self.step, handed, self.compiled.call)
        _refuse_changed_constants(self.layout.state, checked.returned)
        if dissect(args)[1] != self.layout.args:
            raise UncompilableError(
                "a list or dict among the arguments is changed, where only values may flow"
            )
        self.compiled.num_calls = max(checked.num_calls, self.compiled.num_calls or 0)
        self.compiled.reached.note(self.owner, self.step, checked.read)
        self._note_surroundings()

    def restored(self, tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
        """Set up what was around the loop when it was run, within a ``with`` block, for these tensors or others."""
        if self.entered is None:
            return self.surroundings.restored()
        ran, ahead, flags = self.entered
        state, shared = self.split(
            [operand(tensor, flag) for tensor, flag in zip(tensors, flags, strict=True)]
        )
        with torch.enable_grad():
            state = [rooted(tensor) if tensor.requires_grad else tensor for tensor in state]
        return ran.restored(self.surroundings, self.step, self.layout, ahead, state, self.numbers[0], shared)

    def _note_surroundings(self) -> None:
        modules = self.compiled.reached.modules(self.owner, self.step)
        self.surroundings = Surroundings(self.compiled.call, "step", modules)

    def eager(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the loop again without compiling it: the last state, and the stacked aux."""
        numbers = dict(zip(self.times, self.numbers, strict=True))
        state, shared = self.split(tensors)
        with self.restored(tensors):
            result = plain(
                lambda state, t, *args: self.step(state, numbers[t], *args),
                self.layout.state.fill(state),
                self.layout.args.fill(shared),
                self.times,
            )
        return dissect(result)[0]

    def as_one_graph(self) -> tuple[Tree, Tree]:
        """Run the loop as one piece of compiled code."""
        return self._keeping_graphs([range(len(self.times))])

    def keeping_graphs(self) -> tuple[Tree, Tree]:
        """Run the loop with the graphs that torch.compile makes for the derivatives of steps."""
        return self._keeping_graphs(self._several())

    def _keeping_graphs(self, pieces: Sequence[range]) -> tuple[Tree, Tree]:
        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            return self.run(tensors, pieces, before=rooted)[0]

        return self.fill(held(run, self.eager, self.tensors))

    def keeping_states(self, stride: int) -> tuple[Tree, Tree]:
        """Run the loop with every ``stride``-th state, and walk back over its steps."""
        allocator.advise(self.compiled.call, self.tensors)
        with torch.no_grad():
            outputs, kept = self.run([operand(tensor) for tensor in self.tensors], self._singles(), stride)
        if self.compiled.reached.read(self.owner) is None:
            self._check(self.tensors)
        self.surroundings.note_read(self.compiled.reached.read(self.owner) or ())

        def pull(backward: Backward) -> Sequence[Tensor | None]:
            with self.restored(backward.tensors):
                return self.compiled.attempt(
                    lambda: self.pull(stride, *backward),
                    lambda: vjp(self.eager, backward.tensors, backward.needed, backward.cotangents),
                )

        differentiable = [output.requires_grad_(is_differentiable(output)) for output in outputs]
        return self.fill(attached(self.eager, self.tensors, differentiable, kept=kept, pull=pull))

    def without_graphs(self) -> tuple[Tree, Tree]:
        """Run the loop without graphs."""
        return self.fill(self.run([operand(tensor) for tensor in self.tensors], self._several())[0])


def _with_tensors(leaves: list, kind: type, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """Make tensors of the numbers of a kind."""
    return [
        torch.full((), leaf, dtype=dtype, device=device) if type(leaf) is kind else leaf for leaf in leaves
    ]


def _structure(leaves: list, spec: TreeSpec) -> Structure:
    return Structure([HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _refuse_changed_constants(state: Structure, returned: Structure) -> None:
    """Refuse constants of a state that a step changes: from step to step, tensors alone flow."""
    for place, (old, new) in enumerate(zip(state.leaves, returned.leaves, strict=False)):
        if old is HOLE or new is old or (type(old) is type(new) and type(old) in ATOMS and new == old):
            continue
        name = leaf_names(tree_unflatten(range(len(state.leaves)), state.spec), "state")[place]
        raise UncompilableError(
            f"{name}, a constant of type {type(old).__name__}, is another after a step, where only tensors may flow "
            "(make it one; a tree is made of dicts, lists and tuples)"
        )


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)  # type: ignore[arg-type]


def _materialized(cotangent: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like).contiguous() if cotangent is None else operand(cotangent)


def unroll_compiled(
    compiled: CompiledStep,
    step: Step,
    state: Tree,
    args: tuple[Any, ...],
    times: range,
    memory: Mode | Literal["whole"] | int,
    *,
    owner: object,
    around: Around | None = None,
) -> tuple[Tree, Tree]:
    """Run a loop of a compiled step; its result is on the tape where grad mode is on.

    Args:
        compiled: What has been compiled so far.
        step: As :func:`metagrad.unroll` takes it; ``t``, the ints of the state and the floats of the arguments
            reach it as 0-d tensors.
        state: A tree of tensors and constants.
        args: Trees of tensors and constants.
        times: The numbers of the steps.
        memory: What is kept, see :func:`metagrad.unroll`; "whole" is one graph for all steps.
        owner: The object that the step belongs to; what is found out about the step is kept for its lifetime.
        around: Returns the context to enter around the step of a number, each of which is then called by itself.
    """
    make = functools.partial(_Loop, compiled, owner=owner, around=around)
    loops = {
        "whole": lambda *loop: make(*loop).as_one_graph(),
        "full": lambda *loop: make(*loop).keeping_graphs(),
        "step": lambda *loop: make(*loop).keeping_states(1),
        "sqrt": lambda *loop: make(*loop).keeping_states(max(math.isqrt(len(loop[-1])), 1)),
    }
    if not torch.is_grad_enabled():
        return make(step, state, args, times).without_graphs()
    return loop_keeping(memory, (state, args), loops)(step, state, args, times)
