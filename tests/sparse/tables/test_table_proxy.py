from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.func import functional_call

import metagrad as mg
from metagrad.core.substitution import replaced
from metagrad.sparse.tables.embedding import embedding, embedding_bag
from metagrad.sparse.tables.table_proxy import LocalRows
from metagrad.sparse.tables.touched import find_tables, touched_rows
from tests.sparse.bags import bags

V, D = 40, 3


@dataclass(frozen=True)
class SwappedTables:
    """A model as a pure function of parameters in which tables are represented by some of their rows."""

    params: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor]
    model: nn.Module
    stacked: bool

    def __call__(self, params, *args):
        if self.stacked:
            return torch.vmap(self._call, randomness="different")(self.rows, params, args)
        return self._call(self.rows, params, args)

    def _call(self, rows, params, args):
        own = dict(self.model.named_parameters(remove_duplicate=False))
        values = {
            id(own[name]): LocalRows(name, tuple(own[name].shape), rows[name], value).proxy()
            if name in rows
            else value
            for name, value in params.items()
        }
        with replaced(self.model, values):
            return self.model(*args)


def swap_tables(model, params, *, sparse, batch, stacked=False):
    """Represent embedding tables by the rows that a batch looks up, as ``MAML(sparse=...)`` does."""
    tables = find_tables("swap_tables(..., sparse)", model, sparse)
    call = (batch,) if isinstance(batch, torch.Tensor) else tuple(batch)
    rows = touched_rows(model, tables, [call], stacked=stacked)
    num_tasks = (call[0].shape[0],) if stacked else ()
    local = {
        name: embedding(rows[name], p) if name in rows else p.expand(*num_tasks, *p.shape)
        for name, p in params.items()
    }
    return SwappedTables(local, rows, model, stacked)


