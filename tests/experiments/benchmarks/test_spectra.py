import sys

import pytest
import torch

from experiments.benchmarks import spectra as bench


@pytest.fixture
def program(monkeypatch, capsys):
    def run(*arguments: str) -> list[list[list[str]]]:
        monkeypatch.setattr(sys, "argv", ["bench_spectra", *arguments])
        bench.main()
        tables = capsys.readouterr().out.strip().split("\n\n")
        return [[line.split() for line in table.splitlines()] for table in tables]

    return run


def test_prints_errors_and_coverage_of_every_method_and_spectrum(program):
    errors, coverage = program("--size", "30", "--products", "12", "--repeats", "3")
    assert errors[0] == ["median", "error,", "12", "products", *bench.SPECTRA]
    assert coverage[0][:5] == ["coverage", "of", "90", "%", "intervals"]
    for table in (errors, coverage):
        assert [line[0] for line in table[1:]] == list(bench.METHODS)
    assert all(0 < float(cell) < 10 for cell in errors[1][1:])
    assert all(0 <= float(cell) <= 100 for cell in coverage[1][1::2])


def test_errors_are_relative_and_medians():
    result = bench.measure(torch.diag(torch.tensor([1.0, 2.0])), "hutchinson", products=2, repeats=3)
    assert result.error <= 1e-6  # rounding of a sum of two, in float32
    assert result.coverage == 1.0
