"""Operators over the data of several processes, which are threads here, are those of all data."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from tests.distributed.threads import in_threads
from tests.marks import fast


def data_of(count):
    return torch.randn(count, 3).double(), torch.randint(0, 4, (count,))


def models(count):
    """Return equal models; not to be called in the threads, which draw from one generator."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4)).double()
    return [copy.deepcopy(net) for _ in range(count)]


def operator(kind, net, batches, reduction, **options):
    params = dict(net.named_parameters())
    if kind == "hessian":

        def loss_fn(params, x, y):
            return F.cross_entropy(torch.func.functional_call(net, params, (x,)), y, reduction=reduction)

        return mg.hessian(loss_fn, params, batches, reduction=reduction, **options)

    def loss(output, y):
        return F.cross_entropy(output, y, reduction=reduction)

    make = {"ggn": mg.ggn, "fisher": mg.fisher}[kind]
    return make(net, loss, params, batches, reduction=reduction, **options)


@pytest.mark.parametrize("reduction", fast(["mean"], ["mean", "sum"]))
@pytest.mark.parametrize("kind", ["hessian", "ggn", "fisher"])
def test_products_are_those_of_all_data(kind, reduction):
    x, y = data_of(7)
    shares = [[(x[:2], y[:2]), (x[2:4], y[2:4])], (x[4:], y[4:])]  # two batches here, one there
    nets = models(3)
    with operator(kind, nets[2], (x, y), reduction) as H:
        expected = H.to_dense()

    def process(group):
        with operator(kind, nets[group.rank()], shares[group.rank()], reduction, group=group) as H:
            return H.to_dense()

    for found in in_threads(2, process):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("share", ["ignored", "no data", "no batches"])
def test_a_process_may_have_nothing_to_add(kind, share):
    """It raised there, and the other processes waited for it."""
    (x, y), nets = data_of(3), models(3)
    nothing = {"ignored": (x, torch.full_like(y, -100)), "no data": (x[:0], y[:0]), "no batches": []}[share]
    with operator(kind, nets[2], (x, y), "mean") as H:
        expected = H.to_dense()

    def process(group):
        data = nothing if group.rank() else (x, y)
        with operator(kind, nets[group.rank()], data, "mean", group=group) as H:
            return H.to_dense()

    for found in in_threads(2, process):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_data_that_no_process_has_are_an_error_in_all():
    (x, y), nets = data_of(2), models(2)

    def process(group):
        with pytest.raises(ValueError, match="no batch has data that count"):
            operator("ggn", nets[group.rank()], (x, torch.full_like(y, -100)), "mean", group=group)

    in_threads(2, process)


def test_a_process_without_batches_knows_the_rows_of_the_others():
    table = {"table": torch.randn(9, 2).double().requires_grad_()}

    def loss_fn(params, ids):
        return F.embedding(ids, params["table"]).pow(4).mean()

    def process(group):
        data = [] if group.rank() else [(torch.tensor([[1, 2], [2, 5]]),)]
        with mg.hessian(loss_fn, table, data, sparse=["table"], group=group) as H:
            return H.to_dense()

    first, second = in_threads(2, process)
    assert first.shape == (6, 6)
    assert torch.equal(first, second)


def test_rows_of_a_table_are_those_that_any_process_looks_up():
    ids = torch.tensor([[1, 2], [2, 5], [7, 1]])
    table = {"table": torch.randn(9, 2).double().requires_grad_()}

    def loss_fn(params, ids):
        return F.embedding(ids, params["table"]).pow(4).mean()

    def dense(data, group=None):
        with mg.hessian(loss_fn, table, data, sparse=["table"], group=group) as H:
            return H.to_dense()

    expected = dense([(ids,)])
    for found in in_threads(2, lambda group: dense((ids[:2] if group.rank() else ids[2:],), group)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_vectors_that_differ_between_processes_are_refused():
    (x, y), nets = data_of(4), models(2)

    def process(group):
        with operator("ggn", nets[group.rank()], (x, y), "mean", group=group) as H:
            H @ torch.full((H.shape[0],), 1.0 + group.rank()).double()

    with pytest.raises(ValueError, match="the vector of a product must be the same in all processes"):
        in_threads(2, process)


def test_what_has_no_meaning_in_a_group_is_refused():
    (x, y), nets = data_of(2), models(2)

    def process(group):
        net = nets[group.rank()]
        params = dict(net.named_parameters())
        with pytest.raises(ValueError, match="group sums over the data of processes"):
            mg.hessian(F.cross_entropy(net(x), y), params, group=group)
        with pytest.raises(ValueError, match="sums over processes have no graph"):
            mg.ggn(net, F.cross_entropy, params, (x, y), create_graph=True, group=group)

    in_threads(1, process)
