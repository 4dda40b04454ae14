import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from metagrad.sparse.tables.touched import touched_rows, unique_rows


class Restless(nn.Module):
    """Draws random numbers and writes into buffers, in place and by name."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("counts", torch.zeros(50))
        self.register_buffer("last", torch.zeros(2))
        self.seen = []

    def forward(self, ids):
        self.calls += 1
        self.counts[ids] = self.calls
        torch.add(self.last, 1, out=self.last)
        self.last = self.last + ids[0]
        torch.randperm(3, generator=self.generator)
        self.seen.append((self.calls.item(), self.counts.sum().item(), self.last.sum().item()))
        return self.drop(self.norm(self.emb(ids)))


def test_buffers_and_random_generators_are_left_as_they_were():
    model = Restless()
    buffers = dict(model.named_buffers())
    before, generator = copy.deepcopy(model.state_dict()), model.generator.get_state()
    torch.manual_seed(0)
    random = torch.get_rng_state()
    rows = touched_rows(model, {"emb.weight": model.emb.weight}, [(torch.tensor([7, 2, 7]),)])
    assert rows["emb.weight"].tolist() == [2, 7]
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model.generator.get_state(), generator)
    assert all(value is buffers[name] for name, value in model.named_buffers())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert model.seen == [pytest.approx((1.0, 2.0, 16.0), rel=1e-5)]  # the forward reads its own writes
    assert all(p.grad is None for p in model.parameters())


def test_the_pass_can_be_left_by_an_error():
    model = Restless()
    buffers = dict(model.named_buffers())
    with pytest.raises(IndexError):
        touched_rows(model, {"emb.weight": model.emb.weight}, [(torch.tensor([50, 2]),)])
    assert all(value is buffers[name] for name, value in model.named_buffers())


def test_rows_of_several_calls_are_joined():
    model = nn.Embedding(20, 2)
    tasks = torch.tensor([[3, 1], [2, 2]])
    calls = [(tasks,), (torch.tensor([[1, 9], [2, 2]]),)]
    assert touched_rows(model, {"weight": model.weight}, calls)["weight"].tolist() == [1, 2, 3, 9]
    stacked = touched_rows(model, {"weight": model.weight}, calls, stacked=True)
    assert stacked["weight"].tolist() == [[1, 3, 9], [2, 2, 2]]


def test_a_table_that_is_never_looked_up_has_one_row():
    model = nn.Sequential(nn.Embedding(20, 2))
    model.forward = lambda x: x
    tables = {"0.weight": model[0].weight}
    assert touched_rows(model, tables, [(torch.zeros(3),)])["0.weight"].tolist() == [0]
    assert touched_rows(model, tables, [(torch.zeros(3, 1),)], stacked=True)["0.weight"].tolist() == [[0]] * 3


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_unique_rows_are_sorted_and_filled_up_with_the_last(tasks):
    expected = [sorted(set(task)) for task in tasks]
    size = max(map(len, expected))
    expected = [task + task[-1:] * (size - len(task)) for task in expected]
    assert unique_rows(torch.tensor(tasks)).tolist() == expected
