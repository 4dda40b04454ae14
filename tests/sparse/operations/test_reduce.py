import math

import pytest
import torch
from torch.func import grad, vmap

import metagrad as mg
from metagrad.sparse import Pattern, Segments, SparseTensor
from metagrad.sparse.operations.segments import (
    gather,
    segment_max,
    segment_mean,
    segment_softmax,
    segment_sum,
)
from tests.sparse.towers import tower

PATTERN = Pattern(torch.tensor([0, 0, 2]), torch.tensor([1, 3, 1]), (3, 4))


def matrix(*values, dtype=torch.float64):
    return SparseTensor(PATTERN, torch.tensor(values, dtype=dtype, requires_grad=True))


def test_sums_and_means_are_those_of_the_dense_matrix():
    a = matrix(1.0, 3.0, -2.0)
    dense = a.to_dense()
    for dim in (None, 0, 1, -1, -2):
        for keepdim in (False, True):
            torch.testing.assert_close(a.sum(dim, keepdim=keepdim), dense.sum(dim, keepdim=keepdim))
            torch.testing.assert_close(a.mean(dim, keepdim=keepdim), dense.mean(dim, keepdim=keepdim))


def test_maxima_are_those_of_stored_entries():
    a = matrix(-1.0, -3.0, -2.0)
    assert a.max().item() == -1.0
    assert a.max(1).tolist() == [-1.0, 0.0, -2.0]
    assert a.max(0, keepdim=True).tolist() == [[0.0, -1.0, 0.0, -3.0]]
    assert a.max(keepdim=True).shape == (1, 1)
    assert a.relu().max(1).tolist() == [0.0, 0.0, 0.0]


def test_a_row_normalised_by_its_sum_keeps_empty_rows_empty():
    a = matrix(1.0, 3.0, 2.0)
    normal = a / a.sum(1, keepdim=True)
    assert normal.to_dense().tolist() == [[0, 0.25, 0, 0.75], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert mg.gradcheck(lambda a: a / a.sum(1, keepdim=True), [a], order=3)


@pytest.mark.parametrize("p", [1, 1.5, 2, math.inf])
def test_the_norm_of_zero_has_derivatives_of_zero_at_every_order(p):
    a = matrix(0.0, 0.0, 0.0)
    (first,) = torch.autograd.grad(a.norm(p), a.values, create_graph=True)
    (second,) = torch.autograd.grad(
        (first + first**2).sum(), a.values, create_graph=True, materialize_grads=True
    )
    third = torch.autograd.grad((second + second**2 + a.values).sum(), a.values)[0] - 1
    for derivative in (first, second, third):
        assert torch.equal(derivative.detach(), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("p", [2, 4])
def test_an_entry_that_is_zero_keeps_its_curvature_in_an_even_norm(p):
    values = torch.tensor([0.0, 3.0, -4.0], dtype=torch.float64)
    got = torch.autograd.functional.hessian(lambda v: SparseTensor(PATTERN, v).norm(p), values)
    expected = torch.autograd.functional.hessian(lambda v: (v**p).sum() ** (1 / p), values)
    torch.testing.assert_close(got, expected)
    assert p == 4 or got[0, 0].item() == pytest.approx(1 / 5)


def test_an_entry_that_is_zero_is_no_nan_in_an_odd_norm():
    a = matrix(0.0, 3.0, -4.0)
    for p in (1, 1.5, 3):
        (g,) = torch.autograd.grad(a.norm(p), a.values, create_graph=True)
        assert g[0] == 0
        assert torch.autograd.grad((g**2).sum() + a.values.sum(), a.values)[0].isfinite().all()


def test_nothing_stored():
    none = torch.tensor([], dtype=torch.int64)
    a = SparseTensor(Pattern(none, none, (2, 3)), torch.zeros(0, requires_grad=True))
    for result in (a.sum(), a.mean(), a.max(), a.norm(), a.norm(math.inf)):
        assert result.item() == 0
        assert torch.autograd.grad(result, a.values)[0].shape == (0,)
    assert a.sum(1).tolist() == a.max(1).tolist() == [0, 0]


SCORES_PATTERN = Pattern(torch.tensor([0, 0, 2, 2]), torch.tensor([1, 3, 0, 1]), (3, 4))
INF = math.inf


def test_large_scores_do_not_overflow():
    a = SparseTensor(SCORES_PATTERN, torch.tensor([1000.0, 1001.0, -1000.0, -1000.0], requires_grad=True))
    expected = torch.tensor([0.0, 1.0]).softmax(0).tolist()
    assert a.softmax().values.tolist() == pytest.approx([*expected, 0.5, 0.5])
    assert a.log_softmax().values.exp().tolist() == pytest.approx([*expected, 0.5, 0.5])
    (g,) = torch.autograd.grad(a.softmax().values.square().sum(), a.values, create_graph=True)
    assert torch.autograd.grad(g.square().sum(), a.values)[0].isfinite().all()


def test_minus_infinity_is_an_entry_that_is_not_there():
    x = torch.tensor([1.0, -INF, 2.0, 0.3], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 0, 0, 0])
    kept = torch.tensor([0, 2, 3])
    short = x.detach()[kept].requires_grad_()
    function = lambda x: segment_softmax(x, ids[: len(x)], 1)  # noqa: E731
    assert function(x)[1] == 0
    for got, expected in zip(tower(function, [x]), tower(function, [short]), strict=True):
        assert got[1] == 0
        torch.testing.assert_close(got[kept], expected)


def test_a_segment_of_minus_infinity_has_weights_and_derivatives_of_zero():
    x = torch.tensor([-INF, 1.0, -INF, 2.0], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 1, 0, 1])
    weights = segment_softmax(x, ids, 3)
    assert segment_sum(weights, ids, 3).tolist() == [0, 1, 0]
    for derivative in tower(lambda x: segment_softmax(x, ids, 3), [x]):
        assert derivative.isfinite().all()
        assert derivative[[0, 2]].tolist() == [0, 0]


