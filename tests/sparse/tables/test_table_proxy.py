"""Lookups of the rows that a batch touches, in the place of whole tables, as ``MAML(sparse=...)`` does it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.sparse.tables.embedding import embedding, embedding_bag
from tests.functions import Exponential
from tests.sparse.bags import bags

V, D = 40, 3
SGD = mg.optim.rules.sgd(lr=0.1)


class Bags(nn.Module):
    def __init__(self, kind=nn.EmbeddingBag, **options):
        super().__init__()
        torch.manual_seed(0)
        self.table = kind(V, D, **options).double()

    def forward(self, ids, *offsets):
        return torch.tanh(self.table(ids, *offsets))


class DenseBag(nn.EmbeddingBag):
    """``nn.EmbeddingBag`` of 2-d ids or offsets, written out."""

    def forward(self, ids, offsets=None):
        if offsets is None:
            ids, offsets = ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1])
        starts = offsets[:-1] if self.include_last_offset else offsets
        return bags(ids, starts, self.weight, mode=self.mode, padding_idx=self.padding_idx)


class OurOwn(nn.Embedding):
    """Calls metagrad's lookups on a parameter of its own."""

    def forward(self, ids):
        looked_up = embedding(ids, self.weight)
        return looked_up * embedding_bag(ids, None, self.weight, mode="sum").unsqueeze(1)


class DenseOwn(nn.Embedding):
    def forward(self, ids):
        return self.weight[ids] * self.weight[ids].sum(1, keepdim=True)


IDS = torch.tensor([[3, 5], [5, 3], [7, 3], [39, 0]])
FLAT, LAST = (IDS.flatten(), torch.tensor([0, 3, 3, 6])), (IDS.flatten(), torch.tensor([0, 3, 3, 8]))
CASES = {
    "metagrad's lookups": (OurOwn, DenseOwn, {}, (IDS,)),
    "bag sum": (nn.EmbeddingBag, DenseBag, {"mode": "sum", "padding_idx": 3}, (IDS,)),
    "bag max": (nn.EmbeddingBag, DenseBag, {"mode": "max", "padding_idx": 3}, (IDS,)),
    "offsets mean": (nn.EmbeddingBag, DenseBag, {"padding_idx": 5}, FLAT),
    "last offset": (nn.EmbeddingBag, DenseBag, {"mode": "sum", "include_last_offset": True}, LAST),
}


def maml(model, sparse=(), **options):
    return mg.MAML(model, F.mse_loss, inner=SGD, steps=2, sparse=sparse, **options)


@pytest.mark.parametrize("task_chunk", [None, 1])
@pytest.mark.parametrize("case", CASES)
def test_adaptation_equals_dense_with_its_gradient_and_that_of_the_gradient(case, task_chunk):
    sparse, dense, options, args = CASES[case]
    x = tuple(torch.stack([arg, arg]) for arg in args)
    x[0][1] = (x[0][1] + 1) % V
    y = torch.randn(2, *Bags(dense, **options)(*args).shape, dtype=torch.float64)
    x = x if len(x) > 1 else x[0]
    results = []
    for learner in (
        maml(Bags(sparse, **options), ["table.weight"], task_chunk=task_chunk),
        maml(Bags(dense, **options), task_chunk=1),
    ):
        params = list(learner.parameters())
        loss = learner(((x, y), (x, y))).loss
        (first,) = torch.autograd.grad(loss, params, create_graph=True)
        (second,) = torch.autograd.grad((first**3).sum(), params)
        results.append([loss, *(g.to_dense() for g in (first, second))])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


class Uses(nn.Module):
    """Looks ids up, and does something else with the table, or with one that is held outside of the parameters."""

    def __init__(self, use):
        super().__init__()
        self.emb, self.use = nn.Embedding(V, D), use
        self.held, self.calls = [self.emb.weight], 0

    def forward(self, ids):
        self.calls += 1
        return self.emb(ids).sum(-1) + self.use(self, self.emb.weight).sum()


ONE = torch.tensor([1])
WHOLE = "uses the table as a whole, by aten"
REFUSED = {
    "product": (lambda model, w: torch.ones(2, D) @ w.T, WHOLE),
    "row": (lambda model, w: w[ONE], WHOLE),
    "detached": (lambda model, w: w.detach(), WHOLE),
    "vmap": (lambda model, w: torch.vmap(torch.sum)(w), "uses the table as a whole"),
    "custom function": (lambda model, w: Exponential.apply(w), WHOLE),
    "einsum": (lambda model, w: torch.einsum("vd,d->v", w, torch.ones(D)), WHOLE),
    "max_norm": (
        lambda model, w: F.embedding(ONE, w, max_norm=1.0),
        r"F.embedding\(max_norm=1.0\) writes into",
    ),
    "frequencies": (
        lambda model, w: F.embedding(ONE, w, scale_grad_by_freq=True),
        r"F.embedding\(scale_grad_by_freq=True\) scales",
    ),
    "held elsewhere": (lambda model, w: model.held[0].norm(), "uses the table by norm, from"),
}
LATER = {
    "in a later call": (lambda model, w: w if model.calls > 4 else torch.zeros(()), r"by aten\.sum"),
    "in a checkpoint": (lambda model, w: mg.checkpoint(lambda ids: F.embedding(ids, w), ONE), WHOLE),
}


@pytest.mark.parametrize(
    ("use", "task_chunk"), [*((use, None) for use in REFUSED), *((use, 1) for use in REFUSED | LATER)]
)
def test_any_other_use_of_a_table_is_refused_by_name(use, task_chunk):
    use, message = (REFUSED | LATER)[use]
    ids = torch.tensor([[1, 2], [3, 4]])
    learner = maml(Uses(use), ["emb.weight"], task_chunk=task_chunk)
    before = learner.model.emb.weight.detach().clone()
    with pytest.raises(ValueError, match=rf"sparse=\['emb.weight'\]: .*{message}"):
        learner(((ids, ids / 2), (ids, ids / 2)))
    assert torch.equal(learner.model.emb.weight, before)


class Moving(nn.Module):
    """A model whose second lookup depends on an adapted parameter."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, 1, _weight=torch.zeros(V, 1))

    def forward(self, ids):
        first = self.emb(ids).squeeze(-1)
        return first + self.emb(ids + (first.abs() > 1e-3).long()).squeeze(-1)


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_ids_that_depend_on_adapted_parameters_raise(task_chunk):
    ids, ones = torch.tensor([[1, 10], [5, 20]]), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"sparse=\['emb.weight'\]: the model looks up rows that it did not"):
        maml(Moving(), ["emb.weight"], task_chunk=task_chunk)(((ids, ones), (ids, ones)))
