import copy
import sys

import pytest
import torch
from torch import nn

from experiments.benchmarks import optimizers as bench


def tiny():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return bench.Work(model, torch.randn(8, 4), torch.randint(3, (8,)))


@pytest.fixture
def program(monkeypatch):
    def run(*arguments):
        threads = str(torch.get_num_threads())
        monkeypatch.setattr(bench, "WORKLOADS", {"tiny": tiny})
        monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "1", "--threads", threads, *arguments])
        bench.main()

    return run


@pytest.mark.slow
def test_every_optimizer_is_measured(program, capsys):
    program()
    out = capsys.readouterr().out
    rows = [line.strip("| ").split("|") for line in out.splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip() for row in rows] == list(bench.METHODS)
    for name, *cells in rows:
        assert float(cells[0]) > 0, name
        assert float(cells[2]) >= 1, name


def test_the_peak_of_a_gradient_holds_parameters_and_activations():
    work = tiny()
    assert bench.peak_of(bench.gradient_of(work, copy.deepcopy(work.model))) >= 4 * sum(
        p.numel() for p in work.model.parameters()
    )
