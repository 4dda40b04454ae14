from __future__ import annotations

import copy
import io
import operator
import os
import pickle

import numpy as np
import pytest
import torch
from torch.func import vmap
from torch.utils import _pytree as pytree

import metagrad as mg
from metagrad.sparse import Pattern, SparseTensor
from metagrad.sparse.matrix.parameter import Parameter
from metagrad.sparse.matrix.tensor import Elementwise
from metagrad.sparse.operations import arithmetic as elementwise
from metagrad.sparse.operations.reduce import softmax
from tests.sparse.cases import zero_keeping

PATTERN = Pattern(torch.tensor([0, 0, 2]), torch.tensor([0, 3, 1]), (3, 4))
DENSE = torch.tensor([[1.0, 0, 0, 2], [0, 0, 0, 0], [0, 3, 0, 0]])
BLOCKS = torch.arange(1.0, 13.0).reshape(3, 2, 2)


def matrix(dtype=torch.float32, requires_grad=False):
    return SparseTensor(PATTERN, torch.tensor([1.0, 2.0, 3.0], dtype=dtype)).requires_grad_(requires_grad)


def test_what_it_is():
    a = matrix(requires_grad=True)
    assert (a.shape, a.size(), a.size(1), a.ndim, a.nnz) == ((3, 4), (3, 4), 4, 2, 3)
    assert (a.dtype, a.device, a.requires_grad, a.is_leaf) == (torch.float32, torch.device("cpu"), True, True)
    assert (a.block_shape, a.is_blocked) == ((1, 1), False)
    assert repr(a) == ("SparseTensor(shape=(3, 4), nnz=3, values=tensor([1., 2., 3.], requires_grad=True))")
    assert torch.equal(a.to_dense(), DENSE)


def test_what_blocks_are():
    a = SparseTensor(PATTERN, BLOCKS)
    assert (a.shape, a.nnz, a.block_shape, a.is_blocked) == ((6, 8), 12, (2, 2), True)
    assert repr(a).startswith("SparseTensor(shape=(6, 8), nnz=12, blocks=(2, 2), values=tensor([[[")
    expected = torch.zeros(6, 8)
    for row, col, block in zip(PATTERN.row.tolist(), PATTERN.col.tolist(), BLOCKS, strict=True):
        expected[2 * row : 2 * row + 2, 2 * col : 2 * col + 2] = block
    assert torch.equal(a.to_dense(), expected)
    assert torch.equal(a.t().to_dense(), expected.T)
    assert a.t().is_blocked
    assert a.scalar().scalar() is not a
    assert torch.equal(a.scalar().to_dense(), expected)


@pytest.mark.parametrize(
    ("pattern", "values", "error", "message"),
    [
        (DENSE, torch.ones(3), TypeError, "pattern must be a Pattern, got Tensor"),
        (PATTERN, torch.ones(2), ValueError, r"3 entries, so values must have shape \[3\], .* got \[2\]"),
        (PATTERN, torch.ones(3, 1), ValueError, r"or \[3, p, q\] for blocks, got \[3, 1\]"),
        (PATTERN, torch.ones(3, dtype=torch.int64), TypeError, "values must be real floating point"),
        (
            PATTERN,
            torch.ones(3, device="meta"),
            ValueError,
            "the pattern is on cpu and the values are on meta",
        ),
    ],
)
def test_parts_that_do_not_fit(pattern, values, error, message):
    with pytest.raises(error, match=message):
        SparseTensor(pattern, values)


def test_the_transpose_is_its_own_transpose():
    a = matrix()
    assert torch.equal(a.T.to_dense(), DENSE.T)
    assert a.t().t().pattern is a.pattern
    assert torch.equal(a.t().t().values, a.values)


