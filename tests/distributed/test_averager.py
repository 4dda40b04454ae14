"""Gradients that are exchanged during the backward pass are those that are exchanged after it."""

from __future__ import annotations

import contextlib
import copy
import threading
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from metagrad.distributed import GradientAverager, average_gradients, exchange
from metagrad.tasks.batch import share_of
from tests.distributed.test_gradients import (
    ROWS,
    SIZES,
    Scores,
    close,
    gradients,
    learner,
    on_tape,
    regression,
    tasks_of,
)
from tests.distributed.threads import in_threads

_START, _STARTED = exchange.buckets.start, {}


def noted(numbers, *arguments):
    """Start a bucket, and note which parameters it has where the group's process has asked for that."""
    _STARTED.get(threading.get_ident(), []).append(numbers)
    return _START(numbers, *arguments)


@contextlib.contextmanager
def noting(started):
    """Note the buckets that this thread starts."""
    _STARTED[threading.get_ident()] = started
    yield
    del _STARTED[threading.get_ident()]


def deep():
    return mg.models.MLP([2, 6, 6, 6, 1]).double()


def examples(count):
    return torch.randn(count, 2).double(), torch.randn(count, 1).double()


def steps_of(averager, model, losses, weights):
    """Take a backward pass for each loss, and return the gradients and bytes of each."""
    found = []
    for loss, weight in zip(losses, weights, strict=True):
        model.zero_grad()
        with averager.averaging(weight=weight):
            loss(model).backward()
        found.append((gradients(model), averager.traffic))
    return found


@pytest.mark.parametrize("bucket", ["25MiB", 300])
@pytest.mark.parametrize("size", SIZES)
def test_three_backward_passes_over_uneven_shares(size, bucket):
    whole, batches = deep(), [examples(7) for _ in range(3)]

    def process(group):
        part = share_of(7, group.rank(), size)
        own, other = copy.deepcopy(whole), copy.deepcopy(whole)
        losses = [lambda model, x=x, y=y: F.mse_loss(model(x[part]), y[part]) for x, y in batches]
        weights = [part.stop - part.start] * 3
        found = steps_of(GradientAverager(own, bucket=bucket, group=group), own, losses, weights)
        for loss, (gradient, _) in zip(losses, found, strict=True):
            other.zero_grad()
            loss(other).backward()
            average_gradients(other, weight=weights[0], bucket=bucket, group=group)
            if size < 3:  # of three, a sum depends on its place in a bucket
                assert all(torch.equal(value, gradient[name]) for name, value in gradients(other).items())
        return found

    every = in_threads(size, process)
    for number, (x, y) in enumerate(batches):
        whole.zero_grad()
        F.mse_loss(whole(x), y).backward()
        for found in every:
            gradient, traffic = found[number]
            for name, value in gradients(whole).items():
                close(gradient[name], value)
                assert torch.equal(gradient[name], every[0][number][0][name])
            assert (traffic.early > 0) == (number > 0 and size > 1)
            if number and size > 1:
                assert traffic.early == traffic.dense


def test_buckets_are_sent_from_the_last_layer_on_while_the_backward_pass_runs():
    model, (x, y) = deep(), examples(4)

    def process(group):
        own, started, seen = copy.deepcopy(model), [], []
        averager = GradientAverager(own, bucket=300, group=group)
        linear = [layer for layer in own.modules() if isinstance(layer, torch.nn.Linear)]
        linear[0].weight.register_hook(lambda _: seen.append(len(started)))  # before it is accumulated
        for _ in range(2):
            own.zero_grad()
            started.clear()
            with averager.averaging(), noting(started):
                F.mse_loss(own(x), y).backward()
        names = list(dict(own.named_parameters()))
        return seen[-1], [[names[number] for number in bucket] for bucket in started]

    with mock.patch.object(exchange.buckets, "start", noted):
        found = in_threads(2, process)
    for before_the_first_layer, started in found:
        assert started == found[0][1]
        assert before_the_first_layer >= len(started) - 2 >= 1
        first_layer = next(name for name, _ in model.named_parameters())
        assert first_layer in started[-1] + started[-2]
        assert first_layer not in started[0]


