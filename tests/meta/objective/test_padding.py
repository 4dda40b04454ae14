"""Padding does not change the losses and meta-gradients of tasks."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.tasks import Batch, FewShot
from tests.marks import covering
from tests.meta.textbook import assert_learns_as, learner, textbook


def tasks() -> Batch:
    x, labels = torch.randn(60, 3, dtype=torch.float64), torch.arange(60) % 5
    return FewShot((x, labels), ways=(2, 4), shots=(1, 3), queries=2).sample(7)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def without_padding(examples):
    """Return the inputs and the targets of each task as lists."""
    return list(zip(*((x[m], y[m]) for x, y, m in zip(*examples, examples.mask, strict=True)), strict=True))


@pytest.mark.parametrize(
    ("order", "chunk", "memory"),
    covering([1, 2], [None, 1], ["full", "step", "sqrt"], fast=lambda o, c, m: o == 2 or m == "full"),
)
def test_meta_gradients_are_those_of_the_tasks_alone(order, chunk, memory):
    batch, net = tasks(), model()
    assert not batch.support.mask.all()
    assert not batch.query.mask.all()
    maml = learner(mg.MAML, net, F.cross_entropy, order=order, memory=memory, task_chunk=chunk)
    alone = SimpleNamespace(support=without_padding(batch.support), query=without_padding(batch.query))
    losses = textbook(net, F.cross_entropy, alone, lr=0.1, steps=2, order=order)
    assert_learns_as(maml(batch), losses, net.parameters())


def maml_of(*layers: nn.Module, loss_fn=F.cross_entropy) -> mg.MAML:
    net = nn.Sequential(nn.Linear(3, 4), *layers).double()
    return learner(mg.MAML, net, loss_fn)


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"])
def test_padding_that_would_count_in_batch_statistics_is_refused(loss_fn):
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    with pytest.raises(ValueError, match=r"MAML\(batch\): .* ignored .* statistics of 1 \(BatchNorm1d\)"):
        maml_of(norm, loss_fn=loss_fn)(tasks())


def test_statistics_that_padding_does_not_change_are_fine():
    maml_of(nn.BatchNorm1d(4).eval())(tasks())
    maml_of(nn.GroupNorm(2, 4))(tasks())
    whole = tasks()
    part = whole.support._replace(x=whole.support.x[:, :2], y=whole.support.y[:, :2])
    assert part.mask.all()
    maml_of(nn.BatchNorm1d(4, track_running_stats=False))(Batch(part, part))
