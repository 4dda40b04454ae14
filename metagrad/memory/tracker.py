"""The memory tracker: what a user opens, and what it says of the run."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from metagrad.memory.phases import Phase, label
from metagrad.memory.report import Record, format_bytes, table
from metagrad.memory.run import Run
from metagrad.memory.settings import Method, check_device, check_method, check_step
from metagrad.memory.verdict import verdict

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    import torch

_ORDER = "close phases in the reverse order of opening (a suspended generator keeps its phase open)."

_open: tuple[MemoryTracker, int] | None = None


def current() -> MemoryTracker | None:
    """Return the tracker that is open in this thread, or `None`.

    Example:
        >>> current() is None
        True
        >>> with MemoryTracker(device="cpu") as mem:
        ...     current() is mem
        True
    """
    return _open[0] if _open is not None and _open[1] == threading.get_ident() else None


class MemoryTracker:
    """Measure the memory of every inner and outer step while it is open.

    A tracker measures one run: it is opened once, and one is open at a time. A run's phases nest to any
    depth. What is read at their borders depends on `method`:

    - "storage": every storage that an operation in this thread makes on `device`, to the byte, *relative to
      the opening*: what was made before counts neither alive nor dead. Not seen: scratch space inside one
      kernel, memory that torch does not own (`torch.from_numpy`), mkldnn tensors. A storage resized by hand
      (`untyped_storage().resize_`) is seen at the next operation that returns it.
    - "allocator": `torch.cuda.memory_allocated` and its maximum, absolute, rounded up to blocks. It resets
      `torch.cuda.max_memory_allocated` at every phase border.
    - "rss": the resident bytes of the process, absolute and coarse. A peak is the largest *sample* at phase
      borders, so what comes and goes within a phase is not seen; nor are frees that the C library keeps for
      itself, nor a device's memory. `graph` and `at_peak` are `None`. It alone adds no mode and no hooks.

    The first two keep a ledger of storages, for `at_peak`, and saved-tensor hooks, for `graph`. Under them:

    - `torch.func.grad` and `torch.func.vjp`, which refuse saved-tensor hooks, run without them: bytes saved
      inside are not in `graph`. `torch.vmap` of a forward is counted.
    - Under hooks of others (`torch.utils.checkpoint`, `save_on_cpu`) theirs apply: `graph` counts nothing.
    - Functions of `torch.compile` run uncompiled: torch skips them under a `TorchDispatchMode`.
    - Every operation costs some microseconds more.

    Saved tensors keep torch's check: one that was modified in place raises when backward needs it.

    Args:
        device: what to measure. `None` is the current CUDA device if CUDA is available and initialized, else
            the CPU.
        method: "allocator", "storage" or "rss"; "auto" is "allocator" on CUDA and "storage" on the CPU.

    Raises:
        TypeError: `device` is not a device.
        ValueError: `method` is unknown or does not measure `device`, or `device` is not there.
        RuntimeError: on opening: a second time, beside an open tracker, under saved-tensor hooks, or inside
            `torch.func.grad` or `vjp`. On closing: a phase is still open.

    Example:
        >>> import torch
        >>> with MemoryTracker(device="cpu") as mem:
        ...     kept = []
        ...     for k in range(3):
        ...         with mem.inner(k):
        ...             kept.append(torch.zeros(256, dtype=torch.float64) + 1)
        >>> [(record.before, record.after, record.peak_delta) for record in mem.records()]
        [(0, 2048, 4096), (2048, 4096, 4096), (4096, 6144, 4096)]
        >>> mem.peak
        8192
        >>> print(mem.verdict().split(";")[0])
        Each inner step adds 2.00 KiB, held by state

    References:
        PyTorch, "Hooks for autograd saved tensors" (tutorial) and `torch.cuda.max_memory_allocated`.
    """

    def __init__(self, device: torch.device | str | None = None, method: Method = "auto") -> None:
        self.device = check_device(device)
        self.method = check_method(method, self.device)
        self._run: Run | None = None

    def __enter__(self) -> MemoryTracker:
        """Open."""
        global _open
        if _open is not None:
            which = "this one is" if _open[0] is self else "another one is"
            raise RuntimeError(
                f"MemoryTracker: expected no open tracker, but {which}; close it or use current()."
            )
        if self._run is not None:
            raise RuntimeError(
                "MemoryTracker: expected a tracker that was never opened, but this one has measured its run; "
                "make a new one for a new run."
            )
        self._run = Run(self.device, self.method)
        _open = (self, threading.get_ident())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, with every phase that is still open."""
        global _open
        assert self._run is not None
        innermost = self._run.close()
        _open = None
        if innermost is not self._run.root and error is None:
            raise RuntimeError(
                f"MemoryTracker: expected every phase to be closed before the tracker, but "
                f"{label(innermost.path)} was open; {_ORDER}"
            )

    def outer(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Open outer step number `step` for a `with` block: `phase("outer", index=step)`."""
        return self.phase("outer", index=step)

    def inner(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Open inner step number `step` for a `with` block: `phase("inner", index=step)`."""
        return self.phase("inner", index=step)

    def phase(self, name: str, *, index: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Open a phase of any name for a `with` block.

        Args:
            name: how it is called in records and tables.
            index: its number, if it has one.

        Returns:
            A context manager that enters the phase and leaves it, also when an exception passes through.

        Raises:
            TypeError: `name` is not a string or `index` not an integer.
            RuntimeError: on entering, the tracker is closed or open in another thread; on leaving, a phase
                inside this one is still open.
        """
        return self._inside(check_step(name, index))

    def implied_outer(self) -> contextlib.AbstractContextManager[object]:
        """Open the next outer step if no phase is open, else nothing; what a library calls around a step."""
        if self._run is None or self._run.depth:
            return contextlib.nullcontext()
        return self.outer(sum(record.depth == 0 and record.name == "outer" for record in self.records()))

    @property
    def peak(self) -> int:
        """The most bytes in use at any time of the run so far; 0 before it."""
        return 0 if self._run is None else self._run.peak

    def records(self) -> list[Record]:
        """Return one record for each phase instance that was left, in the order of entry."""
        return [] if self._run is None else [self._run.record(phase) for phase in self._run.closed_phases()]

    def table(self, last: int | None = None) -> str:
        """Return the records as text, a row each, indented by nesting.

        Args:
            last: show the last `last` rows. `None` shows all up to 60, and of more the first 20 and the
                last 40. A line says how many rows were left out.

        Returns:
            Aligned lines, the last of which says what was measured and how.

        Raises:
            ValueError: `last` is not positive.
        """
        if last is not None and last < 1:
            raise ValueError(
                f"MemoryTracker.table(last={last}): expected a positive number of rows or None, got {last}."
            )
        return table(self.records(), last)

    def verdict(self) -> str:
        """Return one sentence: bytes per inner step and who holds them, freed or leaked, and the peak.

        *Bytes per inner step* are the growth from the end of one inner step to the end of the next: the
        median, and the range if they differ; with a single inner step, what it leaves behind. *The graph*
        holds what is saved for backward, which is the states themselves where steps are recomputed
        (``memory="step"``); *state* is all else that is kept. *Leaked* compares the bytes at the
        ends of consecutive outer steps; less than a percent of what an outer step takes at its peak is called
        freed. *The peak* names the phase that made the most of what was alive then.
        """
        if self._run is None:
            return "The tracker was not opened."
        return verdict(self._run.closed_phases(), self._peak_holder(self._run), self._run.peak)

    @contextlib.contextmanager
    def _inside(self, step: tuple[str, int | None]) -> Iterator[None]:
        run = self._open_run(step)
        phase = run.push(step)
        try:
            yield
        except BaseException:
            run.leave(phase)
            raise
        innermost = run.leave(phase)
        if innermost is not phase:
            raise RuntimeError(
                f"MemoryTracker: expected {label(innermost.path)} to be closed before {label(phase.path)}, "
                f"which is around it; {_ORDER}"
            )

    def _open_run(self, step: tuple[str, int | None]) -> Run:
        if self._run is not None and current() is self:
            return self._run
        state = (
            "it is open in another thread" if self._run is not None and self._run.is_open else "it is closed"
        )
        raise RuntimeError(
            f"MemoryTracker.phase({step[0]!r}): expected an open tracker, but {state}; "
            "enter phases inside `with tracker:`, in the same thread."
        )

    def _peak_holder(self, run: Run) -> str:
        phase: Phase = run.peak_holder()
        where = f"in {label(phase.path)}" if phase.path else "outside of every phase"
        nbytes = run.at_peak(phase)
        if nbytes is None:
            return f"sampled {where}"
        return f"the largest part of it made {where} ({format_bytes(nbytes)})"
