"""A loop of a compiled step: its tensors, and the ways to run it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from metagrad.autograd.compile.backend import Repeated
from metagrad.autograd.compile.check import check_compilable
from metagrad.autograd.compile.compiled import operand
from metagrad.autograd.compile.retained_graph import rooted
from metagrad.autograd.recompute.modules import ModuleState
from metagrad.autograd.unrolling.compiled_steps import Kernels, Layout, Versions, Wanted, checked_before
from metagrad.autograd.unrolling.schedule import Step, plain
from metagrad.core.capture import AutocastState, Flags
from metagrad.core.tree import HOLE, Structure, Tree, TreeSpec, dissect, tree_flatten

Around = Callable[[int], contextlib.AbstractContextManager]
"""What to enter around the step of a number."""

_ONE = dissect(torch.empty(0))[1]


class Loop:
    """A loop with its step, its kernels and what does not change from step to step but the tensors.

    Args:
        kernels: What has been compiled so far.
        step: As :func:`unroll_compiled` takes it, and likewise the rest.
        owner: What the step belongs to.
    """

    def __init__(
        self,
        kernels: Kernels,
        step: Step,
        state: Tree,
        args: tuple,
        times: range,
        *,
        owner: object,
        around: Around,
    ) -> None:
        self.kernels, self.step, self.owner, self.around = kernels, step, owner, around
        self.times = times
        (states, state_spec), (operands, args_spec) = tree_flatten(state), tree_flatten(args)
        tensors = [leaf for leaf in (*states, *operands) if isinstance(leaf, Tensor)]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
        counted = self._tensors(states, int, torch.int64)
        scaled = self._tensors(operands, float, torch.float64 if is_double else torch.float32)
        self.layout = Layout(_structure(counted, state_spec), _structure(scaled, args_spec))
        self.tensors = [leaf for leaf in (*counted, *scaled) if isinstance(leaf, Tensor)]
        self.width = sum(isinstance(leaf, Tensor) for leaf in counted)
        self.numbers = [torch.full((), t, dtype=torch.int64, device=self.device) for t in times]
        self.autocast, self.flags = AutocastState(), Flags()
        self._note_modules()
        self.aux: Structure | None = None
        self._repeated = Repeated()

    def _tensors(self, leaves: list, kind: type, dtype: torch.dtype) -> list:
        """Make tensors of the numbers that change: ints in a state, which count, and floats among the arguments."""
        return [
            torch.full((), leaf, dtype=dtype, device=self.device) if type(leaf) is kind else leaf
            for leaf in leaves
        ]

    def advance(
        self, state: list[Tensor], index: int, shared: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Take the step of an index by compiled code; return the tensors of the state and of aux."""
        with self.around(self.times[index]):
            results = self._repeated(self._stepped, [*state, self.numbers[index], *shared])
        return results[: self.width], results[self.width :]

    def _stepped(self, tensors: list[Tensor]) -> list[Tensor]:
        """Take the step of a state, a number and the tensors of the arguments."""
        state, number, shared = tensors[: self.width], tensors[self.width], tensors[self.width + 1 :]
        check = functools.partial(self._check, state, shared)
        new, aux = self.kernels.advance(check, self.step, self.layout, state, number, shared)
        found, self.aux = ([aux], _ONE) if isinstance(aux, Tensor) else dissect(aux)
        return [*new, *found]

    def pulling(self, wanted: Wanted) -> Callable[..., tuple[list[Tensor], list[Tensor]]]:
        """Return what pulls cotangents back through steps by compiled code.

        Returns:
            The tensors of a state, the index of the step, the tensors of the arguments, the cotangents of the
            results and the totals of those of the arguments, to the cotangents of the state and the new totals.
        """
        flowing = len(wanted.state)
        sizes = (self.width, 1, len(self.tensors) - self.width, len(wanted.results), len(wanted.shared))

        def vjp(tensors: list[Tensor]) -> list[Tensor]:
            supply = iter(tensors)
            state, (number,), *others = (list(itertools.islice(supply, size)) for size in sizes)
            of_state, totals = self.kernels.pull(
                checked_before, self.step, self.layout, wanted, state, number, *others
            )
            return [*of_state, *totals]

        repeated = Repeated()

        def pull(
            state: list[Tensor],
            index: int,
            shared: list[Tensor],
            cotangents: list[Tensor],
            totals: list[Tensor],
        ) -> tuple[list[Tensor], list[Tensor]]:
            results = repeated(vjp, [*state, self.numbers[index], *shared, *cotangents, *totals])
            return results[:flowing], results[flowing:]

        return pull

    def versions(self) -> Versions:
        """Return what the step reads without being handed it."""
        state, shared = self.tensors[: self.width], self.tensors[self.width :]
        return self.kernels.versions(self.owner, functools.partial(self._check, state, shared))

    def _check(self, state: Sequence[Tensor], shared: Sequence[Tensor]) -> None:
        """Run the step as it is; refuse what compiling would lose."""
        state, shared = ([operand(tensor, True) for tensor in part] for part in (state, shared))
        args = (self.layout.state.fill(state), self.numbers[0], *self.layout.args.fill(shared))
        self.kernels.note(self.owner, check_compilable(self.step, args, self.kernels.call))
        self._note_modules()

    def _note_modules(self) -> None:
        self.modules = ModuleState(self.kernels.modules(self.owner, self.step))
        self.buffers = Versions.of(self.modules.buffers())

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        """Set up autocast, flags and modules as they were when the loop was made, for what is computed again."""
        with self.autocast.restored(), self.flags.restored():
            if self.modules.is_as_now():  # and guards of compiled code need not look at them anew
                yield
            else:
                with self.modules.restored():
                    yield

    def eager(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the loop again without compiling it: the last state, and the stacked aux."""
        numbers = dict(zip(self.times, self.numbers, strict=True))

        def step(state: Tree, t: int, *args: Tree) -> tuple[Tree, Tree]:
            return self.step(state, numbers[t], *args)

        state = self.layout.state.fill(tensors[: self.width])
        self.buffers.check(self.kernels.call)
        with self.surroundings():
            state, aux = plain(step, state, self.layout.args.fill(tensors[self.width :]), self.times)
        return dissect((state, aux))[0]

    def chained(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the loop step by step, keeping the graphs that torch.compile makes for their derivatives."""
        state, shared, collected = list(tensors[: self.width]), list(tensors[self.width :]), []
        for index in range(len(self.times)):
            state, aux = self.advance([rooted(tensor) for tensor in state], index, shared)
            collected.append(aux)
        return [*state, *map(torch.stack, zip(*collected, strict=True))]

    def whole(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the loop as one piece of compiled code."""
        state, shared = list(tensors[: self.width]), list(tensors[self.width :])
        check = functools.partial(self._check, state, shared)
        state, stacked, aux = self.kernels.whole(check, self.step, self.layout, self.times, state, shared)
        self.aux = dissect(aux)[1]
        return [*state, *stacked]

    def fill(self, outputs: Sequence[Tensor]) -> tuple[Tree, Tree]:
        """Return the last state and aux as trees."""
        assert self.aux is not None
        return self.layout.state.fill(outputs[: self.width]), self.aux.fill(outputs[self.width :])


def _structure(leaves: list, spec: TreeSpec) -> Structure:
    return Structure([HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
