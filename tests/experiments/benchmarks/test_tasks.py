from __future__ import annotations

import sys

import pytest
import torch

from experiments.benchmarks import tasks as bench
from tests.marks import slow


@pytest.fixture
def program(monkeypatch, capsys):
    monkeypatch.setattr(bench, "NUM_CLASSES", 6)
    monkeypatch.setattr(bench, "NUM_FOLDERS", 6)

    def run(*arguments: str) -> list[list[str]]:
        small = ["--tasks", "1", "--hidden", "1", "--rounds", "1", "--device", "cpu"]
        threads = ["--threads", str(torch.get_num_threads())]
        monkeypatch.setattr(sys, "argv", ["bench_tasks", *arguments, *small, *threads])
        bench.main()
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.mark.parametrize("source", ["memory", slow("files")])
def test_prints_what_sampling_takes_of_a_step(program, source):
    header, line = program(source)
    assert header == ["sampling,", "ms", "meta-step,", "ms", "of", "a", "step"]
    assert line[0] == source
    assert all(float(cell) >= 0 for cell in line[1:4])


def test_the_share_is_a_median_of_ratios():
    times = bench.Times([0.1, 0.2, 0.9], [1.0, 1.0, 1.0])
    assert times.share == 0.2
    assert bench.line("memory", times).split() == ["memory", "200.00", "1000.0", "20.00", "%"]


def test_what_is_unknown_is_named(program, capsys):
    with pytest.raises(SystemExit):
        program("disk")
    assert "expected sources among memory, files" in capsys.readouterr().err
