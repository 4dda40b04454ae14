"""Checkpointing schedules: which steps of a loop keep their graph, and which are recomputed.

Every schedule is made of two loops. The plain loop keeps every graph. The recomputed loop keeps a state for each
step. A plain loop in each recomputed call keeps the graphs of a segment at a time. Nested, the recomputed loop keeps
few states. In sequence, the loops fill a budget.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.autograd.recompute.checkpoint import attach, recording_call
from metagrad.autograd.recompute.replay import CallState, Recording, record
from metagrad.autograd.unrolling.plan import Plan, states_of
from metagrad.autograd.unrolling.steps import Arguments, Pair, StateCheck, checked_pair, stack
from metagrad.core.budget import BudgetError, device_of, free_bytes
from metagrad.core.tree import Tree, dissect, tree_map
from metagrad.memory.storages import StorageCounter, StorageMode, storages_of

Step = Callable[..., Pair]
Loop = Callable[[Step, Tree, Arguments, range], Pair]
"""Takes a step, a state, arguments and step numbers, and returns the last state and the stacked aux."""

_STEP = "unroll(step, ...)"
"""How errors name the step."""


def loop_keeping(memory: str | int, tensors: Tree, loops: Mapping[str, Loop] | None = None) -> Loop:
    """Return the loop of a memory mode. ``"auto"`` is the free memory of the device of ``tensors``."""
    loops = loops or LOOPS
    if memory == "auto":
        memory = free_bytes(device_of(tensors))
    if isinstance(memory, int):
        return functools.partial(budgeted, budget=memory, loops=loops)
    return loops.get(memory) or loops["sqrt"]  # compiled segments are not split into shorter ones


def plain(step: Step, state: Tree, args: Arguments, times: range) -> Pair:
    """Keep every step's graph."""
    check = StateCheck(state)
    collected = []
    for index, t in enumerate(times):
        state, aux = checked_pair(step(state, t, *args.at(index)), t)
        check(state, t)
        collected.append(aux)
    return state, stack(collected)


def recomputed(
    step: Step, state: Tree, args: Arguments, times: range, shared: CallState | None = None
) -> Pair:
    """Keep a state for each step."""
    known = CallState(step, _STEP) if shared is None else shared
    num_kept = len(dissect(state)[0])

    def recomputed_step(state: Tree, t: int, *args: Tree) -> Pair:
        called = f"{_STEP} at t={t}"
        return recording_call(step, (state, t, *args), {}, name=called, state=known, num_kept=num_kept)

    return plain(recomputed_step, state, args, times)


def segments(step: Step, state: Tree, args: Arguments, times: range) -> Pair:
    """Keep a state for each segment of the loop. A recomputed segment keeps the graphs of its steps.

    The length of the segments minimizes the memory of graphs that hold all that the first step allocates. A real
    graph holds less, but its size depends on hooks on saved tensors. :func:`torch.utils.checkpoint.checkpoint` runs
    a loop twice with different hooks, and both runs need the same segments.
    """
    trial = Trial(step, state, args, budget=0)
    trial.take(times[0])
    _, length = trial.needs()._replace(growth=trial.counter.allocated).segments(len(times))

    def segment(step: Step, state: Tree, args: Arguments, times: range) -> Pair:
        call = functools.partial(plain, step, times=times)
        return recording_call(call, (state, args), {}, name=_named(times), state=trial.shared)

    parts = [times[i : i + length] for i in range(1, len(times), length)]
    return in_turn([(trial.recomputed, times[:1]), *((segment, part) for part in parts)], step, state, args)


def few_states(
    step: Step,
    state: Tree,
    args: Arguments,
    times: range,
    states: int | Literal["log"],
    within: CallState | None = None,
) -> Pair:
    """Keep at most ``states`` states at a time, or 2 log2(T) for ``"log"``. See :class:`Plan`.

    The steps between two kept states are one recomputed call. The recomputation of these steps keeps the
    remaining states. ``within`` is the state of the recomputed loop that ends with these steps, or None. The
    last step is then differentiated at once, so its graph is kept.
    """
    if within and len(times) == 1:
        return plain(step, state, args, times)
    count = min(states, len(times)) if isinstance(states, int) else states_of(_STEP, states, len(times), 0)
    first = list(Plan.kept_from(0, len(times), count)) if count > 1 else [0, len(times) - 1]
    ends = [*first[1:], len(times)]
    shared = within.now() if within else CallState(step, _STEP)
    pieces = [
        (functools.partial(_as_one, max(count - i, 1), shared), times[a:b])
        for i, (a, b) in enumerate(zip(first, ends, strict=True))
    ]
    if within:
        rest = max(count - len(first) + 1, 1)
        pieces[-1] = functools.partial(few_states, states=rest, within=shared), pieces[-1][1]
    return in_turn(pieces, step, state, args)


