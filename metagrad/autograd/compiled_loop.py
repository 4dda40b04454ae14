"""Loops of a compiled step: one graph for a step, one for its vector-Jacobian product, as often as there are steps.

The counterparts of the loops in :mod:`metagrad.autograd.schedule`, which combines them into schedules. What changes
from step to step or from call to call is a tensor: the state, the number of the step, the arguments; so what was
compiled once serves any number of steps. A derivative that is to be differentiated again is taken of the loop as it
runs without being compiled, since torch refuses to differentiate compiled graphs twice.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor

from metagrad._tree import (
    HOLE,
    Structure,
    Tree,
    TreeSpec,
    dissect,
    is_differentiable,
    tree_flatten,
    tree_leaves,
)
from metagrad.autograd.ambient import AutocastState
from metagrad.autograd.budget import Mode
from metagrad.autograd.compiled import (
    Compiled,
    Fallback,
    check_compilable,
    check_versions,
    operand,
    pass_gate,
)
from metagrad.autograd.recompute import TensorFunction, vjp
from metagrad.autograd.schedule import Step, plain, unroll_by
from metagrad.autograd.steps import checked_pair
from metagrad.autograd.sweep import plus

Around = Callable[[int], contextlib.AbstractContextManager]
"""What to enter around the step of a number."""


class Layout(NamedTuple):
    """Where the tensors of a state and of the arguments stand in their trees."""

    state: Structure
    args: Structure


_ONE = dissect(torch.empty(0))[1]


def _flat_step(
    step: Step, layout: Layout, state: Sequence[Tensor], t: Tensor | int, shared: Sequence[Tensor]
) -> tuple[list[Tensor], Tree]:
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
    return [_laid_out(tensor) for tensor in new], aux


def _laid_out(tensor: Tensor) -> Tensor:
    """Return a tensor in the one layout of states, or the step would be compiled once more for what it returns."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _advance(
    step: Step, layout: Layout, state: list[Tensor], t: Tensor, shared: list[Tensor]
) -> tuple[list[Tensor], Tree]:
    """Take one step."""
    pass_gate()
    return _flat_step(step, layout, state, t, shared)