def test_gradients_are_on_the_same_pattern():
    a = matrix(torch.float64, requires_grad=True)
    assert a.grad is None
    (a.to_dense() ** 3).sum().backward()
    assert a.grad is not None
    assert a.grad.pattern is PATTERN
    assert torch.equal(a.grad.values, 3 * a.values.detach() ** 2)
    a.grad = None
    assert a.values.grad is None
    a.grad = matrix(torch.float64)
    assert a.values.grad.tolist() == [1, 2, 3]
    with pytest.raises(TypeError, match="a gradient must be a SparseTensor on the same Pattern, or None"):
        a.grad = DENSE


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_backward_from_a_matrix_through_all_orders():
    a = matrix(torch.float64, requires_grad=True)
    cube = a.with_values(a.values**3)
    cube.retain_grad()
    cube.backward(a, create_graph=True)  # d/da of sum(a0 a^3) at a0 = a: 3 a^3
    assert torch.equal(a.grad.values.detach(), 3 * a.values.detach() ** 3)
    assert a.grad.requires_grad
    (second,) = torch.autograd.grad(a.grad.values.pow(2).sum(), a.values)
    assert torch.allclose(second, 54 * a.values.detach() ** 5, rtol=1e-14)  # (9 a^6)'
    assert cube.grad.pattern is PATTERN
    a.grad = None  # the gradient of create_graph refers to its leaf
    with pytest.raises(
        TypeError, match=r"backward\(gradient\): gradient must be a SparseTensor on the same Pattern"
    ):
        cube.backward(cube.values)


def test_trees_take_and_return_it():
    a = matrix(torch.float64, requires_grad=True)
    leaves, spec = pytree.tree_flatten({"w": a})
    assert leaves == [a.values]
    assert pytree.tree_unflatten(leaves, spec)["w"].pattern is PATTERN
    grads = mg.grad((a.to_dense() ** 3).sum(), {"w": a}, create_graph=True)
    assert isinstance(grads["w"], SparseTensor)
    assert grads["w"].pattern is PATTERN
    again = mg.grad((grads["w"].values ** 3).sum(), {"w": a})
    assert torch.allclose(again["w"].values, 3 * (3 * a.values**2) ** 2 * 6 * a.values)
    under_func = torch.func.grad(lambda w: (w.to_dense() ** 3).sum())(a.detach())
    assert torch.equal(under_func.values, grads["w"].values)


def test_copies_that_share_and_copies_that_do_not():
    a = matrix(requires_grad=True)
    assert a.detach().values.data_ptr() == a.values.data_ptr()
    assert not a.detach().requires_grad
    assert a.clone().values.data_ptr() != a.values.data_ptr()
    assert a.clone().requires_grad
    deep = copy.deepcopy({"a": a})["a"]
    assert deep.pattern is PATTERN
    assert deep.requires_grad
    assert deep.values.data_ptr() != a.values.data_ptr()
    assert copy.copy(a).values is a.values


def test_moving_and_converting():
    a = matrix()
    assert a.to(torch.float64).dtype == a.double().dtype == torch.float64
    assert a.double().float().dtype == torch.float32
    assert a.to("cpu").pattern is PATTERN
    assert a.to("meta", torch.float16).pattern.device == torch.device("meta")
    assert a.to("meta").pattern is a.double().to("meta").pattern
    assert a.to(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(
        TypeError, match=r"SparseTensor.to\(...\): the result must be real floating point, got torch.int32"
    ):
        a.to(torch.int32)


def test_equality_and_hash_are_those_of_the_object():
    a, b = matrix(), matrix()
    assert a == a
    assert a != b
    assert len({a, b, a}) == 2


def round_trips():
    def by_pickle(a):
        return pickle.loads(pickle.dumps(a))

    def by_torch(a):
        buffer = io.BytesIO()
        torch.save(a, buffer)
        return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)

    return [by_pickle, by_torch]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("round_trip", round_trips())
def test_pickles(round_trip, dtype):
    a = matrix(dtype, requires_grad=True)
    back = round_trip({"a": a, "b": a.detach(), "blocks": SparseTensor(PATTERN, BLOCKS)})
    assert torch.equal(back["a"].values, a.values)
    assert back["a"].requires_grad
    assert back["a"].pattern.equals(PATTERN)
    assert back["a"].pattern is back["b"].pattern is back["blocks"].pattern
    assert torch.equal(back["blocks"].values, BLOCKS)


