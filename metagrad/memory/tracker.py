"""The memory tracker: what a user opens, and what it says of the run."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Generator
from types import TracebackType
from typing import Literal, get_args

import torch

from metagrad.core.checks import is_a
from metagrad.memory.graph import SavedGraph
from metagrad.memory.phases import AllocatorMeter, Meter, Phase, PhaseStack, RssMeter, StorageMeter, label
from metagrad.memory.report import Record, format_bytes, table, verdict
from metagrad.memory.storages import Ledger, StorageMode

Method = Literal["auto", "allocator", "storage", "rss"]
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
    depth. What is read on entry and exit depends on `method`:

    - "storage": every storage that an operation in this thread makes on `device`, to the byte, *relative to
      the opening*: what was made before counts neither alive nor dead. Not seen: scratch space inside one
      kernel, memory that torch does not own (`torch.from_numpy`), mkldnn tensors. A storage resized by hand
      (`untyped_storage().resize_`) is seen at the next operation that returns it.
    - "allocator": `torch.cuda.memory_allocated` and its maximum, absolute, rounded up to blocks. It resets
      `torch.cuda.max_memory_allocated` on entry to and exit from every phase.
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
        self.device: torch.device = _check_device(device)
        self.method: str = _check_method(method, self.device)
        self._run: TrackedRun | None = None

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
        self._run = TrackedRun(self.device, self.method)
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
        return self._inside(_check_step(name, index))

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
    def _inside(self, step: tuple[str, int | None]) -> Generator[None]:
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

    def _open_run(self, step: tuple[str, int | None]) -> TrackedRun:
        if self._run is not None and current() is self:
            return self._run
        state = (
            "it is open in another thread" if self._run is not None and self._run.is_open else "it is closed"
        )
        raise RuntimeError(
            f"MemoryTracker.phase({step[0]!r}): expected an open tracker, but {state}; "
            "enter phases inside `with tracker:`, in the same thread."
        )

    def _peak_holder(self, run: TrackedRun) -> str:
        phase: Phase = run.peak_holder()
        where = f"in {label(phase.path)}" if phase.path else "outside of every phase"
        nbytes = run.at_peak(phase)
        if nbytes is None:
            return f"sampled {where}"
        return f"the largest part of it made {where} ({format_bytes(nbytes)})"


class TrackedRun:
    """The phases of one run and their numbers. It is open from the start until `close`."""

    def __init__(self, device: torch.device, method: str) -> None:
        self._device = device
        self._method = method
        self._phases: list[Phase] = []
        self._ledger = None if method == "rss" else Ledger(device)
        self._graph = None if method == "rss" else SavedGraph(device)
        with contextlib.ExitStack() as instruments:
            if self._graph is not None:
                self._graph.open()
                instruments.callback(self._graph.close)
            if self._ledger is not None:
                instruments.enter_context(StorageMode(self._ledger))
                instruments.callback(self._ledger.close)
            self._stack = PhaseStack(self._meter())
            self._instruments = instruments.pop_all()
        self.root: Phase = self._stack.root
        self._point_ledger()

    @property
    def is_open(self) -> bool:
        """Whether it still measures."""
        return not self.root.closed

    @property
    def peak(self) -> int:
        """The most bytes in use so far."""
        return self._stack.peak() if self.is_open else self.root.peak

    def push(self, step: tuple[str, int | None]) -> Phase:
        """Enter a phase inside the innermost one."""
        parent = self._stack.top
        phase = Phase(path=(*parent.path, step), parent=parent)
        if self._graph is not None:
            phase.held_before = self._graph.held()
            phase.first_save = self._graph.next_serial
        self._stack.push(phase)
        self._phases.append(phase)
        self._point_ledger()
        return phase

    def leave(self, phase: Phase) -> Phase:
        """Close `phase` and all that is open inside it; return the one that was innermost."""
        if phase.closed:
            return phase
        innermost = self._stack.top
        while not phase.closed:
            self._pop()
        if self._stack.open:
            self._point_ledger()
        return innermost

    def close(self) -> Phase:
        """Close every open phase, then take the instruments off; return the phase that was innermost."""
        innermost = self.leave(self.root)
        self._instruments.close()
        return innermost

    @property
    def depth(self) -> int:
        """How many phases are open."""
        return len(self._stack.open) - 1

    def closed_phases(self) -> list[Phase]:
        """Return the phases that were left, in the order of entry."""
        return [phase for phase in self._phases if phase.closed]

    def at_peak(self, phase: Phase) -> int | None:
        """Return the bytes that `phase` itself made and that the peak had; `None` if not measured."""
        return None if self._ledger is None else self._ledger.at_peak(phase.slot)

    def record(self, phase: Phase) -> Record:
        """Return the record of a closed phase."""
        return Record(
            path=phase.path,
            before=phase.before,
            after=phase.after,
            peak=phase.peak,
            graph=phase.graph,
            at_peak=self.at_peak(phase),
            seconds=phase.seconds,
            device=str(self._device),
            method=self._method,
        )

    def peak_holder(self) -> Phase:
        """Return the phase that made most of the peak; where not measured, the one that peaked."""
        if self._ledger is None:
            deepest_first = sorted(self.closed_phases(), key=lambda phase: len(phase.path), reverse=True)
            return max([*deepest_first, self.root], key=lambda phase: phase.peak)
        return max([*self._phases, self.root], key=lambda phase: self.at_peak(phase) or 0)

    def _meter(self) -> Meter:
        if self._ledger is None:
            return RssMeter()
        return AllocatorMeter(self._device) if self._method == "allocator" else StorageMeter(self._ledger)

    def _pop(self) -> None:
        phase = self._stack.pop()
        if self._graph is not None:
            phase.graph = self._graph.held_since(phase.first_save)
            phase.held_after = self._graph.held()

    def _point_ledger(self) -> None:
        if self._ledger is not None:
            self._ledger.slot = self._stack.top.slot


def _check_device(device: torch.device | str | None) -> torch.device:
    """Return the device to measure, with its index if it is a CUDA device."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    if not is_a(device, torch.device, str):
        came = type(device).__name__
        raise TypeError(f"MemoryTracker(device=...): expected a torch.device, its name or None, got {came}.")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"MemoryTracker(device={device!r}): expected a device such as 'cpu' or 'cuda:0'."
        ) from error
    if found.type == "cpu":
        return torch.device("cpu")
    call = f"MemoryTracker(device={str(found)!r})"
    if found.type != "cuda":
        raise ValueError(f"{call}: expected a CPU or CUDA device, got {found.type!r}.")
    if not torch.cuda.is_available():
        raise ValueError(f"{call}: expected CUDA to be available, but it is not; use device='cpu'.")
    return found if is_a(found.index, int) else torch.device("cuda", torch.cuda.current_device())


def _check_method(method: str, device: torch.device) -> str:
    """Return the method, "auto" resolved for `device`."""
    if method not in get_args(Method):
        methods = ", ".join(get_args(Method))
        raise ValueError(f"MemoryTracker(method=...): expected one of {methods}, got {method!r}.")
    if method == "auto":
        return "allocator" if device.type == "cuda" else "storage"
    if method == "allocator" and device.type != "cuda":
        raise ValueError(
            f"MemoryTracker(method='allocator'): expected a CUDA device, got {str(device)!r}; "
            "use method='storage'."
        )
    return method


def _check_step(name: str, index: int | None) -> tuple[str, int | None]:
    """Return the step of a path that `name` and `index` make."""
    if not is_a(name, str):
        raise TypeError(f"MemoryTracker.phase(name): expected a string, got {type(name).__name__}.")
    if index is None:
        return name, None
    try:
        return name, operator.index(index)
    except TypeError as error:
        came = type(index).__name__
        raise TypeError(
            f"MemoryTracker.phase({name!r}, index=...): expected an integer or None, got {came}."
        ) from error
