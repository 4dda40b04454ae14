"""Phases, the meters that they read on entry and exit, and the stack of the open ones."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from typing import Protocol

import torch

from metagrad.memory.storages import Ledger, Slot

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


class Meter(Protocol):
    """Bytes now, and their maximum since the last reset, never below what `read` gave since."""

    def read(self) -> int:
        """Return the bytes in use."""
        ...

    def peak(self) -> int:
        """Return the maximum since the last reset."""
        ...

    def reset(self) -> None:
        """Start a new maximum from the bytes in use."""
        ...


class StorageMeter:
    """The bytes of the storages in a ledger: exact, relative to its opening."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def read(self) -> int:
        """Return the bytes of the storages alive."""
        return self._ledger.total

    def peak(self) -> int:
        """Return the maximum since the last reset."""
        return self._ledger.window_peak

    def reset(self) -> None:
        """Start a new maximum."""
        self._ledger.reset_window()


class AllocatorMeter:
    """The bytes of CUDA's caching allocator on one device: absolute, rounded up to its blocks.

    It resets `torch.cuda.max_memory_allocated` on entry to and exit from every phase.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # the maximum cannot be reset before
        self._device = device

    def read(self) -> int:
        """Return the bytes allocated."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """Return the maximum since the last reset."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset(self) -> None:
        """Start a new maximum."""
        torch.cuda.reset_peak_memory_stats(self._device)


class RssMeter:
    """The resident bytes of the process: absolute, and sampled, so a peak is the largest sample."""

    def __init__(self) -> None:
        self._peak = resident_bytes()

    def read(self) -> int:
        """Return the bytes resident."""
        now = resident_bytes()
        self._peak = max(self._peak, now)
        return now

    def peak(self) -> int:
        """Return the largest sample since the last reset, this one included."""
        self.read()
        return self._peak

    def reset(self) -> None:
        """Start a new maximum."""
        self._peak = resident_bytes()


def resident_bytes() -> int:
    """Return the resident bytes of this process; without /proc, the most it ever had (getrusage)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        import resource  # not on every platform

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


class PhaseStack:
    """The open phases over one meter, whose single maximum serves them all.

    Entering a child folds the maximum so far into its parent and resets the meter; leaving it folds what the
    meter saw into the child and the child into the parent, and resets. So a phase's peak is that of its whole
    duration.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._meter.reset()
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