def _as_one(states: int, shared: CallState, step: Step, state: Tree, args: Arguments, times: range) -> Pair:
    """Run steps that are recomputed as one call, with some states."""
    if len(times) == 1:
        return recomputed(step, state, args, times, shared=shared)

    def segment(state: Tree, args: Arguments) -> Pair:
        return few_states(step, state, args, times, states, within=shared)

    return recording_call(segment, (state, args), {}, name=_named(times), state=shared)


def _named(times: range) -> str:
    return f"{_STEP} in {len(times)} steps from t={times[0]}"


def budgeted(
    step: Step, state: Tree, args: Arguments, times: range, budget: int, loops: Mapping[str, Loop]
) -> Pair:
    """Keep all graphs if they fit into a budget in bytes. Otherwise recompute early steps."""
    trial = Trial(step, state, args, budget)
    for t in times[:2]:
        if trial.can_take():
            trial.take(t)
    early, late = trial.needs().division(len(times), budget, loops)
    head, rest = times[: len(trial.recordings)], times[len(trial.recordings) :]
    middle = max(len(rest) - late, 0)
    first = trial.with_graphs if early == "full" else trial.recomputed
    pieces = [(first, head), (loops[early], rest[:middle]), (loops["full"], rest[middle:])]
    return in_turn(pieces, step, state, args)


def in_turn(pieces: list[tuple[Loop, range]], step: Step, state: Tree, args: Arguments) -> Pair:
    """Run one loop after the other."""
    states, collected, done = [state], [], 0
    del state  # a loop frees the state that it begins with, if its caller does not hold it
    for loop, times in pieces:
        if len(times):
            done, own = done + len(times), args.part(done, done + len(times))
            last, aux = loop(step, states.pop(), own, times)
            states.append(last)
            collected.append(aux)
            del last
    return states.pop(), _joined(collected)


def _joined(stacked: list[Tree]) -> Tree:
    """Concatenate the stacked aux of consecutive pieces."""
    trees = [aux for aux in stacked if aux is not None]
    if len(trees) < 2:
        return trees[0] if trees else None
    return tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else None, *trees)


LOOPS: dict[str, Loop] = {
    "full": plain,
    "step": recomputed,
    "sqrt": segments,
    "log": functools.partial(few_states, states="log"),
}


