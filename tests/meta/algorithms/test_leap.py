"""Leap: its gradient against autograd on the lengths of the steps, as functions of the points where they begin."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.marks import combined

rules = mg.optim.rules


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return mg.Leap(model, F.mse_loss, **{"inner": rules.sgd(lr=0.1, momentum=0.5), "steps": 3, **options})


def textbook(model, batch, *, lr, steps, power, stabilize, joins=True):
    """Gradients, at a shift of zero, of the lengths of steps that begin shifted, and end where they did."""
    grads, losses = [], []
    for x, y, query_x, query_y in zip(*batch.support, *batch.query, strict=True):
        if joins:
            x, y = torch.cat([x, query_x]), torch.cat([y, query_y])

        def loss(params, x=x, y=y):
            return F.mse_loss(functional_call(model, params, (x,)), y)

        fast = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        inner, points = torch.optim.SGD(fast.values(), lr=lr, momentum=0.5), []
        for t in range(steps + 1):
            inner.zero_grad()
            value = loss(fast)
            points.append(({name: p.detach().clone() for name, p in fast.items()}, value.detach()))
            if t < steps:
                value.backward()
                inner.step()
        shift = {name: torch.zeros_like(p, requires_grad=True) for name, p in fast.items()}
        lengths = []
        for (begin, low), (end, high) in itertools.pairwise(points):
            shifted = {name: begin[name] + shift[name] for name in begin}
            rise = high - loss(shifted)
            square = sum((end[name] - shifted[name]).square().sum() for name in end) + rise.square()
            if stabilize and high > low:
                square = square - 2 * rise.square()
                # The stabilizer has no part in the length that a gradient is divided by.
                norm = (square + 2 * rise.square()).detach().sqrt()
                lengths.append(square if power == 2 else square / (2 * norm))
            else:
                lengths.append(square if power == 2 else square.sqrt())
        total = torch.stack(lengths).sum()
        grads.append(torch.autograd.grad(total, list(shift.values())))
        losses.append(F.mse_loss(functional_call(model, fast, (query_x,)), query_y).detach())
    return tuple(torch.stack(g).mean(0) for g in zip(*grads, strict=True)), torch.stack(losses)


def gradients(loss, module):
    return torch.autograd.grad(loss, list(module.parameters()))


@pytest.mark.parametrize(
    ("power", "lr", "memory", "task_chunk"),
    combined(
        [1, 2], [0.1, 3.0], ["full", "step"], [None, 1, 3], fast=lambda p, lr, m, c: m == "full" and c != 3
    ),
)
@pytest.mark.parametrize("stabilize", [True, False])
def test_its_gradient_is_that_of_the_path_length(regression, power, lr, memory, task_chunk, stabilize):
    """With the larger rate, losses rise on the way."""
    inner = rules.sgd(lr=lr, momentum=0.5)
    learner = make(inner=inner, power=power, stabilize=stabilize, memory=memory, task_chunk=task_chunk)
    expected, losses = textbook(learner.model, regression, lr=lr, steps=3, power=power, stabilize=stabilize)
    out = learner(regression)
    torch.testing.assert_close(gradients(out.loss, learner), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(out.query_losses.detach(), losses, rtol=1e-9, atol=1e-12)
    assert bool((out.support_losses.diff(dim=1) > 0).any()) == (lr > 1)


class Scaled(nn.Module):
    """A model with a parameter that has no axes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(2, 3), nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, x):
        return self.scale * self.layer(x)


@pytest.mark.parametrize(
    "algorithm", [mg.Leap, mg.Reptile, mg.MAML, functools.partial(mg.BMAML, particles=2)]
)
def test_a_number_adapts_as_a_vector_of_one_does(regression, algorithm):
    results = []
    for shape, task_chunk in (((1,), None), ((), None), ((), 1)):
        model = Scaled()
        model.scale = nn.Parameter(model.scale.detach().reshape(shape))
        learner = algorithm(
            model, F.mse_loss, inner=rules.sgd(lr=0.1), steps=3, tolerance=0.5, task_chunk=task_chunk
        )
        results.append([g.flatten() for g in gradients(learner(regression).loss, learner)])
    torch.testing.assert_close(results[1:], [results[0]] * 2, rtol=1e-12, atol=1e-14)


def test_the_losses_are_those_of_maml(regression):
    learner = make(inner=rules.adam(lr=0.05), examples="support", tolerance=1.0, steps=6)
    maml = mg.MAML(learner.model, F.mse_loss, inner=learner.inner, steps=6, tolerance=1.0)
    found, expected = learner(regression), maml(regression)
    torch.testing.assert_close(found.query_losses, expected.query_losses)
    torch.testing.assert_close(found.support_losses, expected.support_losses)
    torch.testing.assert_close(found.steps, expected.steps)
    assert int(found.steps.min()) < 6
    with torch.no_grad():
        torch.testing.assert_close(learner(regression).query_losses, expected.query_losses.detach())


def test_a_path_that_goes_nowhere_has_no_gradient(regression):
    learner = make(inner=rules.sgd(lr=0.0))
    assert not any(g.any() for g in gradients(learner(regression).loss, learner))
    assert not any(g.any() for g in gradients(learner(regression, steps=0).loss, learner))


def test_lengths_of_float16_are_those_of_float64():
    found = []
    for dtype in (torch.float16, torch.float64):
        model = nn.Linear(4000, 1, bias=False).to(dtype)
        nn.init.zeros_(model.weight)
        x, y = torch.full((2, 4, 4000), 1e-2, dtype=dtype), torch.full((2, 4, 1), 1e-2, dtype=dtype)
        leap = mg.Leap(model, F.mse_loss, inner=rules.sgd(lr=0.1), steps=3)
        leap(((x, y), (x, y))).loss.backward()
        found.append(model.weight.grad)
        assert model.weight.grad.dtype == dtype
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-2, atol=0)


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_rows_of_tables_count_once(task_chunk):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    ids = torch.tensor([[1, 2, 3, 1], [5, 5, 5, 5], [7, 9, 7, 9]])
    batch = Batch(*(Examples(ids.roll(i, 1), torch.randn(3, 4, 3).double()) for i in (0, 1)))
    options: Any = {"inner": rules.sgd(lr=0.3), "steps": 3, "task_chunk": task_chunk}
    dense, rows = (mg.Leap(model, F.mse_loss, sparse=sparse, **options) for sparse in ((), ["0.weight"]))
    expected, (table, *others) = gradients(dense(batch).loss, model), gradients(rows(batch).loss, model)
    assert isinstance(table, mg.sparse.RowSparse)
    torch.testing.assert_close((table.to_dense(), *others), expected, rtol=1e-9, atol=1e-12)


def test_reverse_mode_of_torch_func(regression):
    learner = make()
    values = {name: p.detach() for name, p in learner.named_parameters()}
    got = grad(lambda params: functional_call(learner, params, (regression,)).loss)(values)
    torch.testing.assert_close(tuple(got.values()), gradients(learner(regression).loss, learner))


def test_any_rule_takes_the_steps(regression):
    """One that asks for curvature too."""
    learner = make(inner=rules.adahessian(lr=0.05), steps=2)
    assert all(bool(torch.isfinite(g).all()) for g in gradients(learner(regression).loss, learner))


def test_what_makes_no_sense_is_refused():
    power: Any = 3
    with pytest.raises(ValueError, match=r"expected 1, a length, or 2, an energy, got 3"):
        make(power=power)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'compile'"):
        make(compile=True)
