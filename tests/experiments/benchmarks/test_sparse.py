from __future__ import annotations

import sys

import pytest
import torch

from experiments.benchmarks import sparse as bench
from experiments.benchmarks.sparse_operations import OPERATIONS, methods_of


@pytest.fixture
def program(monkeypatch):
    def run(*arguments: str) -> None:
        monkeypatch.setattr(bench, "WORKLOADS", {"16k": lambda: bench.problem(60, 200, 3)})
        monkeypatch.setattr(sys, "argv", ["bench_sparse", *arguments])
        bench.main()

    return run


def test_prints_time_and_memory_of_every_method_and_order(program, capsys):
    program("--rounds", "1")
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert [table[:12] for table in tables] == ["16k, order 1", "16k, order 2", "16k, order 3"]
    for table in tables:
        header, *lines = table.splitlines()
        assert header.split()[3:] == ["median", "ms", "x", "ours", "peak", "MiB", "x", "ours"]
        assert [line[:24].strip() for line in lines] == list(bench.METHODS)
        assert lines[0].split()[2::2] == ["1.00", "1.00"]


@pytest.mark.parametrize("order", bench.ORDERS)
def test_the_gradients_are_of_the_stated_function(order):
    """Of t_0 = sin(v x) at one entry: t_0' = x cos, t_1 = x^2 cos^2, t_1' = -x^3 sin 2y, t_2' by autograd."""
    work = bench.problem(1, 1, 1).double()
    v, x = work.values.requires_grad_(), work.x[0]
    t = (v * x).sin().sum()
    for _ in range(order):
        (g,) = torch.autograd.grad(t, v, create_graph=True)
        t = g.square().sum()
    torch.testing.assert_close(bench.metagrad(work, order)(), g.detach())
    if order == 2:
        torch.testing.assert_close(g, -(x**3) * torch.sin(2 * v * x))


def failing(work: bench.Problem, order: int) -> bench.Run:
    raise RuntimeError("is not implemented\nand more")


def test_a_rival_that_raises_says_so(program, monkeypatch, capsys):
    monkeypatch.setattr(bench, "METHODS", {bench.OURS: bench.metagrad, "a rival": failing})
    program("--rounds", "1")
    rivals = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a rival")]
    assert [line[24:].strip() for line in rivals] == ["RuntimeError: is not implemented"] * 3


def failing_when_large(work: bench.Problem, order: int) -> bench.Run:
    return bench.dense(work, order) if work.values.dtype == torch.float64 else failing(work, order)


def test_a_rival_that_does_not_fit_says_so(monkeypatch):
    work = bench.problem(60, 200, 3)
    monkeypatch.setattr(bench, "METHODS", {bench.OURS: bench.metagrad, "a rival": failing_when_large})
    assert bench.errors(work) == {}
    results = bench.measure(work, order=1, rounds=1, bad={})
    assert results["a rival"].note == "RuntimeError: is not implemented"
    assert results[bench.OURS].peak > 0


def wrong(work: bench.Problem, order: int) -> bench.Run:
    return lambda: 1.001 * bench.dense(work, order)()


def test_a_rival_that_is_wrong_is_marked(monkeypatch):
    monkeypatch.setattr(bench, "METHODS", {bench.OURS: bench.metagrad, "a rival": wrong})
    assert bench.errors(bench.problem(60, 200, 3)) == {("a rival", k): "wrong by 0.1 %" for k in bench.ORDERS}


def test_ours_must_not_be(monkeypatch):
    monkeypatch.setattr(bench, "METHODS", {bench.OURS: wrong})
    with pytest.raises(
        SystemExit, match=r"metagrad does not agree with dense matrices at order 1: wrong by 0\.1 %"
    ):
        bench.errors(bench.problem(60, 200, 3))


def test_dense_matrices_are_not_made_where_they_do_not_fit():
    with pytest.raises(MemoryError, match="more than 6144 MiB"):
        bench.dense(bench.problem(10**5, 10, 1), 1)


KNOWN = {"lookup": {("F.embedding(sparse=True)", 3)}}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_agree_with_dense_ones(name):
    operation = OPERATIONS[name]
    notes = bench.errors(operation.make(*operation.small), methods_of(operation), operation.orders)
    # SciPy need not be there.
    assert {at for at, note in notes.items() if not note.startswith("ModuleNotFound")} == KNOWN.get(
        name, set()
    )


def test_prints_an_operation_at_each_of_its_orders(monkeypatch, capsys):
    small = {name: one._replace(large=one.small, orders=(2, 3)) for name, one in OPERATIONS.items()}
    monkeypatch.setattr(bench, "OPERATIONS", small)
    monkeypatch.setattr(sys, "argv", ["bench_sparse", "lookup", "--rounds", "1"])
    bench.main()
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert [table[:15] for table in tables] == [f"lookup, order {k}" for k in (2, 3)]
    assert "F.embedding(sparse=True)  wrong by " in tables[1]


def test_unknown_workloads_are_named(program, capsys):
    with pytest.raises(SystemExit):
        program("huge")
    assert "expected workloads among 16k" in capsys.readouterr().err
