"""PLATIPUS: its meta-gradient against samples that are drawn and adapted one by one."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call, grad

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.marks import combined

rules = mg.optim.rules
SEED = 3


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    defaults: Any = {"inner": rules.sgd(lr=0.1), "steps": 2, "samples": 3, "temperature": 0.3, "rate": 0.2}
    learner = mg.PLATIPUS(
        model, F.mse_loss, generator=torch.Generator().manual_seed(SEED), **{**defaults, **options}
    )
    with torch.no_grad():
        for number, variance in enumerate(learner.posterior.log_variances):
            variance += 0.1 * number + torch.linspace(-1, 1, variance.numel()).view_as(variance)
    return learner


def gradients_at(loss, values, order):
    return dict(
        zip(values, torch.autograd.grad(loss, list(values.values()), create_graph=order == 2), strict=True)
    )


def distribution(learned, predict, means, x, y, order):
    """A normal distribution of each entry about a gradient step."""
    step = gradients_at(F.mse_loss(predict(means, x), y), means, order)
    stds = dict(zip(means, ((v / 2).exp() for v in learned.log_variances), strict=True))
    return {name: Normal(p - learned.rate * step[name], stds[name]) for name, p in means.items()}


def adapted(predict, start, x, y, *, steps, order):
    for _ in range(steps):
        step = gradients_at(F.mse_loss(predict(start, x), y), start, order)
        start = {name: p - 0.1 * step[name] for name, p in start.items()}
    return start


def textbook(learner, batch, *, order=2, is_trained=True):
    """Task by task, sample by sample: bounds, and the losses of the mixtures."""
    every = dict(learner.model.named_parameters())
    means = {name: p for name, p in every.items() if name in learner._adapted_parameters()}
    generator, shape = torch.Generator().manual_seed(SEED), (len(batch.support.x), learner.num_particles)
    noise = {k: torch.randn((*shape, *p.shape), dtype=p.dtype, generator=generator) for k, p in means.items()}
    bounds, mixtures = [], []

    def predict(own, inputs):
        return functional_call(learner.model, {**every, **own}, (inputs,))

    for task, (x, y, query_x, query_y) in enumerate(zip(*batch.support, *batch.query, strict=True)):
        prior = distribution(learner.prior, predict, means, x, y, order)
        source = (
            distribution(learner.posterior, predict, means, query_x, query_y, order) if is_trained else prior
        )
        losses = []
        for m in range(learner.num_particles):
            start = {name: n.loc + n.scale * noise[name][task, m] for name, n in source.items()}
            own = adapted(predict, start, x, y, steps=learner.steps, order=order)
            losses.append(F.mse_loss(predict(own, query_x), query_y))
        losses = torch.stack(losses)
        divergence = torch.stack([kl_divergence(source[name], prior[name]).sum() for name in prior]).sum()
        bounds.append(losses.mean() + learner.temperature * divergence)
        mixtures.append(-learner.temperature * torch.log(torch.exp(-losses / learner.temperature).mean()))
    return torch.stack(bounds), torch.stack(mixtures)


def gradients(loss, module):
    return torch.autograd.grad(loss, list(module.parameters()), allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize(
    ("order", "memory", "task_chunk"),
    combined(
        [1, 2],
        ["full", "step", "sqrt", "1MiB"],
        [None, 1, 3],
        fast=lambda *case: case in ((1, "full", None), (2, "step", 1)),
    ),
)
def test_its_gradient_is_that_of_the_loop(regression, order, memory, task_chunk):
    learner = make(order=order, memory=memory, task_chunk=task_chunk)
    bounds, mixtures = textbook(learner, regression, order=order)
    out = learner(regression)
    torch.testing.assert_close(out.loss, bounds.mean(), rtol=1e-9, atol=0)
    torch.testing.assert_close(out.query_losses, mixtures, rtol=1e-9, atol=0)
    torch.testing.assert_close(
        gradients(out.loss, learner), gradients(bounds.mean(), learner), rtol=1e-9, atol=1e-12
    )


def test_what_does_not_adapt_is_shared(regression):
    learner = make(adapt="2")
    bounds, _ = textbook(learner, regression)
    torch.testing.assert_close(
        gradients(learner(regression).loss, learner), gradients(bounds.mean(), learner), rtol=1e-9, atol=1e-12
    )
    assert len(learner.prior.log_variances) == 2


def test_in_evaluation_samples_are_those_of_the_prior(regression):
    _, expected = textbook(make(), regression, is_trained=False)
    with torch.no_grad():
        out, fast = make()(regression), make().adapt(regression.support)
    torch.testing.assert_close(out.query_losses, expected.detach(), rtol=1e-9, atol=0)
    torch.testing.assert_close(out.loss, expected.detach().mean(), rtol=1e-9, atol=0)
    torch.testing.assert_close(fast.particles(regression.query.x), out.particle_outputs)
    torch.testing.assert_close(fast(regression.query.x), out.particle_outputs.mean(1))
    learner = make().eval()
    _, expected = textbook(learner, regression, is_trained=False)
    loss = learner(regression).loss
    torch.testing.assert_close(loss, out.loss)
    torch.testing.assert_close(
        gradients(loss, learner), gradients(expected.mean(), learner), rtol=1e-9, atol=1e-12
    )


def test_one_narrow_sample_about_no_step_is_maml(regression):
    learner = make(samples=1, rate=0.0, std=1e-9).eval()
    maml = mg.MAML(learner.model, F.mse_loss, inner=learner.inner, steps=2)
    torch.testing.assert_close(
        learner(regression).query_losses, maml(regression).query_losses, rtol=1e-6, atol=0
    )


def test_samples_are_drawn_anew_by_the_generator(regression):
    learner = make()
    first, second = learner(regression), learner(regression)
    assert not bool((first.query_losses == second.query_losses).any())
    learner.generator = torch.Generator().manual_seed(SEED)
    torch.testing.assert_close(learner(regression).query_losses, first.query_losses)
    other = copy.deepcopy(learner)
    other.load_state_dict(learner.state_dict())
    assert {"prior.rate", "posterior.log_variances.3"} < set(learner.state_dict())
    other.generator, learner.generator = (torch.Generator().manual_seed(7) for _ in range(2))
    assert other(regression).loss == learner(regression).loss


@pytest.mark.slow
def test_tasks_that_are_left_out_do_not_move_the_others(regression):
    y = regression.query.y.index_fill(0, torch.tensor(1), math.inf)
    bad = Batch(regression.support, Examples(regression.query.x, y))
    with pytest.raises(FloatingPointError, match=r"PLATIPUS: the loss of task 1 is nan at inner step 0"):
        make()(bad)
    learner = make(nonfinite="skip")
    bounds, _ = textbook(learner, regression)
    out = learner(bad)
    assert out.skipped.tolist() == [False, True, False, False]
    torch.testing.assert_close(
        gradients(out.loss, learner), gradients(bounds[[0, 2, 3]].mean(), learner), rtol=1e-9, atol=1e-12
    )


@pytest.mark.slow
def test_reverse_mode_of_torch_func(regression):
    learner = make()
    values = {name: p.detach() for name, p in learner.named_parameters()}
    got = grad(lambda params: functional_call(learner, params, (regression,)).loss)(values)
    learner.generator = torch.Generator().manual_seed(SEED)
    torch.testing.assert_close(tuple(got.values()), gradients(learner(regression).loss, learner))


@pytest.mark.slow
def test_compiled_steps_give_the_same_gradient(regression):
    eager, compiled = make(), make(compile={"backend": "aot_eager"})
    torch.testing.assert_close(
        gradients(compiled(regression).loss, compiled), gradients(eager(regression).loss, eager)
    )


def test_the_gradients_at_the_mean_are_a_phase(regression):
    with mg.MemoryTracker() as tracker, tracker.outer(0):
        make()(regression).loss.backward()
    assert [record.name for record in tracker.records()].count("start") == 1


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"samples": 0}, ValueError, r"PLATIPUS\(\.\.\., samples\): expected an int of 1 or more, got 0"),
        ({"std": 0.0}, ValueError, r"std\): expected a number above 0, got 0"),
        ({"temperature": -1.0}, ValueError, r"temperature\): expected a number above 0, got -1"),
        ({"memory": "block"}, ValueError, r"the blocks of a model are of one particle"),
        ({"inner": rules.adahessian(0.1)}, ValueError, r"the rule asks for curvature"),
        ({"start": {"0.bias": "zeros"}}, TypeError, r"multiple values for keyword argument 'start'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        make(**options)


@pytest.mark.slow
def test_preflight_looks_at_the_model(regression):
    assert mg.preflight(make(), regression).ok