def _pull(
    step: Step,
    layout: Layout,
    wanted: tuple[int, ...],
    present: tuple[int, ...],
    state: list[Tensor],
    t: Tensor,
    shared: list[Tensor],
    cotangents: list[Tensor],
    totals: list[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Pull cotangents back through one step; return those of the state, and the totals of those of the arguments."""
    pass_gate()
    tensors = [*state, *shared]

    def outputs(*chosen: Tensor) -> tuple[Tensor, ...]:
        inputs = list(tensors)
        for index, tensor in zip(wanted, chosen, strict=True):
            inputs[index] = tensor
        new, aux = _flat_step(step, layout, inputs[: len(state)], t, inputs[len(state) :])
        results = [*new, *(leaf for leaf in tree_leaves(aux) if isinstance(leaf, Tensor))]
        return tuple(results[index] for index in present)

    pull = torch.func.vjp(outputs, *(tensors[index] for index in wanted))[1]
    grads = pull(tuple(cotangents))
    width = len(wanted) - len(totals)
    return [_laid_out(g) for g in grads[:width]], [
        _laid_out(a + b) for a, b in zip(totals, grads[width:], strict=True)
    ]


def _whole(
    step: Step, layout: Layout, times: range, state: list[Tensor], shared: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], Tree]:
    """Take all steps, whose numbers are constants."""
    pass_gate()
    collected, aux = [], None
    for t in times:
        state, aux = _flat_step(step, layout, state, t, shared)
        collected.append([leaf for leaf in tree_leaves(aux) if isinstance(leaf, Tensor)])
    return state, [torch.stack(column) for column in zip(*collected, strict=True)], aux


class Kernels(Fallback):
    """The compiled step and step-VJP of a loop; kept, they serve loops of the same step.

    Args:
        call: How warnings and errors name the loop.
        options: Of ``torch.compile``.
    """

    def __init__(self, call: str, options: Mapping[str, Any]) -> None:
        super().__init__(call)
        self.advance = Compiled(_advance, options)
        self.pull = Compiled(_pull, options)
        self.whole = Compiled(_whole, options)
        self.constants: list = []


class Loop:
    """A loop with its step, its kernels and what does not change from step to step but the tensors."""

    def __init__(
        self, kernels: Kernels, step: Step, state: Tree, args: tuple, times: range, around: Around
    ) -> None:
        self.kernels = kernels
        self.step = step
        (states, state_spec), (operands, args_spec) = tree_flatten(state), tree_flatten(args)
        tensors = [leaf for leaf in (*states, *operands) if isinstance(leaf, Tensor)]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
        counted = self._tensors(states, int, torch.int64)
        scaled = self._tensors(operands, float, torch.float64 if is_double else torch.float32)
        self.layout = Layout(_structure(counted, state_spec), _structure(scaled, args_spec))
        self.tensors = [leaf for leaf in (*counted, *scaled) if isinstance(leaf, Tensor)]
        self.width = sum(isinstance(leaf, Tensor) for leaf in counted)
        self.times = times
        self.around = around
        self.autocast = AutocastState()
        self.aux: Structure | None = None

    def _tensors(self, leaves: list, kind: type, dtype: torch.dtype) -> list:
        """Make tensors of the numbers that change: ints in a state, which count, and floats among the arguments."""
        return [
            torch.full((), leaf, dtype=dtype, device=self.device) if type(leaf) is kind else leaf
            for leaf in leaves
        ]

    def advance(
        self, state: Sequence[Tensor], t: int, shared: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Take step ``t`` by compiled code; return the tensors of the state and of aux."""
        number = self._number(t)
        check = functools.partial(self._check, state, number, shared)
        with self.around(t):
            new, aux = self.kernels.advance(check, self.step, self.layout, list(state), number, list(shared))
        if isinstance(aux, Tensor):
            tensors, self.aux = [aux], _ONE
        else:
            tensors, self.aux = dissect(aux)
        return new, tensors

    def _check(self, state: Sequence[Tensor], number: Tensor, shared: Sequence[Tensor]) -> None:
        handed = [operand(tensor, True) for tensor in (*state, *shared)]
        args = (
            self.layout.state.fill(handed[: self.width]),
            number,
            *self.layout.args.fill(handed[self.width :]),
        )
        self.kernels.constants = check_compilable(self.step, args, self.kernels.call)

    def pull(
        self,
        wanted: tuple[int, ...],
        present: tuple[int, ...],
        state: Sequence[Tensor],
        t: int,
        *tensors: list,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Pull cotangents back through step ``t`` by compiled code."""
        shared, cotangents, totals = tensors
        return self.kernels.pull(
            checked_before,
            self.step,
            self.layout,
            wanted,
            present,
            list(state),
            self._number(t),
            shared,
            cotangents,
            totals,
        )

    def eager(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the loop without compiling it: the last state, and the stacked aux."""

        def step(state: Tree, t: int, *args: Tree) -> tuple[Tree, Tree]:
            return self.step(state, self._number(t), *args)

        state = self.layout.state.fill(tensors[: self.width])
        state, aux = plain(step, state, self.layout.args.fill(tensors[self.width :]), self.times)
        return dissect((state, aux))[0]

    def whole(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the loop as one piece of compiled code."""
        state, shared = list(tensors[: self.width]), list(tensors[self.width :])
        check = functools.partial(self._check, state, self._number(self.times[0]), shared)
        state, stacked, aux = self.kernels.whole(check, self.step, self.layout, self.times, state, shared)
        self.aux = dissect(aux)[1]
        return [*state, *stacked]

    def _number(self, t: int) -> Tensor:
        return torch.full((), t, dtype=torch.int64, device=self.device)

    def fill(self, outputs: Sequence[Tensor]) -> tuple[Tree, Tree]:
        """Return the last state and aux as trees."""
        assert self.aux is not None
        return self.layout.state.fill(outputs[: self.width]), self.aux.fill(outputs[self.width :])


def _structure(leaves: list, spec: TreeSpec) -> Structure:
    return Structure([HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def checked_before() -> None:
    """The VJP of a step is compiled after the step, which has been checked."""


def held(run: TensorFunction, eager: TensorFunction, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Call a function of compiled pieces, keeping their graphs, so that its derivatives of every order are right."""
    return list(_Held.apply(run, eager, *tensors))


class _Held(torch.autograd.Function):
    """A compiled piece whose graph is kept for one derivative; one that is kept on the tape is recomputed."""

    @staticmethod
    def forward(ctx, run, eager, *tensors):
        ctx.set_materialize_grads(False)
        inputs = [operand(t, need) for t, need in zip(tensors, ctx.needs_input_grad[2:], strict=True)]
        with held_graphs():
            outputs = run(inputs)
        ctx.graph, ctx.eager = (inputs, outputs), eager
        ctx.save_for_backward(*tensors)
        results = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(
            *(r for r, output in zip(results, outputs, strict=True) if not output.requires_grad)
        )
        return results

    @staticmethod
    def backward(ctx, *cotangents):
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return (None, None, *vjp(ctx.eager, tensors, needed, cotangents))
        inputs, outputs = ctx.graph
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        grads = iter(pulled(outputs, wanted, cotangents))
        return (None, None, *(next(grads) if need else None for need in needed))


@contextlib.contextmanager
def held_graphs() -> Iterator[None]:
    """Run compiled code that keeps graphs; a donated buffer would be gone after one pass, retain_graph or not."""
    with torch.enable_grad(), torch._functorch.config.patch(donated_buffer=False):
        yield


def pulled(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Pull cotangents back through a graph that is kept as long as the graph that is being walked."""
    pairs = [
        (output, cotangent.contiguous())
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if cotangent is not None and output.requires_grad
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    return list(
        torch.autograd.grad(
            [output for output, _ in pairs],
            inputs,
            [cotangent for _, cotangent in pairs],
            retain_graph=torch._C._autograd._get_current_graph_task_keep_graph(),  # type: ignore[reportAttributeAccessIssue]
            allow_unused=True,
        )
    )


class _Looped(torch.autograd.Function):
    """A loop whose derivative sweeps back over its steps; a :class:`Sweep` says what is kept for it."""

    @staticmethod
    def forward(ctx, loop, sweep, *tensors):
        ctx.set_materialize_grads(False)
        ctx.loop, ctx.sweep = loop, sweep
        outputs, kept = sweep.forward(tensors, ctx.needs_input_grad[2:])
        ctx.constants = loop.kernels.constants
        ctx.save_for_backward(*tensors, *kept)
        ctx.mark_non_differentiable(*(output for output in outputs if not is_differentiable(output)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *cotangents):
        loop, needed = ctx.loop, ctx.needs_input_grad[2:]
        check_versions(loop.kernels.call, ctx.constants)
        tensors, kept = ctx.saved_tensors[: len(needed)], ctx.saved_tensors[len(needed) :]

        def eager() -> list[Tensor | None]:
            return vjp(loop.eager, tensors, needed, cotangents)

        def compiled() -> list[Tensor | None]:
            return ctx.sweep.backward(tensors, kept, needed, cotangents)

        if torch.is_grad_enabled():
            return (None, None, *eager())
        with loop.autocast.restored():
            return (None, None, *loop.kernels.attempt(compiled, eager))


class Sweep:
    """The walk forward and back over the steps of a loop, which keeps every ``stride``-th state.

    Args:
        loop: The loop.
        stride: How many steps lie between two states that are kept.
    """

    def __init__(self, loop: Loop, stride: int) -> None:
        self.loop = loop
        self.stride = stride

    def forward(self, tensors: Sequence[Tensor], needed: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the last state with the stacked aux, and what to keep."""
        width = self.loop.width
        state, shared = [operand(t) for t in tensors[:width]], [operand(t) for t in tensors[width:]]
        kept, collected = [], []
        for index, t in enumerate(self.loop.times):
            if index % self.stride == 0:
                kept.extend(state)
            state, aux = self.loop.advance(state, t, shared)
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
        flowing = [i for i in range(width) if is_differentiable(tensors[i])]
        asked = [i for i in range(width, len(tensors)) if needed[i]]
        current = [_materialized(cotangents[i], tensors[i]) for i in flowing]
        shared = [operand(tensor) for tensor in tensors[width:]]
        totals = [torch.zeros_like(shared[i - width]) for i in asked]
        states: list[Sequence[Tensor]] = []
        for index in reversed(range(len(self.loop.times))):
            states = states or self._states(kept, index, shared)
            reports = {i: operand(c[index]) for i, c in enumerate(cotangents[width:], width) if c is not None}
            current, totals = self.loop.pull(
                (*flowing, *asked),
                (*flowing, *reports),
                states.pop(),
                self.loop.times[index],
                shared,
                [*current, *reports.values()],
                totals,
            )
        grads = dict(zip([*flowing, *asked], [*current, *totals], strict=True))
        return [grads[i] if need else None for i, need in enumerate(needed)]

    def _states(self, kept: Sequence[Tensor], last: int, shared: list[Tensor]) -> list[Sequence[Tensor]]:
        """Return the states from the one kept before step ``last`` to that of step ``last``."""
        first, width = last - last % self.stride, self.loop.width
        place = first // self.stride * width
        states = [kept[place : place + width]]
        for t in self.loop.times[first:last]:
            states.append(self.loop.advance(states[-1], t, shared)[0])
        return states


class HeldSweep:
    """The walk over a loop whose steps keep the graphs that torch.compile made for their derivatives.

    Every step has leaves of its own: torch.compile tells leaves from what has a graph, and would compile twice.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.graphs: list[tuple[list[Tensor], list[Tensor]]] = []
        self.shared: list[Tensor] = []

    def forward(self, tensors: Sequence[Tensor], needed: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the last state with the stacked aux, and nothing to keep beside the graphs."""
        width = self.loop.width
        self.shared = [operand(t, need) for t, need in zip(tensors[width:], needed[width:], strict=True)]
        state, collected = [operand(tensor, True) for tensor in tensors[:width]], []
        with held_graphs():
            for t in self.loop.times:
                new, aux = self.loop.advance(state, t, self.shared)
                self.graphs.append((state, [*new, *aux]))
                state = [operand(tensor, True) for tensor in new]
                collected.append([tensor.detach() for tensor in aux])
        return [*(s.detach() for s in state), *map(torch.stack, zip(*collected, strict=True))], []

    def backward(
        self,
        tensors: Sequence[Tensor],
        kept: Sequence[Tensor],
        needed: Sequence[bool],
        cotangents: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Return the cotangents of the loop's tensors."""
        width = self.loop.width
        asked = [i for i in range(width, len(tensors)) if needed[i]]
        totals: list[Tensor | None] = [None] * len(asked)
        current: list[Tensor | None] = list(cotangents[:width])
        for index in reversed(range(len(self.graphs))):
            state, outputs = self.graphs[index]
            flowing = [i for i in range(width) if state[i].requires_grad]
            reports = [None if c is None else c[index] for c in cotangents[width:]]
            inputs = [*(state[i] for i in flowing), *(self.shared[i - width] for i in asked)]
            grads = pulled(outputs, inputs, [*current, *reports])
            current = [None] * len(state)
            for i, gradient in zip(flowing, grads, strict=False):
                current[i] = gradient
            totals = [plus(a, b) for a, b in zip(totals, grads[len(flowing) :], strict=True)]
        found = dict(zip([*range(width), *asked], [*current, *totals], strict=True))
        return [found[i] if need else None for i, need in enumerate(needed)]


def _materialized(cotangent: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like).contiguous() if cotangent is None else operand(cotangent)


def unroll_compiled(
    kernels: Kernels,
    step: Step,
    state: Tree,
    args: tuple,
    times: range,
    memory: Mode | Literal["whole"] | int,
    *,
    around: Around = lambda t: contextlib.nullcontext(),
) -> tuple[Tree, Tree]:
    """Run a loop of a compiled step; its result is on the tape where grad mode is on.

    Args:
        kernels: What has been compiled so far.
        step: As :func:`metagrad.unroll` takes it; ``t``, the ints of the state and the floats of the arguments
            reach it as 0-d tensors.
        state: A tree of tensors and constants.
        args: Trees of tensors and constants.
        times: The numbers of the steps.
        memory: What is kept, see :func:`metagrad.unroll`; "whole" is one graph for all steps.
        around: What to enter around each step.
    """

    def looped(stride: int | None, _: Step, state: Tree, args: tuple, times: range) -> tuple[Tree, Tree]:
        loop = Loop(kernels, step, state, args, times, around)
        sweep = HeldSweep(loop) if stride is None else Sweep(loop, stride)
        return loop.fill(_Looped.apply(loop, sweep, *loop.tensors))  # type: ignore[arg-type]

    if not torch.is_grad_enabled():
        loop = Loop(kernels, step, state, args, times, around)
        return loop.fill(Sweep(loop, len(times)).forward(loop.tensors, [])[0])
    if memory == "whole":
        loop = Loop(kernels, step, state, args, times, around)
        return loop.fill(held(loop.whole, loop.eager, loop.tensors))
    loops = {
        "full": functools.partial(looped, None),
        "step": functools.partial(looped, 1),
        "sqrt": functools.partial(looped, max(math.isqrt(len(times)), 1)),
    }
    return unroll_by(memory, step, state, args, times, loops)
