from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.optim.rules import adam, sgd
from metagrad.tasks import Batch, Examples
from tests.meta.textbook import gradients, learner, net, some_tasks

POLICIES: list[Any] = ["raise", "skip"]
TASKS = 4


class Slope(nn.Module):
    """A model y = w x + 0 * other. Its loss is steep at a prediction of exactly zero."""

    def __init__(self, start=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x):
        return self.w * x


def steep(prediction, target):
    """A finite gradient everywhere, and none beyond at zero."""
    return ((prediction - target).abs() ** 1.5).mean()


def slopes(*, zero_task):
    """Return four tasks. The predictions of one task are exactly zero at each step."""
    generator = torch.Generator().manual_seed(1)
    x = 1 + torch.rand(TASKS, 3, generator=generator, dtype=torch.float64)
    support = x.clone()
    support[zero_task] = 0
    return Batch(Examples(support, torch.zeros_like(x)), Examples(x, x + 1))


@pytest.mark.parametrize("options", [{}, {"task_chunk": 1}, {"task_chunk": 3}, {"memory": "step"}], ids=str)
@pytest.mark.parametrize("where", ["support", "query"])
def test_skipping_a_task_is_learning_from_the_others(regression, options, where):
    rule = adam(lr=nn.Parameter(torch.tensor(0.1, dtype=torch.float64)))
    maml = learner(mg.MAML, net(), inner=rule, nonfinite="skip", **options)
    others = torch.tensor([0, 1, 3])
    expected = maml(some_tasks(regression, others))
    getattr(regression, where).y[2, 0, 0] = float("nan")
    out = maml(regression)
    assert out.skipped.tolist() == [False, False, True, False]
    assert out.support_losses.shape == (4, 2)
    assert out.query_losses.isnan().tolist() == [False, False, True, False]
    torch.testing.assert_close(out.query_losses[others], expected.query_losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.query_outputs[others], expected.query_outputs, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gradients(out.loss, maml.parameters()),
        gradients(expected.loss, maml.parameters()),
        rtol=1e-10,
        atol=1e-14,
    )


def test_skipping_leaves_finite_batches_alone(regression):
    out = [learner(mg.MAML, net(), nonfinite=p)(regression) for p in POLICIES]
    assert not out[1].skipped.any()
    assert torch.equal(out[0].loss, out[1].loss)


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_a_task_that_is_not_finite_is_named_and_so_is_a_batch_of_which_nothing_is_left(
    regression, task_chunk
):
    regression.support.y[2, 0, 0] = float("nan")
    maml = mg.MAML(net(), F.mse_loss, inner=sgd(lr=0.1), steps=3, task_chunk=task_chunk)
    for call in (lambda: maml(regression), lambda: maml.adapt(regression.support)):
        with pytest.raises(FloatingPointError, match=r"loss of task 2 is nan at inner step 0.*1 of 4 tasks"):
            call()
    regression.support.y[:] = float("inf")
    maml = learner(mg.MAML, net(), nonfinite="skip")
    with pytest.raises(FloatingPointError, match=r"task 0 is inf at inner step 0.*4 of 4 tasks"):
        maml(regression)


def test_adapting_skips_too(regression):
    maml = learner(mg.MAML, net(), nonfinite="skip")
    expected = maml.adapt(regression.support)
    regression.support.y[1] = float("nan")
    adapted = maml.adapt(regression.support)
    assert adapted.skipped.tolist() == [False, True, False, False]
    keep = ~adapted.skipped
    prediction = adapted(regression.query.x)[keep]
    torch.testing.assert_close(prediction, expected(regression.query.x)[keep], rtol=1e-12, atol=0)
    assert all(g.isfinite().all() for g in gradients(prediction.square().sum(), maml.parameters()))


