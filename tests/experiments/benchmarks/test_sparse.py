import sys

import pytest
import torch

from experiments.benchmarks import sparse as bench
from experiments.benchmarks.sparse import DENSE, GRADIENTS, OPERATIONS, OURS


@pytest.fixture
def program(monkeypatch):
    def run(name, *arguments, methods=None, orders=None):
        one = OPERATIONS[name]
        small = one._replace(large=one.small, methods=methods or one.methods, orders=orders or one.orders)
        monkeypatch.setattr(bench, "OPERATIONS", {name: small})
        monkeypatch.setattr(sys, "argv", ["bench_sparse", *arguments, "--rounds", "1"])
        bench.main()

    return run


def test_prints_time_and_memory_of_every_method_and_order(program, capsys):
    program("16k", "16k")
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert [table[:12] for table in tables] == ["16k, order 1", "16k, order 2", "16k, order 3"]
    for table in tables:
        header, *lines = table.splitlines()
        assert header.split()[3:] == ["median", "ms", "x", "ours", "peak", "MiB", "x", "ours"]
        assert [line[:24].strip() for line in lines] == list(GRADIENTS)
        assert lines[0].split()[2::2] == ["1.00", "1.00"]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_gradients_are_of_the_stated_function(order):
    """Check t_0 = sin(v x) at one entry: t_0' = x cos, t_1 = x^2 cos^2, t_1' = -x^3 sin 2y, t_2' by autograd."""
    work = bench.matrix(1, 1, 1).double()
    v, x = work.tensors[0].clone().requires_grad_(), work.tensors[1][0]
    t = (v * x).sin().sum()
    for _ in range(order):
        (g,) = torch.autograd.grad(t, v, create_graph=True)
        t = g.square().sum()
    torch.testing.assert_close(bench.run_of(bench.by_metagrad, work, order)(), g.detach())
    if order == 2:
        torch.testing.assert_close(g, -(x**3) * torch.sin(2 * v * x))


def failing(values, x, **_):
    raise RuntimeError("is not implemented\nand more")


def wrong(values, x, **structure):
    return 1.001 * bench.by_dense_matrix(values, x, **structure)


@pytest.mark.parametrize(
    ("rival", "note"), [(failing, "RuntimeError: is not implemented"), (wrong, "wrong by 0.")]
)
def test_a_rival_that_raises_or_is_wrong_says_so(program, capsys, rival, note):
    program(
        "16k",
        "16k",
        methods={OURS: bench.by_metagrad, DENSE: bench.by_dense_matrix, "a rival": rival},
        orders=(1,),
    )
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a rival")]
    assert line[24:].strip().startswith(note)


def test_ours_must_not_be(program):
    with pytest.raises(SystemExit, match=r"metagrad does not agree with dense matrices at order 1: wrong by"):
        program("16k", "16k", methods={OURS: wrong, DENSE: bench.by_dense_matrix})


KNOWN = {"lookup": {("F.embedding(sparse=True)", 3)}}


@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.endswith("k")])
def test_operations_agree_with_dense_ones(name):
    operation = OPERATIONS[name]
    notes = bench.errors(operation.make(*operation.small), operation)
    # SciPy need not be there.
    there = {at for at, note in notes.items() if not note.startswith("ModuleNotFound")}
    assert there == KNOWN.get(name, set())
