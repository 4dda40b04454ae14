import pytest
import torch
from torch.func import grad, vmap

from metagrad.sparse import Segments
from metagrad.sparse.operations.segments import (
    gather,
    segment_max,
    segment_mean,
    segment_softmax,
    segment_sum,
)

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
