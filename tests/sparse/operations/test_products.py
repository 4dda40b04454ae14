from __future__ import annotations

import pytest
import torch

from metagrad.sparse import Pattern, SparseTensor, sddmm, spgemm, spmm

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
        (lambda: sddmm(ones(2, 4), ones(4, 3), PATTERN.to(META)), ValueError, r"the pattern on meta"),
        (
            lambda: sddmm(ones(2, 4), ones(4, 3), ones(2, 3)),
            TypeError,
            r"pattern: expected Pattern, got Tensor",
        ),
        (
            lambda: spgemm(matrix(), matrix()),
            ValueError,
            r"spgemm\(a, b\): a is \(2, 3\), so b must have 3 rows, got 2",
        ),
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
