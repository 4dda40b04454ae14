"""Embedding tables with sparse gradients: their rows move as with the dense optimizer."""

import pytest
import torch
from torch import nn

from metagrad.optim import SparseAdam
from metagrad.sparse.tables.embedding import embedding
from tests.optim.torch_optim.cases import assert_equal, lacking, optimizer, run, snapshot, warning_of_modules

BATCHES = [[3, 3, 7], [1, 7], [1, 9, 9], [3], [0, 19]]
ROWS = 20


def look_up(ids, table, kind):
    if kind == "rows":
        return embedding(ids, table)
    return nn.functional.embedding(ids, table, sparse=kind == "coo")


def trained(make, kinds, **options):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(ROWS, 2, generator=generator, dtype=torch.float64).requires_grad_()
    opt = make([table], **options)
    for ids, kind in zip(BATCHES, kinds, strict=True):
        opt.zero_grad()
        look_up(torch.tensor(ids), table, kind).pow(4).sum().backward()
        opt.step()
    return table, opt.state[table]


@pytest.mark.parametrize("kind", ["coo", "rows"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_rows_move_as_by_torchs_dense_optimizer(amsgrad, kind):
    dense, _ = trained(torch.optim.Adam, ["dense"] * 5, lr=0.1, amsgrad=amsgrad)
    table, state = trained(SparseAdam, [kind] * 5, lr=0.1, amsgrad=amsgrad)
    torch.testing.assert_close(table, dense, rtol=1e-12, atol=1e-14)
    assert state["rows"].tolist() == [0, 1, 3, 7, 9, 19]
    assert all(slot.shape == (6, 2) for key, slot in state.items() if key not in ("step", "rows"))


@pytest.mark.parametrize("kinds", [["coo", "dense"], ["dense", "coo"]], ids=str)
def test_sparse_and_dense_gradients_in_turn(kinds):
    dense, _ = trained(torch.optim.Adam, ["dense"] * 5, lr=0.1)
    table, _ = trained(SparseAdam, [*kinds * 2, kinds[0]], lr=0.1)
    torch.testing.assert_close(table, dense, rtol=1e-12, atol=1e-14)


def tagger():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(ROWS, 4, sparse=True), nn.Linear(4, 3, bias=False))


def tagging(model):
    ids, labels = torch.tensor([2, 5, 5, 7]), torch.tensor([0, 1, 1, 2])
    return lambda: nn.functional.cross_entropy(model(ids), labels)


@lacking("sparse")
def test_sparse_gradients_are_refused_by_name(case):
    model = tagger()
    with warning_of_modules(case):
        opt = optimizer(case, model, model.named_parameters() if "model" not in case.traits else None)
    with pytest.raises(TypeError, match=rf"{case.name}\.step: the gradient of .* is sparse.*SparseAdam"):
        run(opt, tagging(model), 1)
    assert_equal(snapshot(model), snapshot(tagger()))


def test_sparse_gradients_of_two_dimensions_are_refused():
    w = torch.ones(3, 3, requires_grad=True)
    w.grad = torch.eye(3).to_sparse()
    with pytest.raises(TypeError, match="2 sparse dimensions"):
        SparseAdam([w]).step()
