"""Padding does not change the losses and meta-gradients of tasks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import metagrad as mg
from metagrad.tasks import Batch, FewShot
from tests.marks import covering


def tasks() -> Batch:
    x, labels = torch.randn(60, 3, dtype=torch.float64), torch.arange(60) % 5
    return FewShot((x, labels), ways=(2, 4), shots=(1, 3), queries=2).sample(7)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def textbook_loss(net, batch, steps, create_graph):
    """Return the mean query loss of a loop over tasks without padding."""
    losses = []
    for x, y, query_x, query_y in zip(*batch.support, *batch.query, strict=True):
        params = dict(net.named_parameters())
        real, real_query = y != -100, query_y != -100
        for _ in range(steps):
            loss = F.cross_entropy(functional_call(net, params, (x[real],)), y[real])
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph)
            params = {name: p - 0.5 * g for (name, p), g in zip(params.items(), grads, strict=True)}
        prediction = functional_call(net, params, (query_x[real_query],))
        losses.append(F.cross_entropy(prediction, query_y[real_query]))
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("order", "chunk", "memory"),
    covering([1, 2], [None, 1], ["full", "step", "sqrt"], fast=lambda o, c, m: o == 2 or m == "full"),
)
def test_meta_gradients_are_those_of_the_tasks_alone(order, chunk, memory):
    batch, net = tasks(), model()
    assert not batch.support.mask.all()
    assert not batch.query.mask.all()
    maml = mg.MAML(
        net,
        F.cross_entropy,
        inner=mg.optim.rules.sgd(lr=0.5),
        steps=2,
        order=order,
        memory=memory,
        task_chunk=chunk,
    )
    loss, own = maml(batch).loss, textbook_loss(net, batch, 2, create_graph=order == 2)
    torch.testing.assert_close(loss, own, rtol=1e-9, atol=0)
    params = list(net.parameters())
    for a, b in zip(torch.autograd.grad(loss, params), torch.autograd.grad(own, params), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def maml_of(*layers: nn.Module, loss_fn=F.cross_entropy) -> mg.MAML:
    net = nn.Sequential(nn.Linear(3, 4), *layers).double()
    return mg.MAML(net, loss_fn, inner=mg.optim.rules.sgd(lr=0.5), steps=1)


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"])
def test_padding_that_would_count_in_batch_statistics_is_refused(loss_fn):
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    with pytest.raises(
        ValueError, match=r"MAML\(batch\): .* ignored .* batch statistics of 1 \(BatchNorm1d\)"
    ):
        maml_of(norm, loss_fn=loss_fn)(tasks())


def test_statistics_that_padding_does_not_change_are_fine():
    maml_of(nn.BatchNorm1d(4).eval())(tasks())
    maml_of(nn.GroupNorm(2, 4))(tasks())
    whole = tasks()
    part = whole.support._replace(x=whole.support.x[:, :2], y=whole.support.y[:, :2])
    assert part.mask.all()
    maml_of(nn.BatchNorm1d(4, track_running_stats=False))(Batch(part, part))
