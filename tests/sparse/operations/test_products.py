from __future__ import annotations

import pytest
import torch

from metagrad.sparse import Pattern, SparseTensor, sddmm, spgemm, spmm

PATTERN = Pattern(torch.tensor([0, 1]), torch.tensor([2, 0]), (2, 3))


def matrix(dtype=torch.float32, device="cpu"):
    return SparseTensor(PATTERN.to(device), torch.tensor([2.0, 3.0], dtype=dtype).to(device))


def ones(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


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
        (lambda: spmm(matrix(), ones(5)), ValueError, r"spmm\(a, b\): a is \(2, 3\), so b must have 3 rows"),
        (lambda: spmm(ones(2, 3), ones(3)), TypeError, r"spmm\(a, b\): a must be a SparseTensor, got Tensor"),
        (lambda: sddmm(ones(2, 4), ones(4, 4), PATTERN), ValueError, r"a must be \[2, K\] and b \[K, 3\]"),
        (
            lambda: sddmm(ones(2, 4), ones(4, 3), PATTERN.to(META)),
            ValueError,
            r"a and pattern must be on one device, got cpu and meta",
        ),
        (lambda: spgemm(matrix(), matrix()), ValueError, r"spgemm\(a, b\): b: expected 3 rows"),
        (lambda: spgemm(matrix(), ones(3, 2)), TypeError, r"spgemm\(a, b\): b must be a SparseTensor, got"),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
