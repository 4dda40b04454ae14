import pytest
import torch

from metagrad.sparse import Pattern, SparseTensor, spgemm

PATTERN = Pattern(torch.tensor([0, 1]), torch.tensor([2, 0]), (2, 3))
OTHER = Pattern(torch.tensor([0, 0]), torch.tensor([0, 2]), (2, 3))


def on(pattern, *values):
    return SparseTensor(pattern, torch.tensor(values or (2.0, -3.0), requires_grad=True))


def test_spgemm_keeps_its_pattern_and_cells_that_cancel():
    row = SparseTensor(Pattern(torch.tensor([0, 0]), torch.tensor([0, 1]), (1, 2)), torch.tensor([1.0, -1.0]))
    product = spgemm(row, row.abs().t())
    assert product.values.tolist() == [0.0]
    assert spgemm(row, row.abs().t()).pattern is product.pattern


def test_spgemm_of_what_never_meets_is_empty():
    a = on(OTHER)
    product = spgemm(a, on(Pattern(torch.tensor([1]), torch.tensor([0]), (3, 2)), 1.0))
    assert product.nnz == 0
    assert torch.autograd.grad(product.values.sum(), a.values)[0].tolist() == [0.0, 0.0]


def test_equal_patterns_that_are_two_objects_are_one():
    a, b = on(PATTERN), on(Pattern(PATTERN.row, PATTERN.col, PATTERN.shape))
    assert (a + b).pattern is PATTERN
    assert (a * b).values.tolist() == [4.0, 9.0]


@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (2, 1), (2, 3)], ids=str)
def test_dense_factors_broadcast_as_torch_s(shape):
    x = torch.rand(shape) + 1
    a = on(PATTERN)
    torch.testing.assert_close((a * x).to_dense(), a.to_dense() * x)
    torch.testing.assert_close((a / x).to_dense(), a.to_dense() / x)
    assert (a * x).pattern is PATTERN


def test_cells_that_are_not_stored_stay_zero_beside_infinities_and_zeros():
    x = torch.full((2, 3), float("nan"))
    x[0, 2], x[1, 0] = 1.0, 10.0
    a = on(PATTERN)
    assert (a * x).to_dense().tolist() == [[0, 0, 2], [-30, 0, 0]]
    column = torch.tensor([[2.0], [0.0]])
    half = SparseTensor(OTHER, torch.tensor([1.0, 4.0])) / column
    assert half.to_dense().tolist() == [[0.5, 0, 2], [0, 0, 0]]
