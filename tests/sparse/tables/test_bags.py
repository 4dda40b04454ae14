from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from metagrad.sparse.tables.embedding import check_bags, reduce_bags

TABLE = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TABLE[5] = TABLE[2]  # equal maxima
FLAT = torch.tensor([2, 5, 2, 7, 1, 5, 2, 2, 8])
RECTANGLE = torch.tensor([[5, 2, 1], [2, 2, 2], [0, 8, 5]])
BAGS = {
    "rectangle": (RECTANGLE, None),
    "offsets": (FLAT, torch.tensor([0, 2, 2, 5])),
    "empty at both ends": (FLAT, torch.tensor([0, 0, 4, 9])),
    "no ids": (FLAT[:0], torch.tensor([0, 0])),
}


@pytest.mark.parametrize("bags", BAGS)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_values_and_gradients_are_those_of_torch(bags, mode, padding_idx):
    ids, offsets = BAGS[bags]
    results = []
    for ours in (False, True):
        table = TABLE.clone().requires_grad_()
        if ours:
            kept = None if padding_idx is None else ids != padding_idx
            y = reduce_bags(F.embedding(ids, table), offsets, mode=mode, kept=kept)
        else:
            y = F.embedding_bag(ids, table, offsets, mode=mode, padding_idx=padding_idx)
        results.append((y, *torch.autograd.grad((y**3).sum(), table)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 0, 2])])
def test_derivatives_up_to_the_third(mode, offsets):
    vectors = torch.randn(*((2, 2) if offsets is None else (4,)), 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(vectors.shape[:-1], dtype=torch.float64, requires_grad=True)
    inputs = [vectors, weights] if mode == "sum" else [vectors]

    def bags(vectors, weights=None):
        return torch.tanh(reduce_bags(vectors, offsets, mode=mode, weights=weights))

    assert mg.gradcheck(bags, inputs, order=3, directions=1)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_under_vmap(mode):
    vectors = torch.randn(4, 6, 3)
    offsets = torch.tensor([[0, 2], [0, 0], [0, 6], [0, 5]])
    reduce = lambda v, o: reduce_bags(v, o, mode=mode)  # noqa: E731
    each = torch.stack([reduce(v, o) for v, o in zip(vectors, offsets, strict=True)])
    torch.testing.assert_close(torch.vmap(reduce)(vectors, offsets), each)


def test_a_largest_that_is_nan_is_nan():
    vectors = torch.tensor([[[1.0], [torch.nan]]])
    assert reduce_bags(vectors, None, mode="max").isnan().all()


def test_shapes_and_modes_are_checked():
    call, ids = "F.embedding_bag(ids)", torch.ones(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match='mode must be "mean", "sum" or "max", got \'median\''):
        check_bags(call, ids, None, "median", None)
    with pytest.raises(ValueError, match=r"ids must be \[bags, n\] without offsets, got shape \(2,\)"):
        check_bags(call, ids[0], None, "sum", None)
    with pytest.raises(ValueError, match=r"ids must be 1-d with offsets, got shape \(1, 2\)"):
        check_bags(call, ids, torch.tensor([0]), "sum", None)
    with pytest.raises(ValueError, match=r"must have the shape of ids, \(1, 2\), got \(2,\)"):
        check_bags(call, ids, None, "sum", torch.ones(2))


def test_weights_are_for_the_sum():
    with pytest.raises(ValueError, match="per_sample_weights are for mode=\"sum\", got mode='mean'"):
        check_bags("F.embedding_bag(ids)", torch.ones(1, 2), None, "mean", torch.ones(1, 2))