@pytest.mark.parametrize("size", [2, 3])
def test_buckets_have_one_order_where_backward_passes_have_several(size):
    x = torch.randn(3).double()

    def process(group):
        params, started = {name: torch.ones(3).double().requires_grad_() for name in "abcd"}, []
        averager = GradientAverager(params, bucket=24, group=group)
        for _ in range(3):
            for p in params.values():
                p.grad = None
            value = x
            for name in list(params)[:: 1 if group.rank() else -1]:
                value = value * params[name]
            with averager.averaging(), noting(started):
                value.sum().backward()
        return started, [p.grad for p in params.values()]

    with mock.patch.object(exchange.buckets, "start", noted):
        found = in_threads(size, process)
    for started, grads in found:
        assert started == found[0][0]
        assert all(torch.equal(gradient, found[0][1][0]) for gradient in grads)


def test_the_meta_gradient_with_a_learned_rate():
    batch = tasks_of(5, torch.randn(5, 8, 2).double(), torch.randn(5, 8, 1).double())
    whole = learner(regression())

    def process(group):
        share, own = batch.shard(group), copy.deepcopy(whole)
        losses = [lambda model: model(share).loss] * 2
        return steps_of(GradientAverager(own, group=group), own, losses, [share.num_tasks] * 2)

    expected = in_threads(2, process)
    whole(batch).loss.backward()
    for found in expected:
        for gradient, _ in found:
            for name, value in gradients(whole).items():
                close(gradient[name], value)
        assert found[1][1].early > 0


def test_tables_go_by_their_rows_after_the_dense_ones():
    ids, y = torch.randint(0, ROWS, (6, 4)), torch.randn(6, 4).double()
    whole = Scores(sparse=True)

    def process(group):
        own, part = copy.deepcopy(whole), share_of(6, group.rank(), 2)
        losses = [lambda model: F.mse_loss(model(ids[part]), y[part])] * 2
        found = steps_of(GradientAverager(own, group=group), own, losses, [3] * 2)
        assert own.item.weight.grad.layout is torch.sparse_coo
        return found

    every = in_threads(2, process)
    F.mse_loss(whole(ids), y).backward()
    for found in every:
        for gradient, traffic in found:
            close(gradient["item.weight"], whole.item.weight.grad.to_dense())
            close(gradient["head.weight"], whole.head.weight.grad)
            assert traffic.dense == 8 * 4
        assert [traffic.early for _, traffic in found] == [0, 8 * 4]


def test_parameters_that_a_pass_does_not_use():
    """By step and process: first none uses the last one, then one does, then all, then none again."""
    uses = [(False, False), (True, False), (True, True), (False, False)]

    def process(group):
        first, last = torch.ones(2).double().requires_grad_(), torch.ones(2).double().requires_grad_()
        averager, found = GradientAverager([last, first], group=group), []
        for of_each in uses:
            first.grad = last.grad = None
            with averager.averaging():
                value = first.sum() + (last.sum() if of_each[group.rank()] else 0)
                value.backward()
            found.append((first.grad.tolist(), last.grad if last.grad is None else last.grad.tolist()))
        return found

    whole = [1.0, 1.0]
    expected = [(whole, None), (whole, [0.5, 0.5]), (whole, whole), (whole, None)]
    assert in_threads(2, process) == [expected] * 2


def test_weights_that_change_from_pass_to_pass():
    weights = [(1, 3), (2, 0), (1.5, 1.5), (0, 7)]

    def process(group):
        param = torch.ones(2).double().requires_grad_()
        averager, found = GradientAverager(param, group=group), []
        for pair in weights:
            param.grad = None
            with averager.averaging(weight=pair[group.rank()]):
                (param.sum() * (1 + group.rank())).backward()
            found.append(param.grad.clone())
        return torch.stack(found)[:, 0]

    expected = torch.tensor([(a + 2 * b) / (a + b) for a, b in weights]).double()
    for found in in_threads(2, process):
        close(found, expected)


def test_gradients_that_change_after_they_were_sent_are_sent_again():
    def process(group):
        first, second = (torch.ones(2).double().requires_grad_() for _ in range(2))
        averager = GradientAverager([first, second], bucket=16, group=group)
        for step in range(3):
            first.grad = second.grad = None
            with averager.averaging():
                (first.sum() + second.sum()).backward()
                if step == 1 and group.rank():
                    first.sum().backward()  # of one process: a second pass of which the others know nothing
                if step == 2:
                    second.grad.mul_(4)
            if step == 1:
                once = first.grad.tolist(), averager.traffic.dense
        return once, first.grad.tolist(), second.grad.tolist(), averager.traffic.dense

    assert in_threads(2, process) == [(([1.5, 1.5], 48), [1.0, 1.0], [4.0, 4.0], 48)] * 2


