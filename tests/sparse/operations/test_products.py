from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from metagrad.sparse import Pattern, SparseTensor, sddmm, spgemm, spmm
from metagrad.sparse.operations.products import linear
from tests.sparse.guards import no_large_outputs
from tests.sparse.towers import assert_same_tower, tower

PATTERN = Pattern(torch.tensor([0, 1]), torch.tensor([2, 0]), (2, 3))


def matrix(dtype=torch.float32, device="cpu"):
    return SparseTensor(PATTERN.to(device), torch.tensor([2.0, 3.0], dtype=dtype).to(device))


def ones(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


def test_spmm_of_a_vector_a_matrix_and_a_batch():
    b = torch.arange(12.0).reshape(2, 3, 2)
    assert spmm(matrix(), b[0, :, 0]).tolist() == [8, 0]
    assert spmm(matrix(), b[0]).tolist() == [[8, 10], [0, 3]]
    assert spmm(matrix(), b).tolist() == [[[8, 10], [0, 3]], [[20, 22], [18, 21]]]


def test_strided_operands_may_lie_in_memory_as_they_like():
    b = torch.arange(12.0).reshape(2, 6).T[::2]
    assert not b.is_contiguous()
    torch.testing.assert_close(spmm(matrix(), b), matrix().to_dense() @ b)
    expanded = ones(3, 1).expand(3, 4)
    torch.testing.assert_close(spmm(matrix(), expanded), matrix().to_dense() @ expanded)
    a, b = torch.arange(8.0).reshape(4, 2).T, torch.arange(24.0).reshape(3, 8)[:, ::2].T
    torch.testing.assert_close(sddmm(a, b, PATTERN).values, (a @ b)[PATTERN.row, PATTERN.col])


def test_blocks_multiply_as_their_numbers():
    blocks = SparseTensor(PATTERN, torch.arange(8.0).reshape(2, 2, 2))
    torch.testing.assert_close(spmm(blocks, torch.eye(6)), blocks.to_dense())
    torch.testing.assert_close(spgemm(blocks, blocks.t()).to_dense(), blocks.to_dense() @ blocks.to_dense().T)


def test_spgemm_keeps_its_pattern_and_cells_that_cancel():
    row = SparseTensor(Pattern(torch.tensor([0, 0]), torch.tensor([0, 1]), (1, 2)), torch.tensor([1.0, -1.0]))
    column = SparseTensor(
        Pattern(torch.tensor([0, 1]), torch.tensor([0, 0]), (2, 1)), torch.tensor([5.0, 5.0])
    )
    product = spgemm(row, column)
    assert product.values.tolist() == [0.0]
    assert spgemm(row, column).pattern is product.pattern


def test_spgemm_of_what_never_meets_is_empty():
    diagonal = SparseTensor(Pattern(torch.tensor([0]), torch.tensor([0]), (2, 2)), ones(1).requires_grad_())
    corner = SparseTensor(Pattern(torch.tensor([1]), torch.tensor([1]), (2, 2)), ones(1))
    product = spgemm(diagonal, corner)
    assert product.nnz == 0
    assert torch.autograd.grad(product.values.sum(), diagonal.values)[0].tolist() == [0.0]


META = "meta"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: spmm(matrix(), ones(5)),
            ValueError,
            r"spmm\(a, b\): a is \(2, 3\), so b must have 3 rows, got 5",
        ),
        (lambda: spmm(matrix(), ones()), ValueError, r"b must have 3 rows, got a scalar"),
        (lambda: spmm(matrix(), ones(3).double()), TypeError, r"a and b must have one dtype.*\.to\(dtype\)"),
        (lambda: spmm(matrix(), ones(3, device=META)), ValueError, r"a and b must be on one device"),
        (lambda: spmm(ones(2, 3), ones(3)), TypeError, r"spmm\(a, b\): a must be a SparseTensor, got Tensor"),
        (
            lambda: sddmm(ones(2, 4), ones(4, 4), PATTERN),
            ValueError,
            r"a must be \[2, K\] and b \[K, 3\], got \[2, 4\]",
        ),
        (lambda: sddmm(ones(4), ones(4, 3), PATTERN), ValueError, r"got \[4\] and \[4, 3\]"),
        (lambda: sddmm(ones(2, 4), ones(4, 3), PATTERN.to(META)), ValueError, r"the pattern on meta"),
        (
            lambda: sddmm(ones(2, 4), ones(4, 3), ones(2, 3)),
            TypeError,
            r"pattern must be a Pattern, got Tensor",
        ),
        (
            lambda: spgemm(matrix(), matrix()),
            ValueError,
            r"spgemm\(a, b\): a is \(2, 3\), so b must have 3 rows, got 2",
        ),
        (lambda: spgemm(matrix(), matrix().t().double()), TypeError, r"spgemm.*one dtype"),
        (
            lambda: spgemm(matrix(), ones(3, 2)),
            TypeError,
            r"spgemm\(a, b\): b must be a SparseTensor, got Tensor",
        ),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) / 2


WEIGHT_PATTERN = Pattern(torch.tensor([0, 0, 2, 3]), torch.tensor([0, 2, 1, 2]), (4, 3))


def sparse(x, values, bias=None):
    return linear(x, SparseTensor._of(WEIGHT_PATTERN, values), bias)


def dense(x, values, bias=None):
    cells = (WEIGHT_PATTERN.row, WEIGHT_PATTERN.col)
    weight = torch.zeros(WEIGHT_PATTERN.shape, dtype=values.dtype).index_put(cells, values)
    return F.linear(x, weight, bias)


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3), (0, 3)])
def test_equals_a_dense_layer_at_every_order(shape):
    assert_same_tower(sparse, dense, [draw(*shape), draw(4, seed=1), draw(4, seed=2)])


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


def test_nothing_is_as_large_as_the_weight():
    n = 1000
    pattern = Pattern.banded(n, 1, 1)
    with no_large_outputs(4 * n * 4):
        tower(lambda x, v: linear(x, SparseTensor._of(pattern, v)), [draw(4, n), draw(pattern.nnz)])


class TestTransforms:
    def test_tasks_with_weights_of_their_own(self):
        x, values, bias = draw(6, 5, 3), draw(6, 4, seed=1), draw(6, 4, seed=2)
        torch.testing.assert_close(torch.vmap(sparse)(x, values, bias), torch.vmap(dense)(x, values, bias))

    def test_hessian(self):
        x, values = draw(5, 3), draw(4, seed=1)
        got = torch.func.hessian(lambda v: (sparse(x, v) ** 3).sum())(values)
        torch.testing.assert_close(got, torch.func.hessian(lambda v: (dense(x, v) ** 3).sum())(values))

    def test_gradient_of_a_sparse_weight(self):
        weight, x = SparseTensor(WEIGHT_PATTERN, draw(4, seed=1)), draw(5, 3)
        gradient = torch.func.grad(lambda w: (linear(x, w) ** 3).sum())(weight)
        assert gradient.pattern is WEIGHT_PATTERN
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
    arguments = {"x": draw(5, 3), "weight": SparseTensor(WEIGHT_PATTERN, draw(4)), "bias": draw(4), **change}
    with pytest.raises(error, match=match):
        linear(**arguments)
