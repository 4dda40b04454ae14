"""The multi-step loss: a weighted sum of the query losses after each inner step, as a loop over tasks has it."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.marks import combined, slow

sgd = mg.optim.rules.sgd
WEIGHTS = [0.1, 0.3, 0.6]


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def gradients(loss, of):
    return torch.autograd.grad(loss, list(of), materialize_grads=True)


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


MEMORIES = ["full", "step", "sqrt", "64KiB", "auto"]


@pytest.mark.parametrize(
    ("memory", "order", "task_chunk"),
    combined(MEMORIES, [1, 2], [None, 1, 3],
             fast=lambda memory, order, task_chunk: task_chunk != 3 and (order == 2 or memory == "full")),
)  # fmt: skip
def test_the_objective_and_its_gradient_are_those_of_the_textbook(
    textbook, regression, memory, order, task_chunk
):
    model = mlp()
    maml = mg.MAML(model, F.mse_loss, inner=sgd(lr=0.1), steps=3, order=order, memory=memory,
                   task_chunk=task_chunk, query_weights=WEIGHTS)  # fmt: skip
    out = maml(regression)
    plain = functools.partial(textbook, model, F.mse_loss, regression, lr=0.1, steps=3, order=order)
    loss, lasts = plain(weights=WEIGHTS).mean(), plain()
    assert_close(out.loss, loss)
    assert_close(out.query_losses, lasts)
    assert_close(gradients(out.loss, model.parameters()), gradients(loss, model.parameters()))


@pytest.mark.parametrize("memory", ["full", "step", slow("sqrt"), slow("64KiB")])
def test_the_gradient_can_be_differentiated(textbook, regression, memory):
    model = mlp()
    maml = mg.MAML(model, F.mse_loss, inner=sgd(lr=0.1), steps=3, memory=memory, query_weights=WEIGHTS)
    seconds = []
    expected = textbook(model, F.mse_loss, regression, lr=0.1, steps=3, weights=WEIGHTS).mean()
    for loss in (maml(regression).loss, expected):
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        seconds.append(gradients(sum((g**3).sum() for g in grads), model.parameters()))
    assert_close(*seconds)


@pytest.mark.parametrize("form", ["tensor", "function", "sequence of tensors"])
def test_weights_and_rates_are_learned(textbook, regression, form):
    model, weights = mlp(), nn.Parameter(torch.tensor(WEIGHTS, dtype=torch.float64))
    lr = nn.Parameter(torch.tensor([0.1, 0.2, 0.1], dtype=torch.float64))
    forms = {"tensor": weights, "function": lambda t: weights[t], "sequence of tensors": list(weights)}
    maml = mg.MAML(model, F.mse_loss, inner=sgd(lr=lr), steps=3, memory="step", query_weights=forms[form])
    assert ("query_weights" in dict(maml.named_parameters())) is (form == "tensor")
    loss = textbook(model, F.mse_loss, regression, lr=lr, steps=3, weights=weights).mean()
    of = [*model.parameters(), weights, lr]
    assert_close(gradients(maml(regression).loss, of), gradients(loss, of))


@pytest.mark.parametrize("truncate", [1, 2, 3])
@pytest.mark.parametrize("memory", ["full", slow("step"), slow("64KiB")])
def test_losses_before_a_truncation_are_of_first_order(textbook, regression, truncate, memory):
    model, lr = mlp(), nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
    maml = mg.MAML(model, F.mse_loss, inner=sgd(lr=lr), steps=3, memory=memory, truncate=truncate,
                   query_weights=WEIGHTS)  # fmt: skip
    loss = textbook(model, F.mse_loss, regression, lr=lr, steps=3, truncate=truncate, weights=WEIGHTS).mean()
    of = [*model.parameters(), lr]
    assert_close(gradients(maml(regression).loss, of), gradients(loss, of))


def test_tasks_that_have_stopped_keep_their_query_loss(regression):
    model = mlp()
    maml = mg.MAML(model, F.mse_loss, inner=sgd(lr=0.1), steps=3, tolerance=1e6, query_weights=WEIGHTS)
    out, before = maml(regression), maml(regression, steps=0)
    assert not out.steps.any()
    assert_close(out.loss, sum(WEIGHTS) * before.loss)


def test_rows_of_tables_are_those_of_the_dense_table():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (2, 3, 6), generator=generator)
    y = torch.randn(2, 3, 6, 3, generator=generator, dtype=torch.float64)
    batch = Batch(*(Examples(i, target) for i, target in zip(ids, y, strict=True)))
    grads = []
    for sparse in ([], ["0.weight"]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        maml = mg.MAML(model, F.mse_loss, inner=sgd(lr=0.1), steps=3, sparse=sparse, query_weights=WEIGHTS)
        found = torch.autograd.grad(maml(batch).loss, list(model.parameters()))
        grads.append([g.to_dense() if isinstance(g, mg.sparse.RowSparse) else g for g in found])
    assert_close(*grads)


def test_weights_may_be_assigned_and_zeros_cost_nothing(textbook, regression):
    calls = []
    model = mlp()
    model.register_forward_hook(lambda *args: calls.append(1))
    maml = mg.MAML(model, F.mse_loss, inner=sgd(lr=0.1), steps=3, task_chunk=1, query_weights=WEIGHTS)
    counts = []
    for weights in (WEIGHTS, [0, 0.0, 2.0], None):
        maml.query_weights = weights
        calls.clear()
        loss = maml(regression).loss
        counts.append(len(calls) // 4)
        expected = textbook(model, F.mse_loss, regression, lr=0.1, steps=3, weights=weights or [0, 0, 1])
        assert_close(loss, expected.mean())
    assert counts == [6, 4, 4]


def test_another_number_of_steps_counts_the_last_loss_alone(textbook, regression):
    maml = mg.MAML(mlp(), F.mse_loss, inner=sgd(lr=0.1), steps=3, query_weights=WEIGHTS)
    for steps in (0, 1, 5):
        out = maml(regression, steps=steps)
        assert_close(out.loss, out.query_losses.mean())
    maml.query_weights = lambda step: step + 1.0
    expected = textbook(maml.model, F.mse_loss, regression, lr=0.1, steps=2, weights=[1.0, 2.0]).mean()
    assert_close(maml(regression, steps=2).loss, expected)


def test_a_copy_computes_the_same(regression):
    maml = mg.MAML(mlp(), F.mse_loss, inner=sgd(lr=0.1), steps=3, query_weights=WEIGHTS)
    assert_close(copy.deepcopy(maml)(regression).loss, maml(regression).loss)


class TestNonfinite:
    class Bursting(nn.Module):
        """A loss that is infinite where the first target is negative and the prediction has reached 0.9."""

        def forward(self, prediction, y):
            bursts = (y[0, 0] < -5) & (prediction.mean() > 0.9)
            return F.mse_loss(prediction, y.abs() / 10) + torch.where(bursts, torch.inf, 0.0)

    def batch(self):
        x = torch.ones(3, 2, 1, dtype=torch.float64)
        y = torch.full_like(x, 10.0)
        query_y = y.clone()
        query_y[1] = -10.0
        return Batch(Examples(x, y), Examples(x, query_y))

    def maml(self, **options):
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        return mg.MAML(model, self.Bursting(), inner=sgd(lr=0.3), steps=4, query_weights=[1.0] * 4, **options)

    @pytest.mark.parametrize("task_chunk", [None, 1])
    def test_the_step_is_named(self, task_chunk):
        with pytest.raises(FloatingPointError, match="task 1 is inf on its query examples"):
            self.maml(task_chunk=task_chunk)(self.batch())

    def test_the_task_is_left_out(self):
        maml = self.maml(nonfinite="skip")
        out = maml(self.batch())
        assert out.skipped.tolist() == [False, True, False]
        kept = Batch(*(Examples(part.x[::2], part.y[::2]) for part in self.batch()))
        expected = maml(kept).loss
        assert_close(out.loss, expected)
        assert_close(*(gradients(loss, maml.parameters()) for loss in (out.loss, expected)))


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([1.0], ValueError, "a weight for each of 3 steps, got 1"),
        (torch.ones(2), ValueError, r"a tensor of shape \(3,\), got \(2,\)"),
        ([1.0, -1.0, 1.0], ValueError, "the weight of step 1 must be finite and at least 0, got -1.0"),
        ([0, 0, 0.0], ValueError, "all weights are 0"),
        ([0, "1", 0.0], TypeError, "the weight of step 1 must be a number or a 0-d tensor, got '1'"),
        ("123", TypeError, "got str"),
        (0.5, TypeError, "got float"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights, error, message):
    with pytest.raises(error, match=message):
        mg.MAML(mlp(), F.mse_loss, inner=sgd(lr=0.1), steps=3, query_weights=weights)


def test_a_function_is_held_to_the_same(regression):
    maml = mg.MAML(mlp(), F.mse_loss, inner=sgd(lr=0.1), steps=3, query_weights=lambda step: torch.ones(2))
    with pytest.raises(
        TypeError, match=r"step 0 must be a number or a 0-d tensor, got a tensor of shape \(2,\)"
    ):
        maml(regression)
