"""One run: the instruments on, phases pushed and popped, what they measured."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from metagrad.memory.graph import SavedGraph
from metagrad.memory.meters import AllocatorMeter, Meter, RssMeter, StorageMeter
from metagrad.memory.phases import Phase, PhaseStack
from metagrad.memory.report import Record
from metagrad.memory.storages import Ledger, StorageMode

if TYPE_CHECKING:
    import torch


class Run:
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
        self.root = self._stack.root
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
