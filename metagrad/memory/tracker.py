"""The memory tracker: the public class and the state of one run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from types import TracebackType

import torch

from metagrad.core import _torch
from metagrad.core.checks import check_choice, check_count, check_type, is_a
from metagrad.memory.graph import SavedGraph
from metagrad.memory.phases import AGAIN, AllocatorMeter, Phase, PhaseStack, label
from metagrad.memory.report import Record, format_bytes, summary, table
from metagrad.memory.storages import StorageCounter, StorageMode

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


def phase(name: str, index: int | None = None) -> contextlib.AbstractContextManager[object]:
    """Open a phase of the open tracker for a ``with`` block, if there is a tracker."""
    tracker = current()
    return contextlib.nullcontext() if tracker is None else tracker.phase(name, index=index)


def hooks_aside() -> contextlib.AbstractContextManager[object]:
    """Remove the hooks of the open tracker for a ``with`` block around torch transforms that do not support hooks."""
    tracker = current()
    return contextlib.nullcontext() if tracker is None else tracker.without_hooks()


class MemoryTracker:
    """Measure the memory of every inner and outer step while it is open.

    A tracker measures one run. It is opened once, and only one tracker is open at a time. Phases nest to any depth.
    The measured bytes depend on the device:

    - On a CPU, the tracker counts every storage that an operation in this thread allocates, exact to the byte. Bytes
      are *relative to the opening* of the tracker, so earlier storages and their release do not count. Scratch space
      inside a kernel, mkldnn tensors and memory that torch does not own (`torch.from_numpy`) are not counted. If
      `untyped_storage().resize_` resizes a storage, its size is updated by the next operation that returns it.
    - On CUDA, the tracker reads `torch.cuda.memory_allocated` and its maximum. Bytes are absolute and rounded up to
      blocks. The tracker resets `torch.cuda.max_memory_allocated` on entry to and exit from every phase.

    On both devices, a counter of storages measures `at_peak`, and saved-tensor hooks measure `graph`. While the
    tracker is open:

    - `torch.func.grad` and `torch.func.vjp` raise an error, because torch does not support saved-tensor hooks there.
      Call them inside `with mem.without_hooks():`. A forward pass in `torch.vmap` is counted.
    - Inside `torch.utils.checkpoint` or `save_on_cpu`, their hooks replace the tracker's hooks. `graph` does not
      count tensors that are saved there.
    - Functions of `torch.compile` run uncompiled, because torch skips them under a `TorchDispatchMode`.
    - Every operation takes some microseconds longer.

    As in torch, backward raises an error if a saved tensor was modified in place.

    Args:
        device: Device to measure. `None` is the current CUDA device if CUDA is available and initialized, otherwise
            the CPU.

    Raises:
        ValueError: `device` is neither a CPU nor a CUDA device.
        RuntimeError: The tracker is opened a second time, while a tracker is open, under saved-tensor hooks, or
            inside `torch.func.grad` or `vjp`. It is also raised if the tracker is closed while a phase is open.

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
        >>> print(mem.summary())
        inner steps: 2.00 KiB each, 0 B of it in the autograd graph
        outer steps: fewer than two, so a leak would not show
        peak:        8.00 KiB, mostly from inner 2 (4.00 KiB)

    References:
        PyTorch, "Hooks for autograd saved tensors" (tutorial) and `torch.cuda.max_memory_allocated`.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device: torch.device = _checked_device(device)
        self._run: TrackedRun | None = None

    def __repr__(self) -> str:
        return (
            f"MemoryTracker({self.device}, {len(self.records())} phases). table() and summary() describe them"
        )

    def __enter__(self) -> MemoryTracker:
        """Open the tracker."""
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
        self._run = TrackedRun(self.device)
        _open = (self, threading.get_ident())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every open phase and the tracker."""
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
            name: Name of the phase in records and tables.
            index: Number of the phase, or None.

        Returns:
            A context manager that enters the phase and leaves it, also when an exception passes through.

        Raises:
            TypeError: `name` is not a string.
            ValueError: `index` is not an integer of at least 0.
            RuntimeError: The tracker is closed or open in another thread on entry, or a nested phase is open on exit.
        """
        check_type("MemoryTracker.phase(name)", name, str)
        check_count(f"MemoryTracker.phase({name!r}, index=...)", index, 0, optional=True)
        is_again = _torch.current_graph_task() >= 0
        return self._inside((name + AGAIN * is_again, index))

    def implied_outer(self) -> contextlib.AbstractContextManager[object]:
        """Open the next outer step for a `with` block, unless a phase is open.

        A library calls this method around a step.
        """
        if self._run is None or self._run.depth:
            return contextlib.nullcontext()
        return self.outer(sum(record.depth == 0 and record.name == "outer" for record in self.records()))

    def without_hooks(self) -> contextlib.AbstractContextManager[object]:
        """Remove the saved-tensor hooks for a ``with`` block.

        `torch.func.grad` and `vjp` do not support these hooks. `graph` does not count tensors
        that are saved inside the block.
        """
        return contextlib.nullcontext() if self._run is None else self._run.graph.aside()

    @property
    def peak(self) -> int:
        """Maximum bytes in use during the run so far, 0 before the run."""
        return 0 if self._run is None else self._run.peak

    def records(self) -> list[Record]:
        """Return one record for each closed phase, in the order of entry."""
        return [] if self._run is None else [self._run.record(phase) for phase in self._run.closed_phases()]

    def table(self, last: int | None = None) -> str:
        """Return the records as text with one row each, indented by nesting.

        Args:
            last: Number of rows to show, counted from the end. `None` shows up to 60 records, or the first 20 and the
                last 40 of more records. A line says how many rows are hidden.

        Returns:
            Aligned lines. The device and the origin of its bytes follow the rows.

        Raises:
            ValueError: `last` is not positive.
        """
        return table(self.records(), check_count("MemoryTracker.table(last)", last, optional=True))

    def summary(self) -> str:
        """Return three short lines on the inner steps, the outer steps and the peak of the run.

        - ``inner steps``: median growth from one inner step to the next, and the part that the autograd graph holds.
          A single inner step reports the bytes that it leaves allocated.
        - ``recomputed``: only if a backward pass recomputed inner steps. Compare the graph of a step with
          ``inner steps``. Recomputation saves the difference for each step.
        - ``outer steps``: ``freed``, or a leak if an outer step leaves more than a percent of its own peak.
        - ``peak``: maximum bytes in use, and the phase that allocated the largest part of them.
        """
        if self._run is None:
            return "The tracker was not opened."
        return summary(self._run.closed_phases(), self._peak_holder(self._run), self._run.peak)

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
        where = f"from {label(phase.path)}" if phase.path else "from outside of all phases"
        return f"mostly {where} ({format_bytes(run.at_peak(phase))})"


