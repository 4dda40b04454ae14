from __future__ import annotations

import operator

import numpy as np
import pytest
import torch

from metagrad.sparse import Pattern, SparseTensor
from metagrad.sparse.matrix.parameter import Parameter
from metagrad.sparse.operations.reduce import softmax

A = SparseTensor(Pattern(torch.tensor([0, 1]), torch.tensor([2, 0]), (2, 3)), torch.tensor([2.0, -3.0]))
D = A.to_dense()
X = torch.arange(1.0, 7.0).reshape(2, 3)


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul])
@pytest.mark.parametrize("dense", [X, torch.nn.Parameter(X.clone())], ids=["tensor", "parameter"])
def test_operators_meet_dense_matrices_from_both_sides(op, dense):
    for got, expected in ((op(A, dense), op(D, dense)), (op(dense, A), op(dense, D))):
        assert isinstance(got, SparseTensor) == (op is operator.mul)
        torch.testing.assert_close(got.to_dense() if isinstance(got, SparseTensor) else got, expected)


@pytest.mark.parametrize(
    "number", [2, 2.0, np.float32(2), np.float64(2), np.int64(2), torch.tensor(2.0)], ids=repr
)
def test_numbers_scale_from_both_sides_and_keep_the_pattern_and_the_dtype(number):
    for scaled in (number * A, A * number):
        assert scaled.values.tolist() == [4.0, -6.0]
        assert scaled.pattern is A.pattern
        assert scaled.dtype == torch.float32
    assert (A / number).values.tolist() == [1.0, -1.5]


def test_python_operators_are_torch_s():
    torch.testing.assert_close((-A).to_dense(), -D)
    torch.testing.assert_close(abs(A).to_dense(), D.abs())
    torch.testing.assert_close((A**2).to_dense(), D**2)
    torch.testing.assert_close(sum([A, A, A]).to_dense(), 3 * D)
    torch.testing.assert_close((0 - A).to_dense(), -D)
    torch.testing.assert_close(A @ X.T, D @ X.T)
    torch.testing.assert_close(X.T @ A, X.T @ D)
    torch.testing.assert_close(torch.ones(4, 5, 2) @ A, torch.ones(4, 5, 2) @ D)
    torch.testing.assert_close((A @ A.t()).to_dense(), D @ D.T)


def test_a_parameter_is_taken_where_a_matrix_is():
    weight = Parameter(A)
    for got, expected in (
        (weight + A, 2 * A),
        (A + weight, 2 * A),
        (2 * weight, 2 * A),
        (A * weight, A**2),
        (weight @ A.t(), A @ A.t()),
        (A.t() @ weight, A.t() @ A),
        (weight.relu(), A.relu()),
        (-weight, -A),
        (softmax(weight), A.softmax()),
    ):
        assert isinstance(got, SparseTensor)
        torch.testing.assert_close(got.to_dense(), expected.to_dense())
    torch.testing.assert_close(X.T @ weight, X.T @ D)
    torch.testing.assert_close(weight.sum(1), D.sum(1))
    (weight @ X.T).square().sum().backward()
    assert weight.values.grad is not None


def test_in_place_operators_make_a_new_matrix():
    a = before = SparseTensor(A.pattern, A.values.clone())
    a += a
    a *= 2
    assert a.values.tolist() == [8.0, -12.0]
    assert before.values.tolist() == [2.0, -3.0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: 1 / A, TypeError, r"x / a: .*its zeros would divide.*with_values\(1 / a.values\)"),
        (lambda: X / A, TypeError, r"its zeros would divide"),
        (
            lambda: A + 1,
            ValueError,
            r"add\(a, b\): a number is added to every cell.*with_values\(a.values \+ 1\)",
        ),
        (lambda: 1 - A, ValueError, r"a number is added to every cell"),
        (
            lambda: torch.ones(2, 3) @ A,
            ValueError,
            r"x @ a: a is \(2, 3\), so x must be \[\.\.\., 2\], got \[2, 3\]",
        ),
        (lambda: torch.tensor(1.0) @ A, ValueError, r"x must be \[\.\.\., 2\], got \[\]"),
        (lambda: np.ones((2, 2)) @ A, TypeError, r"x @ a: x must be a tensor, got ndarray"),
        (lambda: A @ np.ones(3), TypeError, r"a @ b: b must be a SparseTensor, got ndarray.*from_scipy"),
        (lambda: A @ torch.ones(4), ValueError, r"b must have 3 rows, got 4"),
        (lambda: np.ones((2, 3)) * A, TypeError, r"mul\(a, b\): b must be a SparseTensor, got ndarray"),
        (lambda: A + "one", TypeError, r"add\(a, b\): b must be a SparseTensor, got str"),
        (lambda: A * (1 + 2j), TypeError, r"mul\(a, b\): b must be a SparseTensor, got complex"),
        (lambda: torch.relu(A), TypeError, r"torch's relu does not take a SparseTensor"),
    ],
)
def test_what_would_be_dense_or_means_nothing_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
