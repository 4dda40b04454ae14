"""The three meters: what a phase reads at its borders."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from metagrad.memory.storages import Ledger


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

    It resets `torch.cuda.max_memory_allocated` at every phase border.
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
        return _most_resident_bytes()


def _most_resident_bytes() -> int:
    import resource
    import sys

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
