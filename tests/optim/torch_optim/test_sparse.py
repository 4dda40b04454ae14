"""Embedding tables, whose gradients are sparse: the rows touched so far move as those of the dense optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from metagrad.optim import Lion, SparseAdam
from metagrad.sparse.tables.embedding import embedding
from tests.optim.torch_optim.cases import (
    assert_equal,
    closure_of,
    having,
    lacking,
    of_cases,
    optimizer,
    run,
    snapshot,
    warning_of_modules,
)

BATCHES = [[3, 3, 7], [1, 7], [1, 9, 9], [3], [0, 19]]
ROWS = 20


def look_up(ids, table, kind):
    if kind == "rows":
        return embedding(ids, table)
    return nn.functional.embedding(ids, table, sparse=kind == "coo")


def trained(make, kind, dtype=torch.float64, **options):
    table = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()
    opt = make([table], **options)
    for ids in BATCHES:
        # Its Hessian is diagonal, of which one probe of signs gives the exact diagonal.
        opt.step(closure_of(opt, lambda ids=ids: look_up(torch.tensor(ids), table, kind).pow(4).sum()))
    return table, opt


@pytest.mark.parametrize("kind", ["coo", "rows"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (SparseAdam, {"lr": 0.1}),
        (SparseAdam, {"lr": 0.1, "amsgrad": True}),
        (Lion, {"lr": 0.1}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_equals_the_dense_optimizer(make, options, kind):
    dense, _ = trained(make, "dense", **options)
    table, opt = trained(make, kind, **options)
    torch.testing.assert_close(table, dense, rtol=1e-12, atol=1e-14)
    assert opt.state[table]["rows"].tolist() == [0, 1, 3, 7, 9, 19]
    slots = [value for key, value in opt.state[table].items() if key not in ("step", "rows")]
    assert all(slot.shape == (6, 2) for slot in slots)


@pytest.mark.parametrize("kind", ["coo", "rows"])
@pytest.mark.parametrize(
    ("make", "counterpart", "options"),
    [
        (SparseAdam, torch.optim.Adam, {"lr": 0.1}),
    ],
)
def test_equals_torchs_dense_optimizer(make, counterpart, options, kind):
    dense, _ = trained(counterpart, "dense", **options)
    table, _ = trained(make, kind, **options)
    torch.testing.assert_close(table, dense, rtol=1e-12, atol=1e-14)


def tagger():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(ROWS, 4, sparse=True), nn.Linear(4, 3, bias=False))


def tagging(model):
    ids, labels = torch.tensor([2, 5, 5, 7]), torch.tensor([0, 1, 1, 2])
    return lambda: nn.functional.cross_entropy(model(ids), labels)


@having("sparse")
def test_rows_that_are_touched_descend_alone(case):
    model = tagger()
    with warning_of_modules(case):
        opt = optimizer(case, model)
    table = model[0].weight
    before = table.detach().clone()
    losses = run(opt, tagging(model), 5)
    assert losses[-1] < losses[0]
    assert (table != before).any(1).nonzero().flatten().tolist() == [2, 5, 7]
    assert opt.state[table]["rows"].tolist() == [2, 5, 7]


@lacking("sparse")
def test_sparse_gradients_are_refused_by_name(case):
    model = tagger()
    opt = optimizer(case, model, model.named_parameters())
    with pytest.raises(
        TypeError, match=rf"{case.name}\.step: the gradient of '0.weight' is sparse.*SparseAdam"
    ):
        run(opt, tagging(model), 1)
    assert_equal(snapshot(model), snapshot(tagger()))


@of_cases(lambda case: "sparse" in case.traits and case.name != "SparseAdam")
def test_weight_decay_of_a_table_is_refused(case):
    model = tagger()
    with warning_of_modules(case):
        opt = optimizer(case, model, weight_decay=0.1)
    with pytest.raises(ValueError, match=rf"{case.name}\.step: .*sparse, and weight_decay would move every"):
        run(opt, tagging(model), 1)


@pytest.mark.parametrize("order", ["sparse first", "dense first"])
def test_sparse_and_dense_gradients_in_turn(order):
    kinds = ["coo", "dense"] if order == "sparse first" else ["dense", "coo"]
    start = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tables = [start.clone().requires_grad_() for _ in range(2)]
    opts = [make([table], lr=0.1) for make, table in zip((SparseAdam, torch.optim.Adam), tables, strict=True)]
    for step, ids in enumerate(BATCHES):
        for table, opt, kind in zip(tables, opts, (kinds[step % 2], "dense"), strict=True):
            opt.zero_grad()
            look_up(torch.tensor(ids), table, kind).pow(4).sum().backward()
            opt.step()
    torch.testing.assert_close(*tables, rtol=1e-12, atol=1e-14)


def test_sparse_gradients_of_two_dimensions_are_refused():
    w = torch.ones(3, 3, requires_grad=True)
    w.grad = torch.eye(3).to_sparse()
    with pytest.raises(TypeError, match="2 sparse dimensions"):
        SparseAdam([w]).step()
