from __future__ import annotations

import builtins

import pytest
import torch

from metagrad.memory import MemoryTracker, phases
from metagrad.memory.phases import (
    AllocatorMeter,
    Phase,
    PhaseStack,
    RssMeter,
    StorageMeter,
    label,
    resident_bytes,
)
from metagrad.memory.storages import Ledger, StorageMode


class FakeMeter:
    """A meter whose bytes the test sets; its single maximum behaves as the allocator's."""

    def __init__(self):
        self.bytes = self.most = 0

    def use(self, *sizes):
        for self.bytes in sizes:
            self.most = max(self.most, self.bytes)

    def read(self):
        return self.bytes

    def peak(self):
        return self.most

    def reset(self):
        self.most = self.bytes


def numbers(phase):
    return phase.before, phase.after, phase.peak


def test_peaks_fold_into_the_phase_around():
    meter = FakeMeter()
    meter.use(100)
    stack = PhaseStack(meter)
    outer, first, second = Phase(), Phase(), Phase()
    meter.use(120)
    stack.push(outer)
    meter.use(300, 130)  # the outer's own maximum, before its first child
    stack.push(first)
    meter.use(200, 150)
    stack.pop()
    stack.push(second)
    meter.use(250, 160)
    stack.pop()
    meter.use(170, 140)
    stack.pop()
    assert numbers(first) == (130, 150, 200)
    assert numbers(second) == (150, 160, 250)
    assert numbers(outer) == (120, 140, 300)
    assert stack.peak() == 300


@pytest.mark.parametrize(
    ("before", "child", "after", "expected"), [(9, 5, 4, 9), (5, 9, 4, 9), (4, 5, 9, 9), (4, 4, 4, 4)]
)
def test_the_largest_part_of_a_phase_is_its_peak(before, child, after, expected):
    meter = FakeMeter()
    stack = PhaseStack(meter)
    outer, inner = Phase(), Phase()
    stack.push(outer)
    meter.use(before, 1)
    stack.push(inner)
    meter.use(child, 2)
    stack.pop()
    meter.use(after, 3)
    stack.pop()
    assert outer.peak == expected
    assert inner.peak == max(child, 2)


def test_the_peak_of_a_child_does_not_reach_its_sibling():
    meter = FakeMeter()
    stack = PhaseStack(meter)
    big, small = Phase(), Phase()
    stack.push(big)
    meter.use(1000, 0)
    stack.pop()
    stack.push(small)
    meter.use(10, 0)
    stack.pop()
    assert (big.peak, small.peak) == (1000, 10)


def test_the_peak_of_an_open_run_includes_what_was_not_folded_yet():
    meter = FakeMeter()
    stack = PhaseStack(meter)
    meter.use(50, 5)
    stack.push(Phase())
    assert stack.peak() == 50
    meter.use(70, 7)
    assert stack.peak() == 70


def test_seconds_are_wall_time():
    stack = PhaseStack(FakeMeter())
    outer, inner = Phase(), Phase()
    stack.push(outer)
    stack.push(inner)
    stack.pop()
    stack.pop()
    assert 0 <= inner.seconds <= outer.seconds


def test_label():
    assert label((("outer", 3), ("query", None))) == "outer 3 / query"


def test_storage_meter_reads_the_ledger():
    ledger = Ledger(torch.device("cpu"))
    meter = StorageMeter(ledger)
    with StorageMode(ledger):
        kept = torch.zeros(10, dtype=torch.float64)
        _ = kept + 1
        del _
        assert (meter.read(), meter.peak()) == (80, 160)
        meter.reset()
        assert (meter.read(), meter.peak(), ledger.peak) == (80, 80, 160)


def test_allocator_meter_asks_for_its_device(monkeypatch):
    device, calls = torch.device("cuda", 1), []
    answers = {"memory_allocated": 5, "max_memory_allocated": 7, "reset_peak_memory_stats": None}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda d, n=name, a=answer: calls.append((n, d)) or a)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    meter = AllocatorMeter(device)
    assert (meter.read(), meter.peak(), meter.reset()) == (5, 7, None)
    assert calls == [(name, device) for name in answers]


def test_rss_peak_is_the_largest_sample(monkeypatch):
    samples = iter([10, 50, 20, 30, 30])
    monkeypatch.setattr(phases, "resident_bytes", lambda: next(samples))
    meter = RssMeter()
    assert (meter.read(), meter.peak()) == (50, 50)
    meter.reset()
    assert meter.peak() == 30


def test_resident_bytes_without_proc_is_the_maximum(monkeypatch):
    now = resident_bytes()
    assert now > 2**20

    def no_proc(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(builtins, "open", no_proc)
    assert resident_bytes() >= now // 2


def test_rss_tracker_measures_no_graph_and_adds_no_hooks():
    with MemoryTracker(method="rss") as mem, mem.outer(0), mem.inner(0):
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    for record in mem.records():
        assert record.graph is record.at_peak is None
        assert record.peak >= max(record.before, record.after) > 2**20
    assert mem.peak == max(record.peak for record in mem.records())
    assert "sampled in outer 0" in mem.verdict()
    assert mem.table().endswith("cpu, measured by rss: bytes in all")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_allocator_tracker_on_cuda():
    with MemoryTracker(device="cuda") as mem:
        with mem.outer(0):
            with mem.inner(0):
                kept = torch.zeros(1024, 1024, device="cuda") + 1
            with mem.inner(1):
                kept = kept + 1
        del kept
    outer, first, second = mem.records()
    mib4 = 4 * 2**20
    assert first.peak_delta == 2 * mib4
    assert first.after - first.before == mib4
    assert second.after == second.before
    assert outer.peak == max(first.peak, second.peak)
    assert outer.method == "allocator"
    assert first.at_peak == 2 * mib4
