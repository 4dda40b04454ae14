from __future__ import annotations

import math

import pytest
import torch

import metagrad as mg
from metagrad.sparse import Pattern, SparseTensor
from metagrad.sparse.operations.reduce import log_softmax, softmax
from metagrad.sparse.operations.segments import segment_softmax, segment_sum

PATTERN = Pattern(torch.tensor([0, 0, 2, 2]), torch.tensor([1, 3, 0, 1]), (3, 4))
INF = math.inf


def test_rows_and_columns_sum_to_one_where_anything_is_stored():
    a = SparseTensor(PATTERN, torch.tensor([1.0, -2.0, 0.5, 3.0]))
    torch.testing.assert_close(a.softmax().sum(1), torch.tensor([1.0, 0.0, 1.0]))
    torch.testing.assert_close(a.softmax(0).sum(0), torch.tensor([1.0, 1.0, 0.0, 1.0]))
    assert a.softmax().pattern is a.log_softmax().pattern is PATTERN


def test_it_is_torch_s_own():
    a = SparseTensor(PATTERN, torch.tensor([1.0, -2.0, 0.5, 3.0]))
    coo = torch.sparse_coo_tensor(torch.stack([PATTERN.row, PATTERN.col]), a.values, (3, 4))
    torch.testing.assert_close(a.softmax().to_dense(), torch.sparse.softmax(coo, 1).to_dense())
    torch.testing.assert_close(a.log_softmax(0).to_dense(), torch.sparse.log_softmax(coo, 0).to_dense())


def test_large_scores_do_not_overflow():
    a = SparseTensor(PATTERN, torch.tensor([1000.0, 1001.0, -1000.0, -1000.0], requires_grad=True))
    expected = torch.tensor([0.0, 1.0]).softmax(0).tolist()
    assert a.softmax().values.tolist() == pytest.approx([*expected, 0.5, 0.5])
    assert a.log_softmax().values.exp().tolist() == pytest.approx([*expected, 0.5, 0.5])
    (g,) = torch.autograd.grad(a.softmax().values.square().sum(), a.values, create_graph=True)
    assert torch.autograd.grad(g.square().sum(), a.values)[0].isfinite().all()


def tower(function, x, order=3):
    loss, found = (function(x) + function(x) ** 2).sum(), []
    for _ in range(order):
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append(g)
        loss = loss + (g + g**3).sum()
    return found


def test_minus_infinity_is_an_entry_that_is_not_there():
    x = torch.tensor([1.0, -INF, 2.0, 0.3], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 0, 0, 0])
    kept = torch.tensor([0, 2, 3])
    short = x.detach()[kept].requires_grad_()
    function = lambda x: segment_softmax(x, ids[: len(x)], 1)  # noqa: E731
    assert function(x)[1] == 0
    for got, expected in zip(tower(function, x), tower(function, short), strict=True):
        assert got[1] == 0
        torch.testing.assert_close(got[kept], expected)


def test_a_segment_of_minus_infinity_has_weights_and_derivatives_of_zero():
    x = torch.tensor([-INF, 1.0, -INF, 2.0], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 1, 0, 1])
    weights = segment_softmax(x, ids, 3)
    assert segment_sum(weights, ids, 3).tolist() == [0, 1, 0]
    for derivative in tower(lambda x: segment_softmax(x, ids, 3), x):
        assert derivative.isfinite().all()
        assert derivative[[0, 2]].tolist() == [0, 0]


def test_log_weights_of_minus_infinity_are_minus_infinity_and_no_nan_comes_back():
    x = torch.tensor([-INF, -INF, -INF, 2.0], dtype=torch.float64, requires_grad=True)
    logs = log_softmax(SparseTensor(PATTERN, x)).values
    assert logs.tolist() == [-INF, -INF, -INF, 0.0]
    finite = logs.masked_fill(logs == -INF, 0)
    assert torch.autograd.grad(finite.sum(), x)[0].tolist() == [0, 0, 0, 0]


def test_log_softmax_does_not_underflow():
    a = SparseTensor(PATTERN, torch.tensor([0.0, 500.0, 0.0, 0.0], requires_grad=True))
    assert a.log_softmax().values[0].item() == -500.0
    assert torch.autograd.grad(a.log_softmax().values[0], a.values)[0].tolist() == [1.0, -1.0, 0.0, 0.0]


def test_blocks_are_normalised_along_whole_rows():
    blocks = SparseTensor(PATTERN, torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True))
    weights = blocks.softmax()
    assert weights.pattern is blocks.scalar().pattern
    torch.testing.assert_close(weights.sum(1), torch.tensor([1.0, 1, 0, 0, 1, 1], dtype=torch.float64))
    assert mg.gradcheck(softmax, [blocks], order=2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a: softmax(a, 2), ValueError, r"softmax\(a, dim\): dim must be 0 .*got 2"),
        (lambda a: log_softmax(a, -3), ValueError, r"log_softmax\(a, dim\): dim must be 0 .*got -3"),
        (lambda a: softmax(a.values), TypeError, r"softmax\(a, dim\): a must be a SparseTensor, got Tensor"),
        (lambda a: log_softmax(a.values), TypeError, r"log_softmax\(a, dim\): a must be a SparseTensor"),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(SparseTensor(PATTERN, torch.ones(4)))
