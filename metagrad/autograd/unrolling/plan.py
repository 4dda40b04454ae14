"""Which states of a loop are kept when only a few fit, and in which order steps are repeated: treeverse, or revolve.

A loop of T steps is reversed from the last step to the first. The state before each step is kept, or it is computed
again from the last state that is kept. With C states, no order of repetitions needs fewer steps than this one.

References:
    Griewank, Walther, "Algorithm 799: Revolve", TOMS 26(1), 2000.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping
from typing import Generic, NamedTuple, TypeVar

from metagrad.core.budget import BudgetError

S = TypeVar("S")


class Plan(NamedTuple):
    """A loop and the number of its states that may be kept at a time.

    Attributes:
        steps: Number of steps, T.
        states: Maximum number of states that are kept, C. The state before the first step is one of them.
    """

    steps: int
    states: int

    @property
    def forward_steps(self) -> int:
        """Steps that run without a graph in both passes: the training and the replays."""
        repeats, steps, states = self._repeats(self.steps, self.states), self.steps, self.states
        return repeats * steps - math.comb(states + repeats, repeats - 1) + 1 if steps > 1 else steps

    @staticmethod
    def _repeats(steps: int, states: int) -> int:
        """Return the maximum number of times that a step can run."""
        repeats = 1
        while math.comb(states + repeats, states) < steps:
            repeats += 1
        return repeats

    def kept_first(self) -> list[int]:
        """Return the numbers of the steps whose states the forward pass keeps.

        The state before the last step is kept in addition, because the backward pass begins with it.
        """
        return sorted({*self.kept_from(0, self.steps, self.states), max(self.steps - 1, 0)})

    @classmethod
    def kept_from(cls, first: int, last: int, states: int) -> Iterator[int]:
        """Yield the numbers of the steps, from ``first``, whose states are kept before ``last`` is reached."""
        yield first
        while last - first > 1 and states > 1:
            first += cls.advance(last - first, states)
            states -= 1
            yield first

    @classmethod
    def advance(cls, steps: int, states: int) -> int:
        """Return the distance from a kept state to the next one."""
        repeats = cls._repeats(steps, states)
        return max(
            math.comb(states + repeats - 2, states), steps - math.comb(states + repeats - 1, states - 1), 1
        )


def states_of(call: str, memory: str | int, steps: int, state_bytes: int) -> int:
    """Return how many states a memory mode keeps. A number is a budget in bytes.

    Raises:
        BudgetError: The budget is smaller than a state.
    """
    if isinstance(memory, int):
        if memory < state_bytes:
            raise BudgetError(
                f"{call}: memory={memory} bytes is less than one state, which has {state_bytes} bytes. Raise it, or "
                'use memory="log".'
            )
        return max(1, min(memory // max(state_bytes, 1), steps))
    most = max(steps, 1)
    few = {"sqrt": 2 * math.isqrt(most), "log": 2 * math.ceil(math.log2(most)) if most > 1 else 1}
    return min(max(few.get(memory, most), 1), most)


class Reversal(Generic[S]):
    """Visits the steps of a loop from the last to the first, each with the state before it.

    Args:
        plan: The plan.
        kept: States by the number of their step, in increasing order, from the forward pass. A state is removed when
            it is no longer needed, except for the first one. A second reversal then repeats more steps.
        replay: ``replay(state, t) -> state`` takes step ``t`` again.
        begin: The number of steps to visit, from the first. The default is all.

    Attributes:
        most: The maximum number of states that were kept at a time.
        replays: The number of repeated steps.
    """

    def __init__(
        self,
        plan: Plan,
        kept: MutableMapping[int, S],
        replay: Callable[[S, int], S],
        begin: int | None = None,
    ) -> None:
        self.plan = plan
        self.begin = plan.steps if begin is None else begin
        self.kept = kept
        self.replay = replay
        self.most = len(kept)
        self.replays = 0

    def __iter__(self) -> Iterator[tuple[int, S]]:
        for t in reversed(range(self.begin)):
            yield t, self._state_before(t)
            if t in self.kept and t:
                del self.kept[t]

    def _state_before(self, t: int) -> S:
        """Return the state before step ``t``, and keep states on the way to it."""
        first = max(self.kept)
        state = self.kept[first]
        wanted = set(Plan.kept_from(first, t + 1, self.plan.states - len(self.kept) + 1))
        for number in range(first, t):
            state = self.replay(state, number)
            self.replays += 1
            if number + 1 in wanted:
                self.kept[number + 1] = state
                self.most = max(self.most, len(self.kept))
        return state
