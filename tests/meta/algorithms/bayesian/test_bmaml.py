"""BMAML: its meta-gradient against particles that are moved one by one, and what it has of MAML."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad

import metagrad as mg
from metagrad.meta.algorithms.bayesian.stein import SVGD
from metagrad.tasks import Batch, Examples
from tests.marks import combined, slow

rules = mg.optim.rules


def make(loss_fn=F.mse_loss, outputs=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    defaults: Any = {
        "inner": rules.sgd(lr=0.1),
        "steps": 2,
        "particles": 4,
        "leader_steps": 2,
        "temperature": 0.3,
    }
    return mg.BMAML(model, loss_fn, **{**defaults, **options})


def directions(particles, losses, temperature, order):
    """The directions of Stein variational gradient descent, by the sums over pairs that define them."""
    grads = [
        torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(own.values()), create_graph=order == 2)]
        )
        for own, loss in zip(particles, losses, strict=True)
    ]
    places = [torch.cat([p.flatten() for p in own.values()]) for own in particles]
    count = len(places)
    lengths = sorted((a - b).norm() for i, a in enumerate(places) for b in places[:i])
    h = lengths[(len(lengths) - 1) // 2] ** 2 / math.log(count)
    found = []
    for here in places:
        kernels = [torch.exp(-(there - here).square().sum() / h) for there in places]
        repulsions = [-2 / h * (there - here) * k for there, k in zip(places, kernels, strict=True)]
        terms = zip(kernels, grads, repulsions, strict=True)
        found.append(sum(k * g - temperature * repulsion for k, g, repulsion in terms) / count)
    return found


def moved(predict, particles, x, y, *, lr, steps, temperature, order):
    for _ in range(steps):
        losses = [F.mse_loss(predict(own, x), y) for own in particles]
        found = directions(particles, losses, temperature, order)
        particles = [
            {k: p - lr * d.view_as(p) for (k, p), d in zip(own.items(), parts, strict=True)}
            for own, parts in zip(
                particles, (d.split([p.numel() for p in particles[0].values()]) for d in found), strict=True
            )
        ]
    return particles


def textbook(learner, batch, *, order=2, lr=0.1):
    """Task by task, particle by particle: distances to the leaders, and the losses of the mixtures."""
    model, temperature = learner.particle(0), learner.temperature
    shared = {k: p for k, p in learner.model.named_parameters() if k not in learner.adapted}
    options = {"lr": lr, "temperature": temperature, "order": order}
    distances, mixtures = [], []

    def predict(own, inputs):
        return functional_call(model, {**shared, **own}, (inputs,))

    for x, y, query_x, query_y in zip(*batch.support, *batch.query, strict=True):
        start = [
            {k: learner.model.get_parameter(k)[m] for k in learner.adapted}
            for m in range(learner.num_particles)
        ]
        chasers = moved(predict, start, x, y, steps=learner.steps, **options)
        leaders = [{k: p.detach().requires_grad_() for k, p in own.items()} for own in chasers]
        every = torch.cat([x, query_x]), torch.cat([y, query_y])
        leaders = moved(predict, leaders, *every, steps=learner.leader_steps, **options)
        pairs = [(own[k], led[k].detach()) for own, led in zip(chasers, leaders, strict=True) for k in own]
        distances.append(torch.stack([(a - b).square().sum() for a, b in pairs]).sum())
        losses = torch.stack([F.mse_loss(predict(own, query_x), query_y) for own in chasers])
        mixtures.append(-temperature * torch.log(torch.exp(-losses / temperature).mean()))
    return torch.stack(distances), torch.stack(mixtures)


def gradients(loss, module):
    return torch.autograd.grad(loss, list(module.parameters()))


@pytest.mark.parametrize(
    ("leader_steps", "order", "memory", "task_chunk"),
    combined(
        [0, 2],
        [1, 2],
        ["full", "step", "sqrt", "1MiB"],
        [None, 1, 3],
        fast=lambda *case: case in ((2, 1, "full", None), (0, 2, "full", None), (2, 2, "step", 1)),
    ),
)
def test_its_gradient_is_that_of_the_loop(regression, leader_steps, order, memory, task_chunk):
    learner = make(order=order, memory=memory, task_chunk=task_chunk, leader_steps=leader_steps)
    distances, mixtures = textbook(learner, regression, order=order)
    expected = distances if leader_steps else mixtures
    out = learner(regression)
    torch.testing.assert_close(out.loss, expected.mean(), rtol=1e-9, atol=0)
    torch.testing.assert_close(out.query_losses, mixtures, rtol=1e-9, atol=0)
    torch.testing.assert_close(
        gradients(out.loss, learner), gradients(expected.mean(), learner), rtol=1e-9, atol=1e-12
    )


def test_one_particle_is_maml(regression):
    learner = make(particles=1, leader_steps=0)
    model = learner.particle(0)
    maml = mg.MAML(model, F.mse_loss, inner=learner.inner, steps=2)
    found, expected = learner(regression), maml(regression)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.support_losses, expected.support_losses)
    torch.testing.assert_close(found.query_outputs, expected.query_outputs)
    torch.testing.assert_close(
        tuple(g[0] for g in gradients(found.loss, learner)), gradients(expected.loss, maml)
    )


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_what_does_not_adapt_is_shared_by_the_particles(regression, task_chunk):
    learner = make(adapt="2", task_chunk=task_chunk)
    assert {k: tuple(p.shape) for k, p in learner.model.named_parameters()} == {
        "0.weight": (4, 2),
        "0.bias": (4,),
        "2.weight": (4, 3, 4),
        "2.bias": (4, 3),
    }
    distances, _ = textbook(learner, regression)
    out = learner(regression)
    torch.testing.assert_close(
        gradients(out.loss, learner), gradients(distances.mean(), learner), rtol=1e-9, atol=1e-12
    )


def test_particles_come_to_the_posterior():
    """Of the mean of a normal distribution: its variance and its mean are known."""
    torch.manual_seed(0)
    y = (torch.randn(20, 1).double() + 2).expand(2, 20, 1)

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Parameter(torch.randn(1).double())

        def forward(self, x):
            return self.mean.expand_as(x)

    models = [Mean() for _ in range(30)]
    learner = mg.BMAML(
        models[0], lambda p, y: (p - y).square().sum() / 2, inner=rules.sgd(0.1), steps=100, particles=models
    )
    with torch.no_grad():
        particles = learner.adapt((y, y)).params["mean"][0, :, 0]
    assert particles.mean().item() == pytest.approx(y.mean().item(), abs=0.02)
    assert particles.var().item() == pytest.approx(1 / 20, rel=0.15)


def test_predictions_are_the_mean_and_each(regression):
    learner = make()
    with torch.no_grad():
        out = learner(regression)
        fast = learner.adapt(regression.support)
    assert out.particle_outputs.shape == (4, 4, 5, 3)
    torch.testing.assert_close(out.query_outputs, out.particle_outputs.mean(1))
    torch.testing.assert_close(fast.particles(regression.query.x), out.particle_outputs)
    torch.testing.assert_close(fast(regression.query.x), out.query_outputs)
    own = {name: p[2, 1] for name, p in fast.params.items()}
    expected = functional_call(learner.particle(0), own, (regression.query.x[2],))
    torch.testing.assert_close(out.particle_outputs[2, 1], expected)


def test_in_evaluation_the_loss_is_that_of_the_mixture(regression):
    learner = make()
    with torch.no_grad():
        out = learner(regression)
    torch.testing.assert_close(out.loss, out.query_losses.mean())
    torch.testing.assert_close(learner.eval()(regression).loss, out.loss)
    assert learner.train()(regression).loss < out.loss


def test_classes_and_structured_outputs():
    torch.manual_seed(0)
    x, y = torch.randn(2, 6, 2).double(), torch.arange(3).repeat(2, 2)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3).double()

        def forward(self, x):
            return {"logits": self.layer(x), "count": torch.ones((), dtype=torch.int64)}

    named = mg.BMAML(
        Named(), lambda out, y: F.cross_entropy(out["logits"], y), inner=rules.sgd(0.1), steps=1, particles=2
    )
    out = named(((x, y), (x, y)))
    assert out.query_outputs["logits"].shape == (2, 6, 3)
    assert out.particle_outputs["logits"].shape == (2, 2, 6, 3)
    assert out.query_outputs["count"].shape == (2, 2)
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2"):
        make(F.cross_entropy)(((x, y + 1), (x, y)))


@pytest.mark.parametrize("norm", [slow("transductive"), "support"])
def test_norms_are_of_the_examples_of_one_particle(regression, norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    options: Any = {"inner": rules.sgd(0.1), "steps": 2, "norm": norm}
    learner, loop = (
        mg.BMAML(model, F.mse_loss, task_chunk=chunk, generator=torch.Generator().manual_seed(0), **options)
        for chunk in (None, 1)
    )
    stacked, looped = learner(regression), loop(regression)
    torch.testing.assert_close(stacked.loss, looped.loss)
    torch.testing.assert_close(gradients(stacked.loss, learner), gradients(looped.loss, loop))
    with pytest.raises(
        ValueError, match=r"BatchNorm1d \(1\) would keep the statistics of all particles as one"
    ):
        mg.BMAML(model, F.mse_loss, inner=rules.sgd(0.1), steps=2)


def test_rules_treat_each_particle_as_a_task(regression):
    """A norm over the parameters is that of one particle."""
    clipped = rules.chain(rules.clip_by_norm(0.01), rules.sgd(1.0))
    learner = make(inner=clipped, steps=1)
    before = dict(learner.model.named_parameters())
    after = learner.adapt(regression.support).params
    squares = [(after[name] - p).square().flatten(2).sum(-1) for name, p in before.items()]
    torch.testing.assert_close(torch.stack(squares).sum(0).sqrt(), torch.full((4, 4), 0.01).double())


def test_learned_rates_and_adam(regression):
    rate = nn.Parameter(torch.tensor(0.05).double())
    learner = make(inner=rules.adam(lr=rate), leader_steps=1)
    learner(regression).loss.backward()
    assert rate.grad is not None
    assert bool(rate.grad != 0)


def test_tasks_that_are_not_finite_are_named_or_left_out(regression):
    bad = Batch(
        regression.support,
        Examples(regression.query.x, regression.query.y.index_fill(0, torch.tensor(1), math.inf)),
    )
    with pytest.raises(FloatingPointError, match=r"BMAML: the loss of task 1 is .* on its query examples"):
        make()(bad)
    learner = make(nonfinite="skip")
    out = learner(bad)
    assert out.skipped.tolist() == [False, True, False, False]
    kept = Batch(*(Examples(*(t[[0, 2, 3]] for t in part)) for part in regression))
    expected = make()
    torch.testing.assert_close(
        gradients(out.loss, learner), gradients(expected(kept).loss, expected), rtol=1e-9, atol=1e-12
    )


@pytest.mark.slow
def test_reverse_mode_of_torch_func(regression):
    learner = make()
    values = {name: p.detach() for name, p in learner.named_parameters()}
    got = grad(lambda params: functional_call(learner, params, (regression,)).loss)(values)
    torch.testing.assert_close(tuple(got.values()), gradients(learner(regression).loss, learner))


def test_particles_are_drawn_by_a_generator_without_a_warning_where_there_are_several_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.random, "_fork_rng_warned_already", False)
    make(generator=torch.Generator().manual_seed(0))


def test_particles_are_drawn_by_a_generator_and_kept_in_the_state(regression):
    state = torch.get_rng_state()
    drawn = [make(generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    torch.manual_seed(0)
    first, same, other = (learner.model.get_parameter("0.weight") for learner in drawn)
    assert bool((first == same).all())
    assert not bool((first[1:] == other[1:]).any())
    assert bool((first[0] == other[0]).all())
    torch.set_rng_state(state)
    drawn[2].load_state_dict(drawn[0].state_dict())
    loss = drawn[0](regression).loss
    assert drawn[2](regression).loss == loss
    assert copy.deepcopy(drawn[0])(regression).loss == loss
    assert bool((drawn[0].particle(2).get_parameter("0.weight") == first[2]).all())


def test_tied_parameters_stay_tied(regression):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).tanh()).sum(-1)

    learner = mg.BMAML(
        Tied().double(), lambda p, y: (p - y.sum(-1)).square().mean(), inner=rules.sgd(0.1), steps=1
    )
    assert learner.model.a.weight is learner.model.b.weight  # type: ignore[union-attr]
    assert list(learner.model.state_dict()) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert len(gradients(learner(regression).loss, learner)) == 3


@pytest.mark.slow
def test_compiled_steps_give_the_same_gradient(regression):
    eager, compiled = make(), make(compile={"backend": "aot_eager"})
    torch.testing.assert_close(
        gradients(compiled(regression).loss, compiled), gradients(eager(regression).loss, eager)
    )


def test_the_memory_of_every_step_is_reported(regression):
    """Those of the leaders count from 0 again."""
    with mg.MemoryTracker() as tracker, tracker.outer(0):
        make()(regression).loss.backward()
    assert [record.index for record in tracker.records() if record.name == "inner"] == [0, 1, 0, 1]


def test_particles_of_float16_move_as_those_of_float64():
    torch.manual_seed(0)
    places, gradients = (
        1e-4 * torch.randn(3, 20, dtype=torch.float64),
        torch.randn(3, 20, dtype=torch.float64),
    )
    found = []
    for dtype in (torch.float64, torch.float16):
        params, grads = {"w": places.to(dtype)}, {"w": gradients.to(dtype)}
        found.append(SVGD(1.0).transform(grads, (), params)[0]["w"])
    assert found[1].dtype == torch.float16
    assert (found[1].double() - found[0]).norm() < 0.05 * found[0].norm()


def test_a_width_where_most_particles_are_one():
    params = {"w": torch.tensor([[0.0], [0.0], [0.0], [1.0]]).double()}
    found, _ = SVGD(1.0).transform({"w": torch.ones(4, 1).double()}, (), params)
    assert bool(torch.isfinite(found["w"]).all())


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"particles": 0}, ValueError, r"BMAML\(\.\.\., particles\): expected an int of 1 or more, got 0"),
        ({"particles": []}, TypeError, r"expected a number, or models, got \[\]"),
        (
            {"particles": [nn.Linear(2, 3)]},
            ValueError,
            r"the models must have the parameters of model=, but '0.bias'",
        ),
        ({"leader_steps": -1}, ValueError, r"leader_steps\): expected an int of 0 or more, got -1"),
        ({"temperature": 0.0}, ValueError, r"temperature\): expected a number above 0, got 0"),
        ({"bandwidth": -1.0}, ValueError, r"bandwidth\): expected a number above 0, got -1"),
        ({"memory": "block"}, ValueError, r"the blocks of a model are of one particle"),
        slow({"compile": "whole"}, ValueError, r"there is no graph of a meta-batch. Use compile=True"),
        (
            {"inner": rules.adahessian(0.1)},
            ValueError,
            r"the rule asks for curvature, which would mix the particles",
        ),
        ({"adapt": "5"}, ValueError, r"is no parameter of the model"),
        ({"sparse": ["0.weight"]}, TypeError, r"multiple values for keyword argument 'sparse'"),
        ({"proximal": 1.0}, TypeError, r"multiple values for keyword argument 'proximal'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        make(**options)


def test_particles_that_are_the_same_are_refused():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.w

    with pytest.raises(ValueError, match=r"particles\): number 1 equals number 0, and would stay so"):
        mg.BMAML(Bare(), F.mse_loss, inner=rules.sgd(0.1), steps=1)


@pytest.mark.slow
def test_preflight_looks_at_one_particle(regression):
    report = mg.preflight(make(), regression)
    assert report.ok
    assert report.memory