class Bags(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(V, D, **options).double()

    def forward(self, ids, *offsets):
        return torch.tanh(self.bag(ids, *offsets))


class OurOwn(nn.Module):
    """Calls metagrad's lookups on a parameter of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(V, D, dtype=torch.float64))

    def forward(self, ids):
        return embedding(ids, self.table) * embedding_bag(ids, None, self.table, mode="sum").unsqueeze(1)


IDS = torch.tensor([[3, 5], [5, 3], [7, 3], [39, 0]])
OFFSETS = torch.tensor([0, 3, 3, 6])
CASES = {
    "metagrad's lookups": (OurOwn, ["table"], (IDS,)),
    "bag sum": (lambda: Bags(mode="sum", padding_idx=3), ["bag.weight"], (IDS,)),
    "bag max": (lambda: Bags(mode="max", padding_idx=3), ["bag.weight"], (IDS,)),
    "offsets mean": (lambda: Bags(padding_idx=5), ["bag.weight"], (IDS.flatten(), OFFSETS)),
    "last offset": (
        lambda: Bags(mode="sum", include_last_offset=True),
        ["bag.weight"],
        (IDS.flatten(), torch.tensor([0, 3, 3, 8])),
    ),
}


class DenseBag(nn.EmbeddingBag):
    """``nn.EmbeddingBag`` of 2-d ids or offsets, written out."""

    def forward(self, ids, offsets=None):
        if offsets is None:
            ids, offsets = ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1])
        starts = offsets[:-1] if self.include_last_offset else offsets
        return bags(ids, starts, self.weight, mode=self.mode, padding_idx=self.padding_idx)


def dense_twin(model):
    """The same model with lookups whose dense derivatives are right."""
    if isinstance(model, Bags):
        model.bag.__class__ = DenseBag
    return model


def adapted_loss(call, params, args, steps=2):
    for _ in range(steps):
        grads = torch.autograd.grad(
            (call(params, *args) ** 2).sum(), list(params.values()), create_graph=True
        )
        params = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
    return (call(params, *args) ** 3).sum()


def dense(tensor):
    return tensor if tensor is None or type(tensor) is torch.Tensor else tensor.to_dense()


@pytest.mark.parametrize("case", CASES)
def test_adaptation_equals_dense_with_its_gradient_and_that_of_the_gradient(case):
    make, sparse, args = CASES[case]
    results = []
    for twin in (False, True):
        model = dense_twin(make()) if twin else make()
        params = dict(model.named_parameters())
        if twin:
            loss = adapted_loss(lambda params, *args: functional_call(model, params, args), params, args)  # noqa: B023
        else:
            swapped = swap_tables(model, params, sparse=sparse, batch=args)
            loss = adapted_loss(swapped, swapped.params, args)
        first = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        assert all(g.requires_grad for g in first)
        second = torch.autograd.grad(sum((g**3).sum() for g in first), list(params.values()))
        results.append([loss, *map(dense, first), *map(dense, second)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


class Uses(nn.Module):
    """Looks ids up, and does something else with the table."""

    def __init__(self, use):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.use = use

    def forward(self, ids):
        return self.emb(ids).sum() + self.use(self.emb.weight)


@pytest.mark.parametrize(
    "use",
    [
        lambda w: (torch.ones(2, D) @ w.T).sum(),
        lambda w: w[torch.tensor([1])].sum(),
        lambda w: w.detach().sum(),
        lambda w: torch.vmap(torch.sum)(w).sum(),
        lambda w: Squared.apply(w).sum(),
        lambda w: torch.einsum("vd,d->v", w, torch.ones(D)).sum(),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_any_other_use_of_a_table_is_refused_by_name(use, stacked):
    model = Uses(use)
    ids = torch.tensor([[1, 2], [3, 4]])
    with pytest.raises(ValueError, match=r"sparse=\['emb.weight'\]: the model uses the table as a whole, by"):
        swap_tables(model, dict(model.named_parameters()), sparse=["emb.weight"], batch=ids, stacked=stacked)


class Squared(torch.autograd.Function):
    """A custom Function, which function modes do not see."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * ctx.saved_tensors[0] * cotangent


def test_a_use_that_begins_later_is_refused():
    model = Uses(lambda w: 0)
    ids = torch.tensor([1, 2])
    swapped = swap_tables(model, dict(model.named_parameters()), sparse=["emb.weight"], batch=ids)
    model.use = lambda w: w.sum()
    with pytest.raises(ValueError, match=r"uses the table as a whole, by aten\.sum"):
        swapped(swapped.params, ids)


def test_a_table_outside_of_the_parameters_is_refused():
    model = Uses(lambda w: 0)
    hidden = [model.emb.weight]
    model.use = lambda w: hidden[0].norm()
    with pytest.raises(ValueError, match=r"sparse=\['emb.weight'\]: the model uses the table by norm, from"):
        swap_tables(model, dict(model.named_parameters()), sparse=["emb.weight"], batch=torch.tensor([1]))


@pytest.mark.parametrize("stacked", [False, True])
def test_ids_that_were_not_found_raise(stacked):
    model = nn.Embedding(V, D)
    ids = torch.tensor([[1, 2], [3, 4]])
    swapped = swap_tables(model, {"weight": model.weight}, sparse=["weight"], batch=ids, stacked=stacked)
    for other in (ids + 1, ids + 30, ids - 1):
        with pytest.raises(ValueError, match=r"sparse=\['weight'\]: the model looks up rows that it did not"):
            swapped(swapped.params, other)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Embedding(V, D, max_norm=1.0), r"F.embedding\(max_norm=1.0\) writes into the table"),
        (nn.Embedding(V, D, scale_grad_by_freq=True), r"F.embedding\(scale_grad_by_freq=True\) scales"),
    ],
)
def test_options_that_cannot_be_differentiated_are_refused(module, message):
    before = module.weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        swap_tables(module, {"weight": module.weight}, sparse=["weight"], batch=IDS)
    torch.testing.assert_close(module.weight.detach(), before, rtol=0, atol=0)


def test_a_checkpoint_around_a_lookup_is_refused():
    model = nn.Embedding(V, D).double()
    outer = nn.Sequential(model)
    outer.forward = lambda ids: mg.checkpoint(model, ids)
    swapped = swap_tables(outer, {"0.weight": model.weight}, sparse=["0.weight"], batch=IDS)
    with pytest.raises(ValueError, match="uses the table as a whole"):
        swapped(swapped.params, IDS)
