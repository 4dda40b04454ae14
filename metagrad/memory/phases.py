"""Phases, the meter that they read on entry and exit, and the stack of the open ones."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from metagrad.memory.storages import Ledger, Slot

Path = tuple[tuple[str, "int | None"], ...]

AGAIN = " again"
"""The end of the name of a phase that a backward pass opens, because it recomputes a step."""


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
    graph: int = 0
    held_before: int = 0
    held_after: int = 0
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
    return " / ".join(_step_label(name, index) for name, index in path)


def _step_label(name: str, index: int | None) -> str:
    number = "" if index is None else f" {index}"
    return f"{name.removesuffix(AGAIN)}{number}{AGAIN * name.endswith(AGAIN)}"


class AllocatorMeter:
    """All bytes allocated by CUDA's caching allocator on one device, rounded up to its blocks.

    It resets `torch.cuda.max_memory_allocated` on entry to and exit from every phase.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # the maximum cannot be reset before
        self._device = device

    @property
    def total(self) -> int:
        """The bytes allocated."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def window_peak(self) -> int:
        """The maximum since the last reset."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_window(self) -> None:
        """Start a new maximum."""
        torch.cuda.reset_peak_memory_stats(self._device)


class PhaseStack:
    """The open phases over one meter, whose single maximum serves them all.

    Entering a child folds the maximum so far into its parent and resets the meter; leaving it folds what the
    meter saw into the child and the child into the parent, and resets. So a phase's peak is that of its whole
    duration.
    """

    def __init__(self, meter: Ledger | AllocatorMeter) -> None:
        self._meter = meter
        self._meter.reset_window()
        self.root: Phase = self._start(Phase())
        self.open: list[Phase] = [self.root]

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
        self.top.after = self._meter.total
        self.fold()
        phase = self.open.pop()
        phase.seconds = time.perf_counter() - phase.started
        phase.closed = True
        if self.open:
            self.top.peak = max(self.top.peak, phase.peak)
        return phase

    def fold(self) -> None:
        """Fold what the meter saw into the innermost phase, and start the meter's maximum anew."""
        self.top.peak = max(self.top.peak, self._meter.window_peak)
        self._meter.reset_window()

    def peak(self) -> int:
        """Return the peak of the run so far."""
        return max(self._meter.window_peak, *(phase.peak for phase in self.open))

    def _start(self, phase: Phase) -> Phase:
        phase.before = phase.peak = self._meter.total
        phase.started = time.perf_counter()
        return phase
