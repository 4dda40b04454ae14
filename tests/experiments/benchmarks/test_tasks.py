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
