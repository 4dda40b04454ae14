"""Reptile: its gradient is by how much plain inner steps move the parameters, back."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.marks import covering
from tests.meta.textbook import gradients, net, normed_net, some_tasks

rules = mg.optim.rules


def make(**options):
    options = {"inner": rules.sgd(lr=0.1, momentum=0.5), "steps": 3, **options}
    return mg.Reptile(net(), options.pop("loss_fn", F.mse_loss), **options)


def textbook(model, batch, *, steps, optimizer, joins):
    """Train a copy of the model on each task by an ordinary optimizer."""
    moves, losses = [], []
    for x, y, query_x, query_y in zip(*batch.support, *batch.query, strict=True):
        if joins:
            x, y = torch.cat([x, query_x]), torch.cat([y, query_y])
        fast = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        inner = optimizer(fast.values())
        for _ in range(steps):
            inner.zero_grad()
            F.mse_loss(functional_call(model, fast, (x,)), y).backward()
            inner.step()
        moves.append([p.detach() - fast[name].detach() for name, p in model.named_parameters()])
        losses.append(F.mse_loss(functional_call(model, fast, (query_x,)), query_y).detach())
    return tuple(torch.stack(move).mean(0) for move in zip(*moves, strict=True)), torch.stack(losses)


RULES = {
    "sgd": (lambda: rules.sgd(lr=0.1, momentum=0.5), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)),
    "adam": (lambda: rules.adam(lr=0.05), lambda p: torch.optim.Adam(p, lr=0.05)),
}


def is_fast(rule, examples, memory, task_chunk):
    return examples == "all" and memory == ("full" if rule == "sgd" else "step")


@pytest.mark.parametrize(
    ("rule", "examples", "memory", "task_chunk"),
    covering(RULES, ["all", "support"], ["full", "step", "sqrt", "160KiB"], [None, 1, 3], fast=is_fast),
)
def test_its_gradient_is_the_mean_displacement(regression, rule, examples, memory, task_chunk):
    inner, optimizer = RULES[rule]
    learner = make(inner=inner(), examples=examples, memory=memory, task_chunk=task_chunk)
    expected, losses = textbook(
        learner.model, regression, steps=3, optimizer=optimizer, joins=examples == "all"
    )
    out = learner(regression)
    torch.testing.assert_close(gradients(out.loss, learner.parameters()), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(out.query_losses.detach(), losses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(out.loss.detach(), losses.mean(), rtol=1e-9, atol=1e-12)
    assert out.support_losses.shape == (4, 3)
    assert not out.support_losses.requires_grad
    assert not out.query_outputs.requires_grad


@pytest.mark.parametrize("switch", [lambda learner: learner.eval(), lambda learner: torch.no_grad()])
def test_evaluation_sees_support_examples_alone(regression, switch):
    learner = make()
    expected = mg.MAML(learner.model, F.mse_loss, inner=learner.inner, steps=3)(regression).query_losses
    context = switch(learner)
    with context if isinstance(context, torch.no_grad) else torch.enable_grad():
        torch.testing.assert_close(learner(regression).query_losses, expected)
    learner.train()
    assert not torch.allclose(learner(regression).query_losses, expected)


def test_no_graph_is_kept(regression):
    """The memory does not depend on the number of steps."""
    peaks = []
    for steps in (2, 20):
        learner = make(steps=steps)
        learner(regression).loss.backward()
        with mg.MemoryTracker() as tracker:
            loss = learner(regression).loss
        peaks.append(tracker.peak)
        loss.backward()
    assert peaks[1] < 1.2 * peaks[0]


def test_a_scaled_loss_scales_the_gradient(regression):
    learner = make()
    plain = gradients(learner(regression).loss, learner.parameters())
    weights = torch.tensor([1.0, 2.0, 0.0, -3.0], dtype=torch.float64)
    torch.testing.assert_close(
        gradients(1e3 * learner(regression).loss, learner.parameters()), tuple(1e3 * g for g in plain)
    )
    each = [gradients(learner(some_tasks(regression, [i])).loss, learner.parameters()) for i in range(4)]
    expected = tuple(sum(w * g for w, g in zip(weights, own, strict=True)) for own in zip(*each, strict=True))
    got = gradients((weights * learner(regression).query_losses).sum(), learner.parameters())
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_rows_of_tables_count_once(task_chunk):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    # Tasks with different numbers of rows, which are filled up.
    ids = torch.tensor([[1, 2, 3, 1], [5, 5, 5, 5], [7, 9, 7, 9]])
    batch = Batch(*(Examples(ids.roll(i, 1), torch.randn(3, 4, 3).double()) for i in (0, 1)))
    options: Any = {"inner": rules.sgd(lr=0.3), "steps": 3, "task_chunk": task_chunk}
    dense, rows = (mg.Reptile(model, F.mse_loss, sparse=sparse, **options) for sparse in ((), ["0.weight"]))
    expected, (table, *others) = (
        gradients(dense(batch).loss, model.parameters()),
        gradients(rows(batch).loss, model.parameters()),
    )
    assert isinstance(table, mg.sparse.RowSparse)
    torch.testing.assert_close((table.to_dense(), *others), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_reverse_mode_of_torch_func(regression, task_chunk):
    learner = make(task_chunk=task_chunk)
    values = {name: p.detach() for name, p in learner.named_parameters()}
    got = grad(lambda params: functional_call(learner, params, (regression,)).loss)(values)
    torch.testing.assert_close(tuple(got.values()), gradients(learner(regression).loss, learner.parameters()))


@pytest.mark.slow
def test_compiled(regression):
    learner, compiled = make(), make(compile={"backend": "aot_eager"})
    torch.testing.assert_close(
        gradients(compiled(regression).loss, compiled.parameters()),
        gradients(learner(regression).loss, learner.parameters()),
    )


def test_a_task_that_is_not_finite(regression):
    support = regression.support.x.clone()
    support[2, 0, 0] = float("inf")
    batch = Batch(Examples(support, regression.support.y), regression.query)
    with pytest.raises(FloatingPointError, match=r"Reptile: the loss of task 2 is .* at inner step 1"):
        make()(batch)
    learner = make(nonfinite="skip")
    out = learner(batch)
    assert out.skipped.tolist() == [False, False, True, False]
    kept = some_tasks(batch, [0, 1, 3])
    torch.testing.assert_close(
        gradients(out.loss, learner.parameters()), gradients(learner(kept).loss, learner.parameters())
    )


def test_a_second_derivative_is_refused(regression):
    learner = make()
    (first, *_) = torch.autograd.grad(learner(regression).loss, list(learner.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match=r"is not the gradient of a function"):
        first.sum().backward()


@pytest.mark.parametrize("norm", ["transductive", "support", "running"])
def test_policies_for_statistics(regression, norm):
    """Vectorized tasks and a loop agree, with the losses of MAML."""
    options: Any = {"inner": rules.sgd(lr=0.1), "steps": 2, "norm": norm}
    found = []
    for task_chunk in (None, 1):
        learner = mg.Reptile(normed_net(), F.mse_loss, examples="support", task_chunk=task_chunk, **options)
        out = learner(regression)
        expected = mg.MAML(normed_net(), F.mse_loss, order=1, **options)(regression)
        torch.testing.assert_close(out.query_losses, expected.query_losses)
        buffers = [buffer.double() for buffer in learner.buffers()]
        found.append((*gradients(out.loss, learner.parameters()), *buffers))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