class TrackedRun:
    """Phases of one run and their numbers. A run is open until `close`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phases: list[Phase] = []
        self._counter = StorageCounter(device)
        self.graph: SavedGraph = SavedGraph(device)
        with contextlib.ExitStack() as instruments:
            self.graph.open()
            instruments.callback(self.graph.close)
            instruments.enter_context(StorageMode(self._counter))
            instruments.callback(self._counter.close)
            self._stack = PhaseStack(AllocatorMeter(device) if device.type == "cuda" else self._counter)
            self._instruments = instruments.pop_all()
        self.root: Phase = self._stack.root
        self._point_counter()

    @property
    def is_open(self) -> bool:
        """Whether the run still measures."""
        return not self.root.closed

    @property
    def peak(self) -> int:
        """Maximum bytes in use so far."""
        return self._stack.peak() if self.is_open else self.root.peak

    def push(self, step: tuple[str, int | None]) -> Phase:
        """Enter a phase inside the innermost phase."""
        parent = self._stack.top
        phase = Phase(path=(*parent.path, step), parent=parent)
        phase.held_before, phase.first_save = self.graph.held(), self.graph.next_serial
        self._stack.push(phase)
        self._phases.append(phase)
        self._point_counter()
        return phase

    def leave(self, phase: Phase) -> Phase:
        """Close `phase` and all phases inside it. Return the phase that was innermost."""
        if phase.closed:
            return phase
        innermost = self._stack.top
        while not phase.closed:
            self._pop()
        if self._stack.open:
            self._point_counter()
        return innermost

    def close(self) -> Phase:
        """Close every open phase, then remove the hooks and the mode. Return the phase that was innermost."""
        innermost = self.leave(self.root)
        self._instruments.close()
        return innermost

    @property
    def depth(self) -> int:
        """Number of open phases."""
        return len(self._stack.open) - 1

    def closed_phases(self) -> list[Phase]:
        """Return the closed phases, in the order of entry."""
        return [phase for phase in self._phases if phase.closed]

    def at_peak(self, phase: Phase) -> int:
        """Return the bytes alive at the peak that `phase` itself allocated."""
        return self._counter.at_peak(phase.slot)

    def record(self, phase: Phase) -> Record:
        """Return the record of a closed phase."""
        sizes = (phase.before, phase.after, phase.peak, phase.graph, self.at_peak(phase))
        return Record(phase.path, *sizes, phase.seconds, str(self._device))

    def peak_holder(self) -> Phase:
        """Return the phase that allocated most of the peak."""
        return max([*self._phases, self.root], key=self.at_peak)

    def _pop(self) -> None:
        phase = self._stack.pop()
        phase.graph = self.graph.held_since(phase.first_save)
        phase.held_after = self.graph.held()

    def _point_counter(self) -> None:
        self._counter.slot = self._stack.top.slot


def _checked_device(device: torch.device | str | None) -> torch.device:
    """Return the device to measure, with its index if it is a CUDA device."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    found = torch.device(device)
    check_choice("MemoryTracker(device)", found.type, ("cpu", "cuda"))
    if found.type == "cpu":
        return torch.device("cpu")
    return found if is_a(found.index, int) else torch.device("cuda", torch.cuda.current_device())
