from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.memory import allocator
from metagrad.optim import rules


class Libc:
    """Notes how it is set up."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def mallopt(self, parameter: int, value: int) -> int:
        self.calls.append((parameter, value))
        return 1


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    monkeypatch.setattr(allocator, "_told", [])
    monkeypatch.setattr(allocator, "is_glibc", lambda: True)
    for name in ("MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


def unrolled(size: int, memory: str) -> None:
    state = torch.ones(size, requires_grad=True)
    mg.unroll(lambda s, t: (s * 2, None), state, steps=2, memory=memory)  # type: ignore[arg-type]


def test_a_recomputing_loop_says_once_what_makes_it_faster(caplog):
    caplog.set_level(logging.WARNING, "metagrad")
    unrolled(2**15, "full")
    unrolled(10, "step")
    assert not caplog.records
    unrolled(2**15, "step")
    unrolled(2**15, "sqrt")
    (message,) = [record.getMessage() for record in caplog.records]
    assert (
        "MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_TOP_PAD_=67108864 MALLOC_MMAP_THRESHOLD_=33554432"
        in message
    )
    assert "keep_freed_memory" in message


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_loop_over_tasks_says_so_too(caplog, chunk):
    maml = mg.MAML(nn.Linear(2**15, 1), F.mse_loss, inner=rules.sgd(lr=0.1), steps=1, task_chunk=chunk)
    maml(tuple((torch.ones(2, 1, 2**15), torch.ones(2, 1, 1)) for _ in range(2)))
    assert ["by 2 parts of the tasks" in record.getMessage() for record in caplog.records] == [True] * (
        2 - chunk
    )


@pytest.mark.parametrize("variable", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_nothing_is_said_where_the_allocator_is_set_up(caplog, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    unrolled(2**15, "step")
    assert not caplog.records


def test_memory_is_kept_by_glibc_alone(caplog, monkeypatch):
    libc = Libc()
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: libc)
    assert mg.memory.keep_freed_memory()
    assert libc.calls == [(-1, 2147483647), (-2, 67108864), (-3, 33554432)]
    unrolled(2**15, "step")
    assert not caplog.records
    monkeypatch.setattr(allocator, "is_glibc", lambda: False)
    assert not mg.memory.keep_freed_memory()
    assert len(libc.calls) == 3


def test_another_allocator_is_no_glibc(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert not allocator.is_glibc.__wrapped__()
