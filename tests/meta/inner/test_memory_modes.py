"""What is kept is not seen in a result: every memory mode gives the gradients of ``"full"``, in every setting."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.optim.rules import adam, sgd
from metagrad.tasks import Batch, Examples
from tests.draws import draw
from tests.marks import covering, slow

MEMORIES = ["step", "sqrt", "log", "auto", "160KiB"]


def regression(tasks=3):
    return Batch(*(Examples(draw(tasks, 6, 2, seed=i), draw(tasks, 6, 3, seed=i + 2)) for i in (0, 1)))


def lookups(tasks=3):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 50, (tasks, 6), generator=generator) for _ in range(2)]
    return Batch(*(Examples(x, draw(tasks, 6, 3, seed=i)) for i, x in enumerate(ids)))


def learned(value):
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


def mlp():
    return mg.models.MLP([2, 8, 3])


CASES = {
    "momentum": (mlp, regression, lambda: sgd(lr=0.1, momentum=0.9), {}),
    "adam": (mlp, regression, lambda: adam(lr=0.05), {}),
    "learned rates": (mlp, regression, lambda: sgd(lr=learned([0.1, 0.2, 0.1, 0.05, 0.1]), momentum=learned(0.5)),
                      {}),
    "learned adam": (mlp, regression, lambda: adam(lr=learned(0.05)), {}),
    "dropout": (lambda: nn.Sequential(mlp(), nn.Dropout(0.3), nn.Linear(3, 3)), regression, lambda: sgd(lr=0.1),
                {}),
    "tables": (lambda: nn.Sequential(nn.Embedding(50, 4), nn.Tanh(), nn.Linear(4, 3)), lookups,
               lambda: sgd(lr=0.1, momentum=0.9), {"sparse": ["0.weight"]}),
    "tolerance": (mlp, regression, lambda: adam(lr=0.05), {"tolerance": 1.0}),
    "truncated": (mlp, regression, lambda: sgd(lr=0.1, momentum=0.9), {"truncate": 3}),
}  # fmt: skip


def dense(gradient):
    return gradient.to_dense() if isinstance(gradient, mg.sparse.RowSparse) else gradient


def derivatives(case, memory, task_chunk, precision=contextlib.nullcontext):
    """Return the loss, its gradient, and the gradient of the gradient's cubes: third order in the inner loss."""
    make_model, make_batch, make_rule, options = CASES[case]
    torch.manual_seed(0)
    model = make_model().double()
    options = {"inner": make_rule(), "steps": 5, "memory": memory, "task_chunk": task_chunk, **options}
    maml = mg.MAML(model, F.mse_loss, **options)
    params = list(maml.parameters())
    torch.manual_seed(1)
    with precision():
        losses = maml(make_batch()).query_losses
    loss = (torch.tensor([1.0, -2.0, 1e3], dtype=torch.float64) * losses).sum()
    grads = torch.autograd.grad(loss, params, create_graph=True)
    assert all(g.requires_grad for g in grads)
    second = torch.autograd.grad(sum((g**3).sum() for g in grads), params)
    return [loss, *map(dense, grads), *map(dense, second)]


@functools.cache
def full_derivatives(case, task_chunk):
    return [value.detach() for value in derivatives(case, "full", task_chunk)]


@pytest.mark.parametrize("task_chunk", [None, slow(1)])
@pytest.mark.parametrize(
    ("case", "memory"),
    # Every case with each step recomputed, and every mode for two.
    covering(CASES, MEMORIES, fast=lambda case, memory: memory == "step" or case in ("tables", "truncated")),
)
def test_every_memory_mode_gives_the_same_derivatives(case, memory, task_chunk):
    got, expected = derivatives(case, memory, task_chunk), full_derivatives(case, task_chunk)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12 * float(b.detach().abs().max()))


def under_autocast(memory, enabled=True):
    torch.manual_seed(0)
    model = mlp()
    maml = mg.MAML(model, F.mse_loss, inner=adam(lr=0.05), steps=4, memory=memory)
    batch = Batch(*(Examples(part.x.float(), part.y.float()) for part in regression()))
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        out = maml(batch)
        fast = maml.adapt(batch.support)
    return out, mg.grad(out.loss, dict(model.named_parameters())), fast


@pytest.mark.parametrize("memory", ["full", *MEMORIES])
def test_the_inner_loop_stays_in_float32_under_autocast_and_a_recomputed_step_casts_the_same(memory):
    out, low, fast = under_autocast(memory)
    assert (out.query_outputs.dtype, out.loss.dtype) == (torch.bfloat16, torch.float32)
    assert {t.dtype for t in (*fast.params.values(), *low.values())} == {torch.float32}
    torch.testing.assert_close(low, under_autocast("full")[1], rtol=1e-6, atol=1e-7)
    exact = under_autocast(memory, enabled=False)[1]
    difference = max(float((low[k] - exact[k]).norm() / exact[k].norm()) for k in exact)
    assert 1e-4 < difference < 0.2
