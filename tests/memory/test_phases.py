from __future__ import annotations

import pytest

from metagrad.memory.phases import Phase, PhaseStack, label


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
