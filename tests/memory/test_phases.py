import pytest
import torch

from metagrad.memory import MemoryTracker
from metagrad.memory.phases import AllocatorMeter, Phase, PhaseStack


class FakeMeter:
    """Meter with bytes that the test sets. Its single maximum behaves like the maximum of the allocator."""

    def __init__(self):
        self.bytes = self.most = 0

    def use(self, *sizes):
        for self.bytes in sizes:
            self.most = max(self.most, self.bytes)

    @property
    def total(self):
        return self.bytes

    @property
    def window_peak(self):
        return self.most

    def reset_window(self):
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
    meter.use(300, 130)  # maximum of the outer phase, before its first child
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


def test_allocator_meter_asks_for_its_device(monkeypatch):
    device, calls = torch.device("cuda", 1), []
    answers = {"memory_allocated": 5, "max_memory_allocated": 7, "reset_peak_memory_stats": None}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda d, n=name, a=answer: calls.append((n, d)) or a)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    meter = AllocatorMeter(device)
    assert (meter.total, meter.window_peak, meter.reset_window()) == (5, 7, None)
    assert calls == [(name, device) for name in answers]


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
    assert first.at_peak == 2 * mib4
