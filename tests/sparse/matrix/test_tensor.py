import copy
import io
import operator
import os
import pickle

import numpy as np
import pytest
import torch
from torch.func import vmap

from metagrad.sparse import Pattern, SparseTensor, softmax
from metagrad.sparse.matrix.parameter import Parameter
from tests.sparse.cases import ELEMENTWISE

PATTERN = Pattern(torch.tensor([0, 0, 2]), torch.tensor([0, 3, 1]), (3, 4))
DENSE = torch.tensor([[1.0, 0, 0, 2], [0, 0, 0, 0], [0, 3, 0, 0]])


def matrix(dtype=torch.float32, requires_grad=False):
    return SparseTensor(PATTERN, torch.tensor([1.0, 2.0, 3.0], dtype=dtype)).requires_grad_(requires_grad)


def test_what_it_is():
    a = matrix(requires_grad=True)
    assert (a.shape, a.nnz, a.dtype, a.device) == ((3, 4), 3, torch.float32, torch.device("cpu"))
    assert (a.requires_grad, a.is_leaf, a == a, a != matrix(), len({a, matrix(), a})) == (True,) * 4 + (2,)
    assert repr(a) == ("SparseTensor(shape=(3, 4), nnz=3, values=tensor([1., 2., 3.], requires_grad=True))")
    assert torch.equal(a.to_dense(), DENSE)
    assert torch.equal(a.T.to_dense(), DENSE.T)
    assert a.t().t().pattern is a.pattern


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
    with pytest.raises(TypeError, match="expected None or a SparseTensor on the same Pattern"):
        a.grad = DENSE


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


def test_moving_and_converting():
    a = matrix()
    assert a.to(torch.float64).dtype == a.double().dtype == torch.float64
    assert a.double().float().dtype == torch.float32
    assert a.to("cpu").pattern is PATTERN
    assert a.to("meta").pattern is a.double().to("meta").pattern
    with pytest.raises(TypeError, match=r"SparseTensor.to\(...\): the result must be real floating point"):
        a.to(torch.int32)


def by_torch(a):
    buffer = io.BytesIO()
    torch.save(a, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


@pytest.mark.parametrize("round_trip", [lambda a: pickle.loads(pickle.dumps(a)), by_torch])
def test_pickles(round_trip):
    a = matrix(torch.bfloat16, requires_grad=True)
    back = round_trip({"a": a, "b": a.detach()})
    assert torch.equal(back["a"].values, a.values)
    assert back["a"].requires_grad
    assert back["a"].pattern.equals(PATTERN)
    assert back["a"].pattern is back["b"].pattern


class _Forged:
    def __init__(self, function, *args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


def test_what_is_unpickled_is_checked_and_not_executed(tmp_path):
    forged = pickle.dumps(_Forged(SparseTensor, PATTERN, torch.ones(2)))
    with pytest.raises(ValueError, match="the pattern has 3 entries, so values"):
        pickle.loads(forged)
    target = tmp_path / "executed"
    torch.save({"a": matrix(), "b": _Forged(os.mkdir, str(target))}, tmp_path / "a.pt")
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        torch.load(tmp_path / "a.pt", weights_only=True)
    assert not target.exists()


A = SparseTensor(Pattern(torch.tensor([0, 1]), torch.tensor([2, 0]), (2, 3)), torch.tensor([2.0, -3.0]))
D = A.to_dense()
X = torch.arange(1.0, 7.0).reshape(2, 3)


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul])
def test_operators_meet_dense_matrices_from_both_sides(op):
    dense = torch.nn.Parameter(X.clone())
    for got, expected in ((op(A, dense), op(D, dense)), (op(dense, A), op(dense, D))):
        assert isinstance(got, SparseTensor) == (op is operator.mul)
        torch.testing.assert_close(got.to_dense() if isinstance(got, SparseTensor) else got, expected)


@pytest.mark.parametrize("number", [2, np.float64(2), np.int64(2), torch.tensor(2.0)], ids=repr)
def test_numbers_scale_from_both_sides_and_keep_the_pattern_and_the_dtype(number):
    for scaled in (number * A, A * number):
        assert scaled.values.tolist() == [4.0, -6.0]
        assert scaled.pattern is A.pattern
        assert scaled.dtype == torch.float32
    assert (A / number).values.tolist() == [1.0, -1.5]


def test_python_operators_are_torch_s():
    torch.testing.assert_close(abs(A).to_dense(), D.abs())
    torch.testing.assert_close(sum([A, A, A]).to_dense(), 3 * D)
    torch.testing.assert_close((0 - A).to_dense(), -D)
    torch.testing.assert_close(torch.ones(4, 5, 2) @ A, torch.ones(4, 5, 2) @ D)
    a = before = SparseTensor(A.pattern, A.values.clone())
    a += a
    a *= 2
    assert (a.values.tolist(), before.values.tolist()) == ([8.0, -12.0], [2.0, -3.0])


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


def test_functions_that_are_zero_at_zero_keep_the_pattern():
    for name in ELEMENTWISE:
        result = getattr(A.abs(), name)()
        assert result.pattern is A.pattern
        assert torch.equal(result.values, getattr(torch, name)(A.values.abs()))


def test_zero_to_a_power_is_torch_s():
    a = SparseTensor(A.pattern, torch.tensor([0.0, 2.0], requires_grad=True))
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
    assert abs(kept.float().mean().item() - 0.8) < 6 * (0.2 * 0.8 / n) ** 0.5
    (g,) = torch.autograd.grad((dropped.values**2).sum(), a.values, create_graph=True)
    torch.testing.assert_close(g, 2 * 1.25**2 * kept)
    torch.testing.assert_close(torch.autograd.grad((g**2).sum(), a.values)[0], 8 * 1.25**4 * kept)
    assert a.dropout(0.5, training=False) is a
    drop = lambda v: SparseTensor._of(A.pattern, v).dropout(0.5).values  # noqa: E731
    drawn = vmap(drop, randomness="same")(torch.ones(20, 2))
    assert (drawn == drawn[0]).all()
