import sys
from dataclasses import dataclass

import pytest
import torch

from experiments.benchmarks import sparse_support as support
from experiments.benchmarks.sparse_support import (
    OPERATIONS,
    Form,
    Forms,
    Leaf,
    MatrixOperation,
    Setting,
    StridedOperation,
)
from tests.functions import custom_function

N = 400


Halved = custom_function(torch.square, lambda x: x)


class Detached(torch.autograd.Function):
    """The square, whose derivative is silently constant."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (2 * grad * x).detach()


def fail(x):
    raise NotImplementedError("not here")


def through_a_matrix(x):
    return (torch.eye(N) * x)[range(N), range(N)].square() if len(x) == N else x.square()


def unused(x):
    return x.detach().square() + 0 * x


def operation(function) -> StridedOperation:
    def write(setting: Setting) -> Forms:
        leaves = [Leaf(setting.numbers(setting.n), lambda gradient: gradient)]
        right = Form(torch.square, leaves)
        return Forms(right, function and Form(function, leaves), right, setting.n**2)

    return StridedOperation("square", write)


@pytest.fixture
def answers(monkeypatch):
    def run(function) -> support.Row:
        monkeypatch.setattr(support, "OPERATIONS", [operation(function)])
        monkeypatch.setattr(support, "LARGE", N)
        (row,) = support.capabilities()
        return row

    return run


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (torch.square, ["ok", "ok", "ok"]),
        (Halved.apply, ["wrong", "wrong", "wrong"]),
        (Detached.apply, ["ok", "cut", "cut"]),
        (fail, ["error", "error", "error"]),
        (through_a_matrix, ["dense", "dense", "dense"]),
        (lambda x: x.detach(), ["cut", "cut", "cut"]),
        (unused, ["wrong", "wrong", "wrong"]),
        (None, ["-", "-", "-"]),
    ],
)
def test_what_a_cell_says(answers, function, expected):
    row = answers(function)
    assert row.torch == expected
    assert row.metagrad == ["ok", "ok", "ok"]
    assert row.kernel == "-"


@dataclass(frozen=True)
class OursAlone:
    """An operation without torch's answer, which takes most of the time."""

    operation: MatrixOperation | StridedOperation

    def __getattr__(self, name: str):
        return getattr(self.operation, name)

    def forms(self, setting: Setting, layout: str) -> Forms:
        return self.operation.forms(setting, layout)._replace(torch=None)


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "OPERATIONS", [OursAlone(operation) for operation in OPERATIONS])
        return support.capabilities()


@pytest.mark.slow
def test_ours_is_right_and_sparse_everywhere(rows):
    assert len(rows) == sum(len(operation.layouts) for operation in OPERATIONS)
    assert {row.operation: row.metagrad for row in rows if row.metagrad != ["ok"] * 3} == {}


@pytest.mark.slow
def test_kernels_are_those_that_ran(rows):
    kernels = {row.operation: row.kernel for row in rows}
    assert kernels["A @ x"] == kernels["segment mean"] == "csr"
    assert kernels["A * B"] == "-"


def test_the_program_fails_where_ours_is_not_right(monkeypatch):
    row = support.Row("A @ x", "COO", "cpu", ["ok"] * 3, ["ok", "ok", "wrong"], "csr")
    monkeypatch.setattr(support, "capabilities", lambda device: [row])
    monkeypatch.setattr(sys, "argv", ["support"])
    with pytest.raises(SystemExit, match="1"):
        support.main()