class StepBytes(NamedTuple):
    """Memory of the steps of a loop, in bytes of storages. It is exact on a CPU.

    Attributes:
        step: Bytes of the graph of one step, its new state and its aux.
        state: Bytes of the new state.
        growth: Bytes that a step adds to a loop that keeps every graph. This can be less than a state: a graph that
            reads a few rows of an embedding table need not hold the table.
    """

    step: int
    state: int
    growth: int

    def division(self, steps: int, budget: int, loops: Container[str]) -> tuple[str, int]:
        """Return the memory mode of early steps, and the number of last steps that keep their graph.

        ``"log"`` takes longer, and keeps the cotangents of nested calls in addition to its states.
        """
        all_graphs = self.step + (steps - 1) * self.growth
        if all_graphs <= budget:
            return "full", steps
        size, length = self.segments(steps)
        log_size = 3 * math.ceil(math.log2(steps)) * self.state
        # A step at the end of the loop keeps its graph in place of its share of a state.
        modes = [("sqrt", size, self.growth - self.state // length), ("log", log_size, self.growth)]
        modes = [(mode, size, more) for mode, size, more in modes if mode in loops]
        for mode, size, more in modes:
            left = budget - size - self.step
            if left >= 0:
                return mode, min(steps - 1, left // max(more, 1))
        needed = min(all_graphs, self.step + min(size for _, size, _ in modes))
        raise BudgetError(
            f"unroll(..., memory={budget}): one step needs {self.step} bytes, and {steps} steps keep "
            f"{needed - self.step} bytes besides, so the budget must be at least {needed} bytes. Raise it, or take "
            "fewer or smaller steps."
        )

    def segments(self, steps: int) -> tuple[int, int]:
        """Return the bytes that a loop in segments needs in addition to one step, and the length of a segment.

        Segments of L steps need :math:`s T / L + g L` bytes, for states of s bytes and graphs of g bytes.
        """
        length = max(round(math.sqrt(steps * self.state / max(self.growth, 1))), 1)
        return -(-steps // length) * self.state + (length - 1) * self.growth, length


class Trial:
    """Runs and measures the first steps of a loop. Afterwards they keep their graphs or are recomputed.

    Args:
        step: A step of :func:`metagrad.unroll`.
        state: The first state.
        args: The arguments of all steps.
        budget: Maximum bytes of the graphs, in addition to the state.
    """

    def __init__(self, step: Step, state: Tree, args: Arguments, budget: int) -> None:
        self.step = step
        self.args = args
        self.budget = budget
        self.shared = CallState(step, _STEP)
        self.check = StateCheck(state)
        self.counter = StorageCounter(device_of(state, args))
        self.state = state
        self.collected: list[Tree] = []
        self.recordings: list[Recording] = []
        self.totals: list[int] = []
        self.state_bytes = 0

    def can_take(self) -> bool:
        """Return whether the budget holds two graphs, or a graph is no larger than a state."""
        if not self.totals:
            return True
        graph = self.totals[0] - self.state_bytes
        return graph <= self.state_bytes or 2 * graph + self.state_bytes <= self.budget

    def take(self, t: int) -> None:
        """Take a step."""
        taken: list[Pair] = []

        def measured(state: Tree, t: int, *args: Tree) -> Pair:
            with StorageMode(self.counter):
                taken.append(checked_pair(self.step(state, t, *args), t))
            return taken[0]

        called = f"{_STEP} at t={t}"
        recording = record(
            measured, (self.state, t, *self.args.at(len(self.recordings))), {}, name=called, state=self.shared
        )
        recording.call.fn = functools.partial(_below_mode, self.step)
        # The results keep their graph, since a recording drops only the graph of returned tensors.
        self.state, aux = taken.pop()
        self.check(self.state, t)
        self.collected.append(aux)
        self.recordings.append(recording)
        self.state_bytes = sum(map(_bytes, dissect(self.state)[0]))
        self.totals.append(self.counter.total)

    def needs(self) -> StepBytes:
        """End the measurement and return the measured memory."""
        step = growth = max(self.totals[0], 1)
        if len(self.recordings) == 2:
            self._leave_states_to_graphs()
            growth = max(self.counter.total - self.totals[0], 1)
        self.counter.close()
        return StepBytes(step, self.state_bytes, growth)

    def _leave_states_to_graphs(self) -> None:
        """Copy the state between both steps for the recordings, so that it is freed if no graph holds it."""
        first, second = self.recordings
        width = len(dissect(self.state)[0])
        del second.tensors[:width]
        for index in range(width):
            first.outputs[index] = _copy(first.outputs[index])

    def with_graphs(self, *call: object) -> Pair:
        """Return the last state and the stacked aux with the graphs of the steps. Call this once."""
        state, collected, _ = self._spend()
        return state, stack(collected)

    def recomputed(self, *call: object) -> Pair:
        """Return the last state and the stacked aux of checkpointed steps. Call this once."""
        _, _, recordings = self._spend()
        state, collected = None, []
        for recording in recordings:
            tensors = [*dissect(state)[0], *recording.tensors]
            state, aux = attach(recording.call, tensors, recording.outputs, recording.structure)
            collected.append(aux)
        return state, stack(collected)

    def _spend(self) -> tuple[Tree, list[Tree], list[Recording]]:
        """Return the state, aux and recordings, and drop them, so that the loop can free the state."""
        contents = self.state, self.collected, self.recordings
        self.state, self.collected, self.recordings = None, [], []
        return contents


def _below_mode(step: Step, *call: Any) -> Pair:
    """Repeat a step of a trial. Torch computes some derivatives by other operations below a dispatch mode."""
    with StorageMode(StorageCounter(torch.device("meta"))):
        return step(*call)


def _bytes(tensor: Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(storage.nbytes() for storage in storages_of(tensor))


def _copy(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)