def test_log_weights_of_minus_infinity_are_minus_infinity_and_no_nan_comes_back():
    x = torch.tensor([-INF, -INF, -INF, 2.0], dtype=torch.float64, requires_grad=True)
    logs = SparseTensor(SCORES_PATTERN, x).log_softmax().values
    assert logs.tolist() == [-INF, -INF, -INF, 0.0]
    finite = logs.masked_fill(logs == -INF, 0)
    assert torch.autograd.grad(finite.sum(), x)[0].tolist() == [0, 0, 0, 0]


def test_equal_maxima_share_the_gradient():
    a = matrix(5.0, 5.0, -2.0)
    assert torch.autograd.grad(a.max(1).sum(), a.values)[0].tolist() == [0.5, 0.5, 1.0]
    assert torch.autograd.grad(a.max(), a.values)[0].tolist() == [0.5, 0.5, 0.0]


IDS = torch.tensor([2, 0, 2, 2, 0])
VALUES = torch.tensor([3.0, 1.0, 5.0, 4.0, 3.0], dtype=torch.float64)
SEGMENTS = Segments(IDS, 4)
both_forms = pytest.mark.parametrize("index", [(SEGMENTS,), (IDS.int(), 4)], ids=["fixed", "int32"])


@both_forms
def test_closed_forms(index):
    assert segment_sum(VALUES, *index).tolist() == [4, 0, 12, 0]
    assert segment_mean(VALUES, *index).tolist() == [2, 0, 4, 0]
    assert segment_max(VALUES, *index).tolist() == [3, 0, 5, 0]
    assert gather(torch.tensor([1.0, 2.0, 3.0, 4.0]), index[0]).tolist() == [3, 1, 3, 3, 1]
    expected = torch.cat([VALUES[s == IDS].softmax(0) for s in (0, 2)])
    torch.testing.assert_close(segment_softmax(VALUES, *index)[SEGMENTS.order], expected)


@both_forms
def test_trailing_dimensions_are_columns(index):
    columns = torch.stack([VALUES, -2 * VALUES, VALUES.sin()], 1).reshape(5, 3, 1)
    for function in (segment_sum, segment_mean, segment_max, segment_softmax):
        expected = torch.stack([function(c, *index) for c in columns[:, :, 0].T], 1)
        torch.testing.assert_close(function(columns, *index)[:, :, 0], expected)


def test_ids_may_be_batched():
    ids = torch.tensor([[0, 1, 1, 2, 0], [2, 2, 2, 2, 1]])
    x = torch.stack([VALUES, VALUES.sin()])

    def loss(x, ids):
        weights = segment_softmax(x, ids, 3)
        pooled = segment_sum(weights * x, ids, 3) + segment_mean(x, ids, 3) * segment_max(x, ids, 3)
        return (gather(pooled, ids) ** 3).sum()

    for function in (loss, grad(loss), grad(lambda x, ids: (grad(loss)(x, ids) ** 2).sum())):
        expected = torch.stack([function(a, b) for a, b in zip(x, ids, strict=True)])
        torch.testing.assert_close(vmap(function)(x, ids), expected)


def test_equal_maxima_share_the_gradient_and_keep_their_value():
    x = torch.tensor([0.1] * 7 + [-7.0], dtype=torch.float64, requires_grad=True)
    top = segment_max(x, torch.zeros(8, dtype=torch.int64), 1)
    assert top.item() == 0.1  # seven sevenths of it are not
    derivatives = []
    for function in (lambda x: segment_max(x, torch.zeros(8, dtype=torch.int64), 1).sum(), torch.amax):
        (g,) = torch.autograd.grad(function(x) ** 2, x, create_graph=True)
        derivatives.append((g, *torch.autograd.grad((g**3).sum(), x)))
    torch.testing.assert_close(*derivatives)
    assert derivatives[0][0].tolist() == pytest.approx([0.2 / 7] * 7 + [0.0])


@pytest.mark.parametrize("extreme", [float("inf"), -float("inf")])
def test_infinite_maxima_are_not_nan(extreme):
    x = torch.tensor([extreme, -float("inf"), 2.0], requires_grad=True)
    top = segment_max(x, torch.tensor([0, 0, 1]), 3)
    assert top.tolist() == [extreme, 2.0, 0.0]
    share = 0.5 if extreme < 0 else 1.0
    assert torch.autograd.grad(top.sum(), x)[0].tolist() == [share, 1 - share, 1.0]


def test_a_nan_stays_in_its_segment():
    x = torch.tensor([float("nan"), 1.0, 2.0])
    ids = torch.tensor([0, 0, 1])
    for function in (segment_max, segment_mean, segment_softmax):
        y = function(x, ids, 2)
        assert y[0].isnan()
        assert y[-1].isfinite()
