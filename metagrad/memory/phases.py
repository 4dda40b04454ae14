"""Phases, the stack of open phases, and the CUDA meter that phases read on entry and exit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from metagrad.memory.storages import Slot, StorageCounter

Path = tuple[tuple[str, "int | None"], ...]

AGAIN = " again"
"""Suffix of the name of a phase that is opened in a backward pass, which recomputes a step."""


@dataclass(eq=False)
class Phase:
    """One phase instance. Sizes are in bytes, times in seconds.

    `graph` counts the saves of this phase. `held_before` and `held_after` count the whole graph of the run, on entry
    and on exit.
    """

    path: Path = ()
    parent: Phase | None = None
    before: int = 0
    after: int = 0
    peak: int = 0
    started: float = 0.0
    seconds: float = 0.0
    graph: int = 0
    held_before: int = 0
    held_after: int = 0
    first_save: int = 0
    closed: bool = False
    slot: Slot = field(default_factory=Slot)

    @property
    def name(self) -> str:
        """Name of the phase, "inner" for `inner(k)`."""
        return self.path[-1][0]

    @property
    def index(self) -> int | None:
        """Number of the phase, k for `inner(k)`, or None."""
        return self.path[-1][1]


def label(path: Path) -> str:
    """Return a path as text, such as `outer 3 / inner 0`."""
    return " / ".join(_step_label(name, index) for name, index in path)


def _step_label(name: str, index: int | None) -> str:
    number = "" if index is None else f" {index}"
    return f"{name.removesuffix(AGAIN)}{number}{AGAIN * name.endswith(AGAIN)}"


class AllocatorMeter:
    """All bytes allocated by CUDA's caching allocator on one device, rounded up to its blocks.

    The meter resets `torch.cuda.max_memory_allocated` on entry to and exit from every phase.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # torch cannot reset the maximum before CUDA is initialized
        self._device = device

    @property
    def total(self) -> int:
        """Allocated bytes."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def window_peak(self) -> int:
        """Maximum allocated bytes since the last reset."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_window(self) -> None:
        """Start a new maximum."""
        torch.cuda.reset_peak_memory_stats(self._device)


class PhaseStack:
    """Stack of the open phases, which share the single maximum of one meter.

    On entry to a child, the parent takes over the maximum so far, and the meter is reset. On exit, the child takes
    over the maximum, and the parent takes over the peak of the child. So the peak of a phase covers its whole
    duration.
    """

    def __init__(self, meter: StorageCounter | AllocatorMeter) -> None:
        self._meter = meter
        self._meter.reset_window()
        self.root: Phase = self._start(Phase())
        self.open: list[Phase] = [self.root]

    @property
    def top(self) -> Phase:
        """Innermost open phase."""
        return self.open[-1]

    def push(self, phase: Phase) -> None:
        """Enter `phase`."""
        self.fold()
        self.open.append(self._start(phase))

    def pop(self) -> Phase:
        """Leave the innermost phase and return it with complete numbers."""
        self.top.after = self._meter.total
        self.fold()
        phase = self.open.pop()
        phase.seconds = time.perf_counter() - phase.started
        phase.closed = True
        if self.open:
            self.top.peak = max(self.top.peak, phase.peak)
        return phase

    def fold(self) -> None:
        """Update the peak of the innermost phase with the maximum of the meter, and reset the meter."""
        self.top.peak = max(self.top.peak, self._meter.window_peak)
        self._meter.reset_window()

    def peak(self) -> int:
        """Return the peak of the run so far, in bytes."""
        return max(self._meter.window_peak, *(phase.peak for phase in self.open))

    def _start(self, phase: Phase) -> Phase:
        phase.before = phase.peak = self._meter.total
        phase.started = time.perf_counter()
        return phase
