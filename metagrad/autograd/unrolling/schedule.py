"""Which steps of a loop keep their graph, which are recomputed, and in what pieces.

Every schedule is made of two loops: the plain one, which keeps every graph, and the recomputed one, which keeps a
state for each step. Put inside each other, so that a step of the outer is a loop of several steps, the recomputed
loop keeps the square root of the number of steps; one after the other, they fill a budget.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from metagrad.autograd.recompute.checkpoint import recording_call
from metagrad.autograd.unrolling.steps import StateCheck, checked_pair, stack
from metagrad.autograd.unrolling.trial import Trial
from metagrad.core.budget import device_of, free_bytes
from metagrad.core.reach import Reached
from metagrad.core.tree import Tree, dissect, tree_map

Step = Callable[..., tuple[Tree, Tree]]
Loop = Callable[[Step, Tree, tuple[Any, ...], range], tuple[Tree, Tree]]
"""A step, a state, arguments and step numbers to the last state and the stacked aux."""


def loop_keeping(memory: str | int, tensors: Tree, loops: Mapping[str, Loop] | None = None) -> Loop:
    """Return the loop that keeps what ``memory`` says; ``"auto"`` asks the device of ``tensors``."""
    loops = loops or LOOPS
    if memory == "auto":
        memory = free_bytes(device_of(tensors))
    if isinstance(memory, int):
        return functools.partial(budgeted, budget=memory, loops=loops)
    return loops[memory]


def plain(step: Step, state: Tree, args: tuple[Any, ...], times: range) -> tuple[Tree, Tree]:
    """Keep every step's graph."""
    check = StateCheck(state)
    collected = []
    for t in times:
        state, aux = checked_pair(step(state, t, *args), t)
        check(state, t)
        collected.append(aux)
    return state, stack(collected)


def recomputed(
    step: Step, state: Tree, args: tuple[Any, ...], times: range, *, name: str = "at t={}"
) -> tuple[Tree, Tree]:
    """Keep a state for each step."""
    reached, num_kept = Reached(step), len(dissect(state)[0])

    def recomputed_step(state: Tree, t: int, *args: Tree) -> tuple[Tree, Tree]:
        called = f"unroll(step, ...) {name.format(t)}"
        return recording_call(step, (state, t, *args), {}, name=called, reached=reached, num_kept=num_kept)

    return plain(recomputed_step, state, args, times)


def segments_of(steps: int) -> tuple[int, int]:
    """Return the number of steps in a segment, and how many at first are left over."""
    width = max(math.isqrt(steps), 1)
    return width, steps % width


def segmented(step: Step, state: Tree, args: tuple[Any, ...], times: range) -> tuple[Tree, Tree]:
    """Keep every k-th state, k the square root of the number of steps, and k states while a segment is recomputed.

    Griewank, Walther, "Evaluating Derivatives", 2nd ed., section 12.2: a schedule with two levels.
    """
    width, remainder = segments_of(len(times))

    def segment(state: Tree, number: int, *args: Tree) -> tuple[Tree, Tree]:
        first = times[remainder] + number * width
        return recomputed(step, state, args, range(first, first + width))

    def segments(_: Step, state: Tree, args: tuple[Any, ...], times: range) -> tuple[Tree, Tree]:
        number = range(len(times) // width)
        state, aux = recomputed(segment, state, args, number, name=f"in segment {{}} of {width} steps")
        return state, tree_map(lambda a: a if a is None else a.flatten(0, 1), aux)

    return in_turn([(recomputed, times[:remainder]), (segments, times[remainder:])], step, state, args)


def budgeted(
    step: Step, state: Tree, args: tuple[Any, ...], times: range, budget: int, loops: Mapping[str, Loop]
) -> tuple[Tree, Tree]:
    """Keep all graphs if they fit into a number of bytes; else those of the last steps, and recompute the others."""
    trial = Trial(step, state, args, budget)
    for t in times[:2]:
        if trial.can_take():
            trial.take(t)
    early, late = trial.needs().division(len(times), budget)
    head, rest = times[: trial.num_taken], times[trial.num_taken :]
    middle = max(len(rest) - late, 0)
    first = trial.with_graphs if early == "full" else trial.recomputed
    pieces = [(first, head), (loops[early], rest[:middle]), (loops["full"], rest[middle:])]
    return in_turn(pieces, step, state, args)


def in_turn(
    pieces: list[tuple[Loop, range]], step: Step, state: Tree, args: tuple[Any, ...]
) -> tuple[Tree, Tree]:
    """Run one loop after the other."""
    states, collected = [state], []
    del state  # a loop frees the state that it begins with, if its caller does not hold it
    for loop, times in pieces:
        if len(times):
            last, aux = loop(step, states.pop(), args, times)
            states.append(last)
            collected.append(aux)
            del last
    return states.pop(), _joined(collected)


def _joined(stacked: list[Tree]) -> Tree:
    """Put the stacked aux of consecutive pieces together."""
    trees = [aux for aux in stacked if aux is not None]
    if len(trees) < 2:
        return trees[0] if trees else None
    return tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else None, *trees)


LOOPS: dict[str, Loop] = {"full": plain, "step": recomputed, "sqrt": segmented}