class Failing(torch.autograd.Function):
    """Passes a tensor on; its backward pass is an error."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise FloatingPointError("the gradient of a process")


@pytest.mark.parametrize("plans", [False, True])
def test_an_error_in_one_backward_pass_leaves_no_exchange_behind(plans):
    def process(group):
        first, second = (torch.ones(2).double().requires_grad_() for _ in range(2))
        averager, said = GradientAverager([first, second], bucket=16, group=group), ""

        def step(*, fails):
            first.grad = second.grad = None
            with averager.averaging():
                # The second one, of what comes first in the backward pass, has been sent when the other one fails.
                ((Failing.apply(first) if fails else first).sum() + second.sum()).backward()

        if plans:
            step(fails=False)
        try:
            step(fails=group.rank() == 1)
        except (FloatingPointError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
        kept = second.grad.tolist()
        assert not first._post_accumulate_grad_hooks
        step(fails=False)
        return said, kept, first.grad.tolist()

    one, other = in_threads(2, process)
    assert one[0].startswith(
        "RuntimeError: GradientAverager.averaging(): an error in 1 of 2 processes keeps their gradients out"
    )
    assert other[0] == "FloatingPointError: the gradient of a process"
    assert one[1:] == other[1:] == ([1.0, 1.0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (lambda: torch.ones(2, 2).to_sparse(1), "is STRIDED in 1 and COO in 1 processes"),
        (on_tape, "has a graph"),
    ],
)
def test_layouts_that_are_refused_are_refused_in_all_processes(gradient, message):
    def process(group):
        table = torch.ones(2, 2, requires_grad=True)
        averager = GradientAverager({"table": table}, group=group)
        with averager.averaging():
            table.sum().backward()
        try:
            with averager.averaging():
                table.grad = gradient() if group.rank() else torch.ones(2, 2)
        except (ValueError, RuntimeError) as error:
            said = str(error)
        table.grad = None
        with averager.averaging():
            table.sum().backward()
        assert torch.equal(table.grad, torch.ones(2, 2))
        return said

    assert any(message in said for said in in_threads(2, process))


def test_a_dense_gradient_that_becomes_row_sparse_in_all_processes():
    def process(group):
        table = torch.ones(4, 2, requires_grad=True)
        averager, kinds = GradientAverager([table], group=group), []
        for is_sparse in (False, True, True, False):
            table.grad = None
            with averager.averaging():
                F.embedding(torch.tensor([group.rank()]), table, sparse=is_sparse).sum().backward()
            kinds.append(table.grad.is_sparse)
            assert torch.equal(table.grad.to_dense(), torch.tensor([[0.5], [0.5], [0], [0]]).expand(4, 2))
        return kinds

    assert in_threads(2, process) == [[False, True, True, False]] * 2


def test_a_dense_gradient_that_becomes_one_of_rows_in_all_processes():
    def process(group):
        table, kinds = torch.ones(4, 2, requires_grad=True), []
        averager = GradientAverager([table], group=group)
        for is_sparse in (False, True, True):
            table.grad = None
            rows = mg.sparse.RowSparse(torch.tensor([group.rank()]), torch.ones(1, 2), table.shape)
            with averager.averaging():
                table.grad = rows if is_sparse else rows.to_dense()
            kinds.append(isinstance(table.grad, mg.sparse.RowSparse))
            assert torch.equal(table.grad.to_dense(), torch.tensor([[0.5], [0.5], [0], [0]]).expand(4, 2))
        return kinds

    assert in_threads(2, process) == [[False, True, True]] * 2


def test_parameters_that_are_added_later_take_part():
    def process(group):
        params = {"a": torch.ones(1, requires_grad=True)}
        averager, found = GradientAverager(params, group=group), []
        for _ in range(3):
            with averager.averaging():
                sum((1 + group.rank()) * p for p in params.values()).backward()
            found.append([p.grad.item() for p in params.values()])
            params |= {"b": torch.ones(1, requires_grad=True)}
            for p in params.values():
                p.grad = None
        return found

    assert in_threads(2, process) == [[[1.5], [1.5, 1.5], [1.5, 1.5]]] * 2


def test_without_a_group_nothing_happens():
    model = regression()
    averager = GradientAverager(iter(list(model.parameters())))
    with averager.averaging(weight=3):
        model(torch.ones(1, 2).double()).sum().backward()
    assert averager.traffic == mg.distributed.Traffic(1)
    with pytest.raises(
        TypeError, match=r"GradientAverager.averaging\(\): parameter 0 must be a tensor, got int"
    ):
        GradientAverager([1])
    with pytest.raises(ValueError, match="weight must be a finite number"), averager.averaging(weight=-1):
        pass
