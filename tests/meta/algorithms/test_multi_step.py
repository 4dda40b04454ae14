"""The multi-step loss of MAML++, a weighted sum of the query losses after each inner step, against a loop."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.marks import covering, slow
from tests.meta.textbook import assert_close, gradients, net, some_tasks, textbook

WEIGHTS = [0.1, 0.3, 0.6]


def multi_step(model, **options):
    options = {"query_weights": WEIGHTS, "norm": None, "lr": 0.1, "steps": 3, **options}
    return mg.MAMLPlusPlus(model, F.mse_loss, **options)


WAYS = covering(["full", "step", "sqrt", "64KiB"], [1, 2], [None, 1, 3], [None],
    fast=lambda memory, order, task_chunk, _: memory in ("full", "step") and task_chunk != 3 and order == 2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "order", "task_chunk", "truncate"), [*WAYS, ("full", 2, None, 2), slow("step", 2, None, 2)]
)
def test_the_objective_and_its_gradient_are_those_of_the_textbook(
    regression, memory, order, task_chunk, truncate
):
    """The weights are also learned. Losses before a truncation are of first order."""
    model, weights = net(), nn.Parameter(torch.tensor(WEIGHTS, dtype=torch.float64))
    options = {"order": order, "memory": memory, "task_chunk": task_chunk, "truncate": truncate}
    out = multi_step(model, query_weights=list(weights), **options)(regression)
    options = {"lr": 0.1, "steps": 3, "order": order, "truncate": truncate}
    plain = functools.partial(textbook, model, F.mse_loss, regression, **options)
    lasts, of = plain(), [*model.parameters(), weights]
    assert_close(out.query_losses, lasts)
    results = []
    for loss in (out.loss, plain(weights=weights).mean()):
        first = gradients(loss, of, create_graph=order == 2)
        second = gradients(sum((g**3).sum() for g in first), of) if order == 2 else ()
        results.append([loss, *first, *second])
    assert_close(*results)


def test_weights_may_be_assigned_and_zeros_cost_nothing(regression):
    calls, counts = [], []
    model = net()
    model.register_forward_hook(lambda *args: calls.append(1))
    maml = multi_step(model, task_chunk=1)
    for weights in (WEIGHTS, [0, 0.0, 2.0], None):
        maml.query_weights = weights
        calls.clear()
        loss = maml(regression).loss
        counts.append(len(calls) // 4)
        expected = textbook(model, F.mse_loss, regression, lr=0.1, steps=3, weights=weights or [0, 0, 1])
        assert_close(loss, expected.mean())
    assert counts == [6, 4, 4]


def test_another_number_of_steps_counts_the_last_loss_alone(regression):
    maml = multi_step(net())
    for steps in (0, 1):
        out = maml(regression, steps=steps)
        assert_close(out.loss, out.query_losses.mean())


class Bursting(nn.Module):
    """A loss that is infinite where the first target is negative and the prediction has reached 0.9."""

    def forward(self, prediction, y):
        bursts = (y[0, 0] < -5) & (prediction.mean() > 0.9)
        return F.mse_loss(prediction, y.abs() / 10) + torch.where(bursts, torch.inf, 0.0)


def test_a_loss_on_the_way_that_is_not_finite_is_told_or_its_task_left_out():
    x = torch.ones(3, 2, 1, dtype=torch.float64)
    y = torch.full_like(x, 10.0)
    query_y = y.clone()
    query_y[1] = -10.0
    batch = Batch(Examples(x, y), Examples(x, query_y))
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    maml = multi_step(model, lr=0.3, steps=4, query_weights=[1.0] * 4)
    maml.loss_fn = Bursting()
    with pytest.raises(FloatingPointError, match="task 1 is inf on its query examples"):
        maml(batch)
    maml.nonfinite = "skip"
    out = maml(batch)
    assert out.skipped.tolist() == [False, True, False]
    expected = maml(some_tasks(batch, slice(None, None, 2))).loss
    assert_close(out.loss, expected)
    assert_close(*(gradients(loss, maml.parameters()) for loss in (out.loss, expected)))
