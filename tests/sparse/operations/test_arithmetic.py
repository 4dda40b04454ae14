from __future__ import annotations

import pytest
import torch

from metagrad.sparse import Pattern, SparseTensor
from metagrad.sparse.operations.arithmetic import add, div, mul, sub

PATTERN = Pattern(torch.tensor([0, 1]), torch.tensor([2, 0]), (2, 3))
OTHER = Pattern(torch.tensor([0, 0]), torch.tensor([0, 2]), (2, 3))


def on(pattern, *values):
    return SparseTensor(pattern, torch.tensor(values or (2.0, -3.0), requires_grad=True))


def test_one_pattern_is_not_merged(monkeypatch):
    def merge(*_):
        raise AssertionError("a merge")

    for kind in ("union", "intersection"):
        monkeypatch.setattr(Pattern, kind, merge)
    a = on(PATTERN)
    for result in (a + a, a - a, a * a):
        assert result.pattern is PATTERN


def test_two_patterns_are_merged_once():
    a, b = on(PATTERN), on(OTHER)
    assert (a + b).pattern is (a - 2 * b).pattern
    assert (a + b).to_dense().tolist() == [[2, 0, -1], [-3, 0, 0]]
    assert (a * b).to_dense().tolist() == [[0, 0, -6], [0, 0, 0]]
    assert (a * b).pattern is (a * b).pattern


def test_gradients_of_merged_patterns_reach_each_on_its_own():
    a, b = on(PATTERN), on(OTHER)
    (a * b + a).values.square().sum().backward()
    assert a.grad.pattern is PATTERN
    assert b.grad.pattern is OTHER
    # (2 * -3 + 2)^2 + (-3)^2: d/da = (2 * -4 * (1 - 3), -6), d/db = (0, 2 * -4 * 2)
    assert a.grad.values.tolist() == [16.0, -6.0]
    assert b.grad.values.tolist() == [0.0, -16.0]


def test_equal_patterns_that_are_two_objects_are_one():
    a, b = on(PATTERN), on(Pattern(PATTERN.row, PATTERN.col, PATTERN.shape))
    assert (a + b).pattern is PATTERN
    assert (a * b).values.tolist() == [4.0, 9.0]


def test_blocks_of_one_size_stay_blocks():
    a = SparseTensor(PATTERN, torch.arange(4.0).reshape(2, 1, 2))
    b = SparseTensor(OTHER, torch.arange(1.0, 5.0).reshape(2, 1, 2))
    for result, expected in ((a + b, a.to_dense() + b.to_dense()), (a * b, a.to_dense() * b.to_dense())):
        assert result.block_shape == (1, 2)
        assert torch.equal(result.to_dense(), expected)
    assert (a * 2).is_blocked
    assert (a / torch.tensor(2.0)).is_blocked


def test_blocks_of_two_sizes_become_numbers():
    a = SparseTensor(Pattern.banded(2, 0), torch.arange(8.0).reshape(2, 2, 2))
    b = SparseTensor(Pattern.banded(4, 1), torch.arange(7.0))
    assert torch.equal((a + b).to_dense(), a.to_dense() + b.to_dense())
    assert torch.equal((b * a).to_dense(), a.to_dense() * b.to_dense())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,), (1, 3), (2, 1), (2, 3)], ids=str)
def test_dense_factors_broadcast_as_torch_s(shape):
    x = torch.rand(shape) + 1
    a = on(PATTERN)
    torch.testing.assert_close((a * x).to_dense(), a.to_dense() * x)
    torch.testing.assert_close((a / x).to_dense(), a.to_dense() / x)
    assert (a * x).pattern is PATTERN


@pytest.mark.parametrize("pattern", [Pattern.banded(1, 0), PATTERN.t()], ids=["one cell", "tall"])
def test_matrices_of_one_row_or_column(pattern):
    a = SparseTensor(pattern, torch.ones(pattern.nnz))
    for shape in ((pattern.shape[0], 1), (1, pattern.shape[1]), pattern.shape):
        x = torch.rand(shape)
        torch.testing.assert_close((a * x).to_dense(), a.to_dense() * x)


def test_cells_that_are_not_stored_stay_zero_beside_infinities_and_zeros():
    x = torch.full((2, 3), float("nan"))
    x[0, 2], x[1, 0] = 1.0, 10.0
    a = on(PATTERN)
    assert (a * x).to_dense().tolist() == [[0, 0, 2], [-30, 0, 0]]
    column = torch.tensor([[2.0], [0.0]])
    half = SparseTensor(OTHER, torch.tensor([1.0, 4.0])) / column
    assert half.to_dense().tolist() == [[0.5, 0, 2], [0, 0, 0]]


def test_a_sum_with_a_dense_matrix_changes_neither():
    a, x = on(PATTERN), torch.ones(2, 3)
    assert (a + x).tolist() == [[1, 1, 3], [-2, 1, 1]]
    assert x.tolist() == [[1, 1, 1], [1, 1, 1]]


A, WIDE = on(PATTERN), SparseTensor(Pattern.banded(4, 0), torch.ones(4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: add(A, WIDE), ValueError, r"add\(a, b\): a is \(2, 3\), so b must be too, got \(4, 4\)"),
        (
            lambda: add(A, torch.ones(3)),
            ValueError,
            r"a is \(2, 3\), so a dense b must be too, got \(3,\).*a.to_dense",
        ),
        (lambda: sub(A, 2), ValueError, r"sub\(a, b\): a number is added to every cell"),
        (
            lambda: mul(A, torch.ones(2)),
            ValueError,
            r"b must be \[2, 3\], \[2, 1\], \[1, 3\], \[3\] or a scalar, got \[2\]",
        ),
        (lambda: mul(A, torch.ones(4, 2, 3)), ValueError, r"got \[4, 2, 3\]"),
        (lambda: div(A, torch.ones(3, 1)), ValueError, r"div\(a, b\): a is \(2, 3\), so b must be"),
        (lambda: div(A, A), TypeError, r"div\(a, b\): b must be dense.*a.with_values\(a.values / b.values\)"),
        (lambda: add(A, A.double()), TypeError, r"add\(a, b\): a and b must have one dtype"),
        (lambda: mul(A, torch.ones(2, 3).to_sparse()), TypeError, r"b must be a strided tensor"),
        (lambda: mul(A, A.to("meta")), ValueError, r"a and b must be on one device"),
        (lambda: add(torch.ones(2, 3), A), TypeError, r"add\(a, b\): a must be a SparseTensor, got Tensor"),
        (lambda: div(1.0, A), TypeError, r"div\(a, b\): a must be a SparseTensor, got float"),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