def test_tables_are_skipped_with_their_task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 3), nn.Linear(3, 1)).double()
    x = torch.tensor([[0, 1, 2, 3, 4], [5, 5, 5, 5, 6]])  # the task with the most rows is left out
    y = torch.randn(2, 5, 1, dtype=torch.float64)
    options = {"inner": sgd(lr=0.1), "steps": 2, "sparse": ["0.weight"], "nonfinite": "skip"}
    maml = mg.MAML(model, F.mse_loss, **options)
    expected = maml.adapt(Examples(x[1:], y[1:]))(x[1:])
    y[0] = float("nan")
    adapted = maml.adapt(Examples(x, y))
    torch.testing.assert_close(adapted(x)[1:], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("norm", "task_chunk"), [(None, 1), ("running", 1), ("running", None)])
def test_running_statistics_know_nothing_of_a_skipped_task(regression, norm, task_chunk):
    def buffers(batch):
        model = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        learner(mg.MAML, model, norm=norm, nonfinite="skip", task_chunk=task_chunk)(batch)
        return dict(model.named_buffers())

    torch.manual_seed(0)
    expected = buffers(some_tasks(regression, [0, 1, 3]))
    regression.support.x[2] = float("nan")
    torch.manual_seed(0)
    torch.testing.assert_close(buffers(regression), expected)


@pytest.mark.parametrize("memory", ["full", "step", "sqrt"])
@pytest.mark.parametrize("task_chunk", [None, 1])
def test_a_meta_gradient_that_is_not_finite_names_its_task(task_chunk, memory):
    options = {"inner": sgd(lr=0.1), "steps": 3, "task_chunk": task_chunk, "memory": memory}
    out = mg.MAML(Slope(), steep, **options)(slopes(zero_task=2))
    assert out.support_losses.isfinite().all()
    with pytest.raises(FloatingPointError, match=r"meta-gradient of task 2 is not finite.*1 of 4 tasks"):
        out.loss.backward()


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_task_whose_meta_gradient_is_not_finite_is_dropped(create_graph):
    lr = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
    maml = mg.MAML(Slope(), steep, inner=sgd(lr=lr), steps=3, nonfinite="skip")
    batch = slopes(zero_task=1)
    expected = maml(some_tasks(batch, torch.tensor([0, 2, 3]))).query_losses.sum() / TASKS
    out = maml(batch)
    assert not out.skipped.any()
    grads, wanted = (
        torch.autograd.grad(loss, list(maml.parameters()), create_graph=create_graph)
        for loss in (out.loss, expected)
    )
    assert out.skipped.tolist() == [False, True, False, False]
    torch.testing.assert_close(grads, wanted, rtol=1e-12, atol=0)
    if create_graph:
        seconds = [gradients(sum(g**3 for g in gs), maml.parameters()) for gs in (grads, wanted)]
        torch.testing.assert_close(*seconds, rtol=1e-10, atol=0)


@pytest.mark.parametrize("nonfinite", POLICIES)
def test_an_overflow_of_a_scaled_loss_is_left_to_the_scaler(regression, nonfinite):
    batch = Batch(*(Examples(e.x.float(), e.y.float()) for e in regression))
    maml = mg.MAML(net().float(), F.mse_loss, inner=sgd(lr=0.1), steps=2, nonfinite=nonfinite)
    optimizer = torch.optim.SGD(maml.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = [p.detach().clone() for p in maml.parameters()]
    out = maml(batch)
    scaler.scale(out.loss * 4).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**126
    assert not out.skipped.any()
    assert all(torch.equal(p, b) for p, b in zip(maml.parameters(), before, strict=True))


def test_cotangents_that_are_not_finite_are_not_the_tasks_doing(regression):
    maml = learner(mg.MAML, net())
    grads = gradients(maml(regression).loss * float("nan"), maml.parameters())
    assert all(g.isnan().any() for g in grads)


def test_what_is_not_reproduced_is_said():
    """A hook stands for what happens by chance: it spoils one backward pass, the first after the examination."""
    spoilt = []

    def spoil(gradient):
        spoilt.append(gradient)
        return gradient * float("nan") if len(spoilt) == 2 else gradient

    def loss_fn(prediction, target):
        prediction.register_hook(spoil)
        return F.mse_loss(prediction, target)

    maml = mg.MAML(Slope(), loss_fn, inner=sgd(lr=0.1), steps=0, task_chunk=1)
    with pytest.raises(FloatingPointError, match=r"is when it is computed again"):
        maml(slopes(zero_task=0)).loss.backward()
