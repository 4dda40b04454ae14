"""Linear layers with a sparse weight against torch's with a dense one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import metagrad as mg
from metagrad.sparse import Pattern, SparseTensor
from metagrad.sparse.operations.products import linear
from tests.sparse.guards import no_large_outputs
from tests.sparse.towers import assert_same_tower, tower


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) / 2


PATTERN = Pattern(torch.tensor([0, 0, 2, 3]), torch.tensor([0, 2, 1, 2]), (4, 3))


def sparse(x, values, bias=None):
    return linear(x, SparseTensor._of(PATTERN, values), bias)


def dense(x, values, bias=None):
    weight = torch.zeros(PATTERN.shape, dtype=values.dtype).index_put((PATTERN.row, PATTERN.col), values)
    return F.linear(x, weight, bias)


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3), (0, 3)])
def test_equals_a_dense_layer_at_every_order(shape):
    assert_same_tower(sparse, dense, [draw(*shape), draw(4, seed=1), draw(4, seed=2)])


def test_without_bias():
    assert_same_tower(sparse, dense, [draw(5, 3), draw(4, seed=1)])


def test_the_result_is_contiguous_as_that_of_torch():
    assert sparse(draw(2, 5, 3), draw(4)).is_contiguous()


def test_an_input_that_is_not_contiguous():
    x = draw(3, 5, 2)
    torch.testing.assert_close(sparse(x.movedim(0, -1), draw(4)), dense(x.movedim(0, -1), draw(4)))


def test_a_blocked_weight():
    pattern = Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
    weight = SparseTensor(pattern, draw(2, 2, 3))
    x = draw(5, 6, seed=1)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight.to_dense()))


@given(seed=st.integers(0, 10**6), outputs=st.integers(1, 4), inputs=st.integers(1, 4))
@settings(max_examples=8, deadline=None)
def test_derivatives_of_random_patterns(seed, outputs, inputs):
    mask = torch.rand(outputs, inputs, generator=torch.Generator().manual_seed(seed)) < 0.5
    pattern = Pattern.from_mask(mask)
    x, values, bias = (
        draw(*s, seed=seed).requires_grad_() for s in ((2, inputs), (pattern.nnz,), (outputs,))
    )
    fn = lambda x, values, bias: linear(x, SparseTensor._of(pattern, values), bias)  # noqa: E731
    assert mg.gradcheck(fn, [x, values, bias], order=3, directions=1)


def test_nothing_is_as_large_as_the_weight():
    n = 1000
    pattern = Pattern.banded(n, 1, 1)
    with no_large_outputs(4 * n * 4):
        tower(lambda x, v: linear(x, SparseTensor._of(pattern, v)), [draw(4, n), draw(pattern.nnz)])


# torch builds its forward-mode decompositions with torch.jit, on their first use.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
class TestTransforms:
    def test_tasks_with_weights_of_their_own(self):
        x, values, bias = draw(6, 5, 3), draw(6, 4, seed=1), draw(6, 4, seed=2)
        torch.testing.assert_close(torch.vmap(sparse)(x, values, bias), torch.vmap(dense)(x, values, bias))

    def test_hessian(self):
        x, values = draw(5, 3), draw(4, seed=1)
        got = torch.func.hessian(lambda v: (sparse(x, v) ** 3).sum())(values)
        torch.testing.assert_close(got, torch.func.hessian(lambda v: (dense(x, v) ** 3).sum())(values))

    def test_gradient_of_a_sparse_weight(self):
        weight, x = SparseTensor(PATTERN, draw(4, seed=1)), draw(5, 3)
        gradient = torch.func.grad(lambda w: (linear(x, w) ** 3).sum())(weight)
        assert gradient.pattern is PATTERN
        expected = torch.func.grad(lambda v: (dense(x, v) ** 3).sum())(weight.values)
        torch.testing.assert_close(gradient.values, expected)


def test_float32():
    x, values, bias = draw(5, 3), draw(4, seed=1), draw(4, seed=2)
    y = sparse(x.float(), values.float(), bias.float())
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), dense(x, values, bias), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            {"weight": torch.zeros(4, 3)},
            TypeError,
            "weight must be a SparseTensor, got Tensor",
        ),
        ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
        ({"x": draw(5, 3, dtype=torch.float32)}, TypeError, "x and weight must have one dtype"),
        ({"x": draw(5, 4)}, ValueError, r"weight is \(4, 3\), so x must be \[\.\.\., 3\], got \[5, 4\]"),
        ({"x": draw()}, ValueError, r"so x must be \[\.\.\., 3\], got \[\]"),
        ({"bias": 1.0}, TypeError, "bias must be a tensor, got float"),
        ({"bias": draw(4, dtype=torch.float32)}, TypeError, "x and bias must have one dtype"),
        ({"bias": draw(3)}, ValueError, r"weight is \(4, 3\), so bias must be \[4\], got \[3\]"),
        ({"x": draw(5, 3).to("meta")}, ValueError, "x and weight must be on one device"),
    ],
)
def test_errors(change, error, match):
    arguments = {"x": draw(5, 3), "weight": SparseTensor(PATTERN, draw(4)), "bias": draw(4), **change}
    with pytest.raises(error, match=match):
        linear(**arguments)
