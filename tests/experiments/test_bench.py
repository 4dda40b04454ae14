from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from experiments import bench


def tiny() -> bench.Workload:
    batch = mg.tasks.Sinusoid(shots=3, queries=3).sample(2, generator=torch.Generator().manual_seed(0))
    return bench.Workload(mg.models.MLP([1, 4, 1]), F.mse_loss, batch, lr=0.01, steps=2)


@pytest.fixture
def program(monkeypatch):
    def run(*arguments: str) -> None:
        monkeypatch.setattr(bench, "WORKLOADS", {"tiny": tiny})
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        bench.main()

    return run


def test_prints_a_ratio_for_every_method(program, capsys):
    program("--rounds", "1")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["tiny", "median", "ms", "faster", "than", "the", "loop"]
    assert [line[:26].strip() for line in lines[1:-1]] == list(bench.METHODS)
    assert lines[1].endswith("1.00x")


def wrong(work: bench.Workload) -> bench.Gradient:
    return tuple(g * 1.001 for g in bench.textbook_loop(work))


def test_a_rival_that_is_wrong_is_marked(program, monkeypatch, capsys):
    monkeypatch.setitem(bench.METHODS, "a rival", wrong)
    program("tiny", "--rounds", "1")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("a rival"))
    assert line.endswith("wrong by 0.1 %")


def test_ours_must_not_be(program, monkeypatch, capsys):
    monkeypatch.setitem(bench.METHODS, "metagrad, broken", wrong)
    with pytest.raises(
        SystemExit, match=r"metagrad, broken does not agree with the textbook loop: error 1\.0e-03"
    ):
        program("tiny")
    assert capsys.readouterr().out == ""


def test_unknown_workloads_are_named(program, capsys):
    with pytest.raises(SystemExit):
        program("huge")
    assert "expected workloads among tiny" in capsys.readouterr().err
