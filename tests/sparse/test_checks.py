from __future__ import annotations

import pytest
import torch

from metagrad.sparse import Pattern, Segments, SparseTensor

INDEX = torch.tensor([0, 1])
VALUES = torch.tensor([2.0, 3.0])


def test_a_shape_is_two_integers():
    for shape in ((2.0, 2), (2, 2, 2), 4, (True, 2), "22"):
        with pytest.raises(TypeError, match=r"from_coo.*: shape must be two integers, rows and columns, got"):
            SparseTensor.from_coo(INDEX, INDEX, VALUES, shape)


def test_a_shape_is_not_negative():
    with pytest.raises(ValueError, match=r"shape must not be negative, got \(-1, 2\)"):
        Pattern(INDEX[:0], INDEX[:0], (-1, 2))


def test_cells_are_numbered_by_int64():
    assert Pattern(INDEX, INDEX, (2**32, 2**31 - 1)).nnz == 2
    with pytest.raises(ValueError, match=r"a matrix of 4294967296 x 2147483648 has more than 2\^63 - 1"):
        Pattern(INDEX, INDEX, (2**32, 2**31))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.tensor([0, 2]), r"must be from 0 to 1, got 2"),
        (torch.tensor([-1, 0]), r"must be from 0 to 1, got -1"),
        (torch.tensor([[0, 1]]), r"expected a strided vector, got \(\(1, 2\), torch.strided"),
        (torch.tensor([0, 1]).to_sparse(), r"expected a strided vector, got \(\(2,\), torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "must be on one device"),
    ],
)
def test_indices_are_vectors_inside_the_shape(index, message):
    for row, col in ((index, INDEX), (INDEX, index)):
        with pytest.raises(ValueError, match=message):
            Pattern(row, col, (2, 2))


def test_a_shape_without_rows_has_no_index():
    with pytest.raises(ValueError, match="row must be empty, for there is nothing to count, got 0"):
        Pattern(INDEX[:1], INDEX[:1], (0, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_indices_are_integers(dtype):
    with pytest.raises(
        TypeError, match=rf"col: expected integers, such as \.long\(\) makes them, got {dtype}"
    ):
        Pattern(INDEX, INDEX.to(dtype), (2, 2))
    with pytest.raises(TypeError, match=r"Segments\(ids, num_segments\): ids must be a tensor of integers"):
        Segments([0, 1], 2)


def test_rows_and_columns_are_as_many():
    with pytest.raises(ValueError, match=r"one number for each entry, got \(2, 1\)"):
        Pattern(INDEX, INDEX[:1], (2, 2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor([1, 2]), r"got torch.int64. Convert it with .float\(\)"),
        (torch.tensor([1j, 2j]), r"got torch.complex64. Take .real and .imag apart"),
        (VALUES.to_sparse(), "must be a strided tensor, got torch.sparse_coo. SparseTensor.from_torch"),
        ([1.0, 2.0], "must be a tensor, got list"),
    ],
)
def test_values_are_real_floating_point(values, message):
    with pytest.raises(TypeError, match=r"from_coo\(row, col, values, shape\): values .*" + message):
        SparseTensor.from_coo(INDEX, INDEX, values, (2, 2))