class _Forged:
    def __init__(self, function, *args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


def test_what_is_unpickled_is_checked():
    forged = pickle.dumps(_Forged(SparseTensor, PATTERN, torch.ones(2)))
    with pytest.raises(ValueError, match="the pattern has 3 entries, so values"):
        pickle.loads(forged)
    out_of_range = pickle.dumps(_Forged(Pattern, torch.tensor([7]), torch.tensor([0]), (2, 2)))
    with pytest.raises(ValueError, match="row must be from 0 to 1, got 7"):
        pickle.loads(out_of_range)


def test_a_malicious_pickle_is_not_executed(tmp_path):
    target = tmp_path / "executed"
    torch.save({"a": matrix(), "b": _Forged(os.mkdir, str(target))}, tmp_path / "a.pt")
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        torch.load(tmp_path / "a.pt", weights_only=True)
    assert not target.exists()


def test_torch_refuses_it_with_the_way_out():
    a = matrix()
    with pytest.raises(TypeError, match=r"torch's exp does not take a SparseTensor.*\.to_dense\(\)"):
        torch.exp(a)
    with pytest.raises(TypeError, match=r"nn.Parameter\(a\): .* Use metagrad.sparse.Parameter\(a\)"):
        torch.nn.Parameter(a)


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
        (
            lambda: A + 1,
            ValueError,
            r"add\(a, b\): a number is added to every cell.*with_values\(a.values \+ 1\)",
        ),
        (
            lambda: torch.ones(2, 3) @ A,
            ValueError,
            r"x @ a: a is \(2, 3\), so x must be \[\.\.\., 2\], got \[2, 3\]",
        ),
        (lambda: np.ones((2, 2)) @ A, TypeError, r"x @ a: x must be a tensor, got ndarray"),
        (lambda: A @ np.ones(3), TypeError, r"a @ b: b must be a SparseTensor, got ndarray.*from_scipy"),
        (lambda: A @ torch.ones(4), ValueError, r"b must have 3 rows, got 4"),
        (lambda: A * (1 + 2j), TypeError, r"mul\(a, b\): b must be a SparseTensor, got complex"),
        (lambda: torch.relu(A), TypeError, r"torch's relu does not take a SparseTensor"),
    ],
)
def test_what_would_be_dense_or_means_nothing_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


OPERANDS_PATTERN = Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
REFUSED = [n for n in vars(Elementwise) if not n.startswith("_") and n not in zero_keeping()]


def operand(*values):
    return SparseTensor(OPERANDS_PATTERN, torch.tensor(values, requires_grad=True))


@pytest.mark.parametrize("name", zero_keeping())
def test_a_function_that_is_zero_at_zero_keeps_pattern_and_blocks(name):
    blocks = SparseTensor(OPERANDS_PATTERN, torch.full((2, 1, 3), 0.3))
    result = getattr(blocks, name)()
    assert result.pattern is OPERANDS_PATTERN
    assert torch.equal(result.values, getattr(torch, name)(blocks.values))
    assert name in getattr(Elementwise, name).__doc__


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_is_not_zero_at_zero_is_refused_with_the_way_out(name):
    a = operand(0.5, 0.6)
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
    a = operand(0.0, 2.0)
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
    a = operand(2.0, 3.0)
    assert a.dropout(0.5, training=False) is a
    assert a.dropout(0.0).values.tolist() == [2.0, 3.0]
    assert a.dropout(1.0).values.tolist() == [0.0, 0.0]


def test_dropout_under_vmap_draws_as_randomness_says():
    drop = lambda v: SparseTensor._of(OPERANDS_PATTERN, v).dropout(0.5).values  # noqa: E731
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
        call(operand(1.0, 2.0))
