from __future__ import annotations

import builtins

import pytest
import torch

from metagrad.memory import MemoryTracker, meters
from metagrad.memory.meters import AllocatorMeter, RssMeter, StorageMeter, resident_bytes
from metagrad.memory.storages import Ledger, StorageMode


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
    monkeypatch.setattr(meters, "resident_bytes", lambda: next(samples))
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
