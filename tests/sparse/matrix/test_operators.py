from __future__ import annotations

import operator

import numpy as np
import pytest
import torch
from torch.func import vmap

from metagrad.sparse import Pattern, SparseTensor
from metagrad.sparse.matrix.parameter import Parameter
from metagrad.sparse.matrix.tensor import Elementwise
from metagrad.sparse.operations import arithmetic as elementwise
from metagrad.sparse.operations.reduce import softmax
from tests.sparse.cases import zero_keeping

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


PATTERN = Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
REFUSED = [n for n in vars(Elementwise) if not n.startswith("_") and n not in zero_keeping()]


def matrix(*values):
    return SparseTensor(PATTERN, torch.tensor(values, requires_grad=True))


@pytest.mark.parametrize("name", zero_keeping())
def test_a_function_that_is_zero_at_zero_keeps_pattern_and_blocks(name):
    blocks = SparseTensor(PATTERN, torch.full((2, 1, 3), 0.3))
    result = getattr(blocks, name)()
    assert result.pattern is PATTERN
    assert torch.equal(result.values, getattr(torch, name)(blocks.values))
    assert name in getattr(Elementwise, name).__doc__


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_is_not_zero_at_zero_is_refused_with_the_way_out(name):
    a = matrix(0.5, 0.6)
    with pytest.raises(
        TypeError, match=rf"{name}\(0\) is .*a\.with_values\(a\.values\.{name}\(\)\).*to_dense"
    ):
        getattr(a, name)()
    getattr(a.values, name)()  # the way out exists


def test_the_table_has_what_torch_has_for_sparse_tensors():
    asked = {
        "relu",
        "abs",
        "sin",
        "tan",
        "tanh",
        "sinh",
        "asin",
        "atan",
        "asinh",
        "atanh",
        "expm1",
        "log1p",
        "sqrt",
    }
    assert asked <= set(zero_keeping())
    assert {"exp", "cos", "log", "sigmoid", "reciprocal"} <= set(REFUSED)


def test_zero_to_a_power_is_torch_s():
    a = matrix(0.0, 2.0)
    (g,) = torch.autograd.grad((a**2).values.sum(), a.values, create_graph=True)
    assert g.tolist() == [0.0, 4.0]
    assert torch.autograd.grad(g.sum(), a.values)[0].tolist() == [2.0, 2.0]


def test_dropout_zeroes_scales_and_masks_the_gradient():
    torch.manual_seed(0)
    n = 10_000
    a = SparseTensor(Pattern.banded(n, 0), torch.ones(n, requires_grad=True))
    dropped = a.dropout(0.2)
    assert dropped.pattern is a.pattern
    kept = dropped.values != 0
    assert set(dropped.values.tolist()) == {0.0, 1.25}
    assert abs(kept.float().mean().item() - 0.8) < 4 * (0.2 * 0.8 / n) ** 0.5
    (g,) = torch.autograd.grad((dropped.values**2).sum(), a.values, create_graph=True)
    torch.testing.assert_close(g, 2 * 1.25**2 * kept)
    torch.testing.assert_close(torch.autograd.grad((g**2).sum(), a.values)[0], 8 * 1.25**4 * kept)


def test_dropout_that_does_nothing_and_that_drops_all():
    a = matrix(2.0, 3.0)
    assert a.dropout(0.5, training=False) is a
    assert a.dropout(0.0).values.tolist() == [2.0, 3.0]
    assert a.dropout(1.0).values.tolist() == [0.0, 0.0]


def test_dropout_under_vmap_draws_as_randomness_says():
    drop = lambda v: SparseTensor._of(PATTERN, v).dropout(0.5).values  # noqa: E731
    drawn = vmap(drop, randomness="same")(torch.ones(20, 2))
    assert (drawn == drawn[0]).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda a: a**0,
            ValueError,
            r"pow\(a, exponent\): exponent must be positive, got 0: .*a\.values\*\*0",
        ),
        (lambda a: a**-1.0, ValueError, r"exponent must be positive, got -1.0"),
        (lambda a: a ** float("nan"), ValueError, r"exponent must be positive, got nan"),
        (lambda a: a**a, TypeError, r"exponent must be a number, got SparseTensor"),
        (lambda a: a ** torch.tensor(2.0), TypeError, r"exponent must be a number, got Tensor"),
        (lambda a: a.dropout(1.5), ValueError, r"dropout\(a, p\): p must be from 0 to 1, got 1.5"),
        (lambda a: a.dropout(-0.1, training=False), ValueError, r"p must be from 0 to 1, got -0.1"),
        (
            lambda a: elementwise.pow(a.values, 2),
            TypeError,
            r"pow\(a, exponent\): a must be a SparseTensor, got Tensor",
        ),
        (
            lambda a: elementwise.dropout(a.values),
            TypeError,
            r"dropout\(a, p\): a must be a SparseTensor, got Tensor",
        ),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(matrix(1.0, 2.0))
