"""Phases and the stack of the open ones, which folds the peak of a child into its parent."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from metagrad.memory.storages import Slot

if TYPE_CHECKING:
    from metagrad.memory.meters import Meter

Path = tuple[tuple[str, "int | None"], ...]


@dataclass(eq=False)
class Phase:
    """One phase instance, in bytes and seconds; `held_*` is what the graph holds of the whole run by then."""

    path: Path = ()
    parent: Phase | None = None
    before: int = 0
    after: int = 0
    peak: int = 0
    started: float = 0.0
    seconds: float = 0.0
    graph: int | None = None
    held_before: int | None = None
    held_after: int | None = None
    first_save: int = 0
    closed: bool = False
    slot: Slot = field(default_factory=Slot)

    @property
    def name(self) -> str:
        """The name, "inner" for `inner(k)`."""
        return self.path[-1][0]

    @property
    def index(self) -> int | None:
        """The number, k for `inner(k)`."""
        return self.path[-1][1]


def label(path: Path) -> str:
    """Return a path in words: `outer 3 / inner 0`."""
    return " / ".join(name if index is None else f"{name} {index}" for name, index in path)


class PhaseStack:
    """The open phases over one meter, whose single maximum serves them all.

    Entering a child folds the maximum so far into its parent and resets the meter; leaving it folds what the
    meter saw into the child and the child into the parent, and resets. So a phase's peak is that of its whole
    duration.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._meter.reset()
        self.root = self._start(Phase())
        self.open = [self.root]

    @property
    def top(self) -> Phase:
        """The innermost open phase."""
        return self.open[-1]

    def push(self, phase: Phase) -> None:
        """Enter `phase`."""
        self.fold()
        self.open.append(self._start(phase))

    def pop(self) -> Phase:
        """Leave the innermost phase and return it, its numbers complete."""
        self.top.after = self._meter.read()
        self.fold()
        phase = self.open.pop()
        phase.seconds = time.perf_counter() - phase.started
        phase.closed = True
        if self.open:
            self.top.peak = max(self.top.peak, phase.peak)
        return phase

    def fold(self) -> None:
        """Fold what the meter saw into the innermost phase, and start the meter's maximum anew."""
        self.top.peak = max(self.top.peak, self._meter.peak())
        self._meter.reset()

    def peak(self) -> int:
        """Return the peak of the run so far."""
        return max(self._meter.peak(), *(phase.peak for phase in self.open))

    def _start(self, phase: Phase) -> Phase:
        phase.before = phase.peak = self._meter.read()
        phase.started = time.perf_counter()
        return phase
