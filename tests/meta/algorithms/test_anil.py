"""First-order MAML, ANIL, BOIL and CAVIA against the loop of the textbook."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.marks import covering
from tests.meta.textbook import assert_learns_as, learner, textbook


def net():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(2, 4), nn.Tanh())
    return nn.Sequential(body, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()


HEAD = ["3.weight", "3.bias"]
BODY = ["0.0.weight", "0.0.bias", "1.weight", "1.bias"]
ALGORITHMS = {
    "FOMAML": (mg.FOMAML, lambda model: {}, [*BODY, *HEAD], 1),
    "ANIL": (mg.ANIL, lambda model: {"head": "3"}, HEAD, 2),
    "first-order ANIL, by the module": (mg.ANIL, lambda model: {"head": model[3], "order": 1}, HEAD, 1),
    "BOIL": (mg.BOIL, lambda model: {"head": "3"}, BODY, 2),
}


@pytest.mark.parametrize(("task_chunk", "memory"), [(None, "full"), (1, "step"), (None, "sqrt")])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_meta_gradient_is_that_of_the_textbook(regression, algorithm, task_chunk, memory):
    make, arguments, names, order = ALGORITHMS[algorithm]
    model = net()
    meta = learner(make, model, steps=3, memory=memory, task_chunk=task_chunk, **arguments(model))
    losses = textbook(model, F.mse_loss, regression, lr=0.1, steps=3, order=order, names=names)
    assert_learns_as(meta(regression), losses, model.parameters())
    assert list(meta.adapt(regression.support).params) == names


def mlp():
    torch.manual_seed(0)
    model = mg.models.ContextMLP([2, 6, 3], context=4, activation=nn.Tanh).double()
    nn.init.normal_(model.context.vector)  # which nothing depends on
    return model


def conv():
    torch.manual_seed(0)
    return mg.models.Conv4(3, hidden=2, image_size=16, norm="group", context=5).double()


@pytest.fixture
def batches(regression, images):
    return {mlp: (regression, F.mse_loss), conv: (images, F.cross_entropy)}


def is_fast(make, memory, order, task_chunk):
    return make is mlp and memory == ("full" if order == 2 else "step") and task_chunk != 3


@pytest.mark.parametrize(
    ("make", "memory", "order", "task_chunk"),
    covering([mlp, conv], ["full", "step", "sqrt", "2MiB"], [1, 2], [None, 1, 3], fast=is_fast),
)
def test_meta_gradient_equals_the_textbook_loop(batches, make, memory, order, task_chunk):
    model, (batch, loss_fn) = make(), batches[make]
    cavia = learner(mg.CAVIA, model, loss_fn, steps=3, memory=memory, order=order, task_chunk=task_chunk)
    name = "context" if make is conv else "context.vector"
    start = {name: torch.zeros_like(model.get_parameter(name))}
    losses = textbook(
        model, loss_fn, batch, lr=0.1, steps=3, order=order, names=[name], start=lambda *task: start
    )
    out = cavia(batch)
    found = assert_learns_as(out, losses, model.parameters())
    assert not found[0].any()
    assert float(found[-1].norm()) > 1e-2
    fast = cavia.adapt(batch.support)
    assert set(fast.params) == {name}
    torch.testing.assert_close(fast(batch.query.x), out.query_outputs)


def test_a_task_is_as_large_as_its_context():
    """Memory that grows with the number of tasks by less than one copy of the body for each."""
    torch.manual_seed(0)
    wide = mg.models.ContextMLP([1, 64, 64, 1], context=2)
    cavia = learner(mg.CAVIA, wide, steps=1)
    peaks = []
    for tasks in (8, 40):
        batch = Batch(*(Examples(torch.ones(tasks, 2, 1), torch.ones(tasks, 2, 1)) for _ in range(2)))
        cavia(batch).loss.backward()
        with mg.MemoryTracker() as tracker:
            cavia(batch).loss.backward()
        peaks.append(tracker.peak)
    body = sum(p.numel() * p.element_size() for p in wide.parameters())
    assert (peaks[1] - peaks[0]) / 32 < body
