"""Newton's optimizers with the curvature of a part of the data, at some of the steps, and with a preconditioner."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metagrad.curvature.likelihoods.recognition import evaluate
from metagrad.optim import GaussNewton, NaturalGradient, NewtonCG, TrustRegionNewton
from metagrad.optim.curvature import Diagonal
from metagrad.optim.newton.gauss_newton import gauss_newton
from metagrad.optim.newton.natural_gradient import natural_gradient
from metagrad.optim.newton.newton_cg import newton_cg
from metagrad.optim.objective import TapeObjective
from metagrad.optim.tape_curvature import TapeCurvature, WeightedLoss
from metagrad.optim.torch_optim.closure_objective import BackwardPass, GraphCurvature
from metagrad.optim.torch_optim.curvature_optimizer import generators_of
from tests.marks import combined, slow
from tests.optim.torch_optim.cases import (
    assert_equal,
    batch,
    classification,
    closure_of,
    network,
    run,
    snapshot,
)

F64 = torch.float64
EVERY = [NewtonCG, GaussNewton, NaturalGradient]
every = pytest.mark.parametrize("make", EVERY)
RULES = {NewtonCG: newton_cg, GaussNewton: gauss_newton, NaturalGradient: natural_gradient}
OPTIONS = {
    "every": {"curvature_every": 3, "pairs": 4},
    "preconditioned": {"preconditioner": "diagonal", "samples": 2},
    "all": {"curvature_every": 2, "pairs": 3, "preconditioner": "diagonal", "samples": 1, "warm_start": 0.9},
}
in_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


FIXED = {"damping": 0.5, "adapt": False}


class Parts:
    """A closure over examples that takes a fraction of them, and notes what it was called for."""

    def __init__(self, opt, model, dtype=F64):
        self.opt, self.model, self.calls = opt, model, []
        self.x, self.y = batch(dtype)

    def __call__(self, fraction=1.0):
        self.calls.append(fraction)
        self.opt.zero_grad()
        num_examples = round(fraction * len(self.x))
        loss = F.cross_entropy(self.model(self.x[:num_examples]), self.y[:num_examples])
        loss.backward()
        return loss


# A part of the data


@every
@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_a_fraction_is_the_curvature_of_a_closure_of_that_part(make, fraction):
    results = []
    for by_fraction in (True, False):
        model = network(F64)
        opt = make(model.parameters(), **FIXED, curvature_fraction=fraction if by_fraction else 1.0)
        closure = Parts(opt, model)
        for _ in range(3):
            if by_fraction:
                opt.step(closure)
            else:
                opt.step(closure, curvature=lambda closure=closure: closure(fraction))
        assert closure.calls == [1.0, fraction] * 3
        results.append([*snapshot(model), *(p.grad for p in model.parameters())])
    assert_equal(*results)
    whole = network(F64)
    opt = make(whole.parameters(), **FIXED)
    for _ in range(3):
        opt.step(Parts(opt, whole))
    assert not torch.allclose(results[0][0], next(whole.parameters()))


@every
def test_products_are_with_the_part_and_gradient_and_loss_of_all(make, monkeypatch):
    """So many products, each with the graph of a quarter of the examples."""
    sizes = []
    names = {
        NewtonCG: "product_of_vector",
        GaussNewton: "gauss_newton_products",
        NaturalGradient: "fisher_products",
    }
    name = names[make]
    original = getattr(GraphCurvature, name)

    def observed(self, v):
        for one in self._curved:
            sizes.extend(len(part.loss.loss.output) for part in one.parts)
            sizes.extend([0] * (not one.parts))
        return original(self, v)

    monkeypatch.setattr(GraphCurvature, name, observed)
    model = network(F64)
    opt = make(model.parameters(), damping=0.5, curvature_fraction=0.25)
    closure = Parts(opt, model)
    expected = torch.autograd.grad(classification(model, F64)(), list(model.parameters()))
    loss = opt.step(closure)
    assert closure.calls[:2] == [1.0, 0.25]
    assert set(closure.calls[2:]) <= {1.0}
    assert closure.calls[2:]
    assert len(sizes) == opt.stats["products"] > 0
    assert set(sizes) == ({0} if make is NewtonCG else {3})
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-12, atol=0)
    assert float(loss) == pytest.approx(float(classification(network(F64), F64)().detach()))


def test_a_closure_of_the_part_wins():
    model = network(F64)
    opt = NewtonCG(model.parameters(), **FIXED, curvature_fraction=0.25)
    closure = Parts(opt, model)

    def without_fraction():
        return closure()

    opt.step(without_fraction, curvature=lambda: closure(0.5))
    assert closure.calls == [1.0, 0.5]


@every
def test_a_closure_that_takes_no_fraction(make):
    model = network(F64)
    opt = make(model.parameters(), curvature_fraction=0.25)
    before, calls = snapshot(model), []

    def closure():
        calls.append(1)

    with pytest.raises(
        TypeError,
        match=rf"{make.__name__}.step\(closure\): curvature_fraction=0.25 calls closure\(fraction=0.25\).*"
        r"`def closure\(fraction=1.0\):`.*opt.step\(closure, curvature=part\)",
    ):
        opt.step(closure)
    assert not calls
    assert_equal(before, snapshot(model))


@every
@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, math.nan])
def test_fractions_out_of_their_range(make, fraction):
    with pytest.raises(
        ValueError, match=rf"{make.__name__}\(params\): curvature_fraction must be above 0 and at most 1, got"
    ):
        make(network().parameters(), curvature_fraction=fraction)


def test_a_fraction_without_a_closure():
    model = network(F64)
    opt = NewtonCG(model.parameters(), **FIXED, curvature_fraction=0.5)
    opt.backward(classification(model, F64)())
    with pytest.raises(
        RuntimeError, match=r"NewtonCG.step: curvature_fraction=0.5 .* Call opt.step\(closure\)"
    ):
        opt.step()


# Some of the steps


@every
@in_options
def test_steps_are_the_rules(make, options):
    model, twin = network(F64), network(F64)
    opt = make(model.parameters(), damping=0.3, seed=11, **options)
    rule = RULES[make](damping=0.3, **options)
    params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    state = rule.init(params)

    def loss(values):
        x, y = batch(F64)
        found = evaluate(F.cross_entropy, torch.func.functional_call(twin, values, (x,)), y)
        return found.value, [WeightedLoss(found.known, torch.ones((), dtype=F64))]

    for step in range(5):
        opt.step(closure_of(opt, classification(model, F64)))
        objective = TapeObjective(loss, params, generators=generators_of(11, step))
        with torch.no_grad():
            new, state = rule.update(objective.grads, state, params, objective)
        params = {name: p.detach().requires_grad_() for name, p in new.items()}
        for a, b in zip(model.parameters(), params.values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-10)
        assert opt.stats["products"] == int(state.report.products)


@every
def test_stats_and_calls_of_steps_between(make):
    model = network(F64)
    opt = make(model.parameters(), curvature_every=3, curvature_fraction=0.5, damping=0.1)
    closure, losses, damping = Parts(opt, model), [], None
    for step in range(7):
        closure.calls.clear()
        losses.append(float(opt.step(closure)))
        stats = opt.stats
        is_due = step % 3 == 0
        assert closure.calls.count(0.5) == is_due
        assert (stats["products"] > 0) == is_due
        assert (stats["direction"] == "quasi_newton") == (not is_due)
        assert (stats["ending"] == "NONE") == (not is_due)
        if not is_due:
            assert math.isnan(stats["ratio"])
            assert stats["damping"] == damping
        damping = stats.get("damping")
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("make", [NewtonCG, TrustRegionNewton])
def test_steps_between_keep_no_graph_of_the_gradient(make, monkeypatch):
    asked, original = [], torch.autograd.grad

    def observed(*args, create_graph=False, **kwargs):
        asked.append(create_graph)
        return original(*args, create_graph=create_graph, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", observed)
    options = {"curvature_every": 2} if make is NewtonCG else {}
    model, due = network(F64), []
    opt = make(model.parameters(), **options)
    for _ in range(4):
        asked.clear()
        run(opt, classification(model, F64), 1)
        due.append(any(asked))
    assert due == ([True, False] * 2 if options else [True] * 4)


@every
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
@pytest.mark.parametrize(
    ("options", "steps"),
    # At a solve and between two.
    combined(OPTIONS, [2, 3], fast=lambda name, steps: name == "all"),
)
def test_resumes_bit_for_bit(make, options, dtype, steps):
    model = network(dtype)
    opt = make(model.parameters(), **OPTIONS[options])
    run(opt, classification(model, dtype), steps)
    file = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), file)
    file.seek(0)
    other = network(dtype)
    resumed = make(other.parameters(), lr=0.7, seed=99)
    for part, state in zip((other, resumed), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    twin, copied = copy.deepcopy((model, opt))
    for m, o in ((model, opt), (other, resumed), (twin, copied)):
        torch.rand(())  # what others draw is no matter
        run(o, classification(m, dtype), 4)
    assert_equal(snapshot(model), snapshot(other))
    assert_equal(snapshot(model), snapshot(twin))


@every
def test_seeds_decide_what_is_drawn(make):
    results = []
    for seed in (1, 1, 2):
        model = network(F64)
        opt = make(model.parameters(), **FIXED, preconditioner="diagonal", max_steps=2, seed=seed)
        run(opt, classification(model, F64), 2)
        results.append(snapshot(model))
    assert_equal(results[0], results[1])
    assert not torch.equal(results[0][0], results[2][0])


@every
@in_options
def test_a_grad_scaler_changes_nothing(make, options):
    results = []
    for scaled in (False, True):
        model = network(F64)
        opt = make(model.parameters(), **FIXED, seed=3, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for _ in range(4):
            opt.zero_grad()
            with opt.recording():
                scaler.scale(classification(model, F64)()).backward()
            scaler.step(opt)
            scaler.update()
        results.append(snapshot(model))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-11)


def test_an_overflow_between_is_no_step():
    model = network(F64)
    opt = NewtonCG(model.parameters(), **FIXED, curvature_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for overflows in (False, True, False, False):
        opt.zero_grad()
        with opt.recording():
            scaler.scale(classification(model, F64)()).backward()
        if overflows:
            next(model.parameters()).grad[0, 0] = math.inf
        scaler.step(opt)
        scaler.update()
    assert opt.param_groups[0]["step"] == 3
    assert opt.stats["direction"] in ("newton", "negative_curvature")  # which it is depends on the start


@every
def test_parameters_that_join_or_miss_steps(make):
    """The number of the group's step decides, so that what the closure gives is what the rule asks for."""
    a, b = (torch.tensor([2.0], dtype=F64, requires_grad=True) for _ in range(2))
    opt = make([a, b], curvature_every=2, damping=0.1)

    def loss_of(*ws):
        return lambda: sum(F.mse_loss(torch.tanh(w) + w, torch.ones(1, dtype=F64)) for w in ws)

    for used in ((a,), (a, b), (b,), (a,), (a, b), (a, b)):
        run(opt, loss_of(*used), 1)
    run(opt, loss_of(a, b), 20)
    opt.add_param_group({"params": [torch.tensor([2.0], dtype=F64, requires_grad=True)]})
    c = opt.param_groups[1]["params"][0]
    run(opt, loss_of(a, b, c), 21)
    torch.testing.assert_close(torch.tanh(c) + c, torch.ones(1, dtype=F64), rtol=1e-5, atol=0)


@every
def test_curvature_every_may_change_on_the_way(make):
    model = network(F64)
    opt = make(model.parameters(), damping=0.1)
    run(opt, classification(model, F64), 2)
    opt.param_groups[0]["curvature_every"] = 2
    losses = run(opt, classification(model, F64), 4)
    assert losses[-1] < losses[0]
    assert opt.stats["direction"] == "quasi_newton"
    opt.param_groups[0]["curvature_every"] = 1
    run(opt, classification(model, F64), 1)
    assert opt.stats["products"] > 0


def test_hyperparameters_are_checked():
    with pytest.raises(ValueError, match="curvature_every must be a whole number of at least 1, got 0"):
        NewtonCG(network().parameters(), curvature_every=0)
    with pytest.raises(ValueError, match='preconditioner must be "diagonal" or None'):
        GaussNewton(network().parameters(), preconditioner="nystrom")
    with pytest.raises(ValueError, match="exponent must be at least 0"):
        NaturalGradient(network().parameters(), exponent=-1.0)


# The estimate of a diagonal


def passes_of(model, weights=(1.0,)):
    """Graphs of the parts of a loss that add up to the mean over a batch."""
    found, x = [], batch(F64)[0]
    params = list(model.parameters())
    for weight in weights:
        loss = weight * (model(x).logsumexp(1).mean() + sum(p.pow(4).sum() for p in params))
        grads = torch.autograd.grad(loss, params, create_graph=True)
        found.append(BackwardPass(loss.detach(), dict(zip(params, grads, strict=True)), ()))
    return found


def test_the_diagonal_of_a_hessian_is_hutchinsons():
    model = network(F64)
    named = dict(model.named_parameters())
    passes = passes_of(model)
    found = GraphCurvature(named, passes, generators=generators_of(0, 0)).diagonal(Diagonal("hessian", 400))
    for key, p in named.items():
        g = passes[0].grads[p].flatten()
        exact = [
            torch.autograd.grad(g[i], p, retain_graph=True)[0].flatten()[i].item() for i in range(len(g))
        ]
        torch.testing.assert_close(found[key].flatten(), torch.tensor(exact, dtype=F64), rtol=0.1, atol=0.1)


def test_the_diagonal_of_micro_batches_is_that_of_the_whole():
    model = network(F64)
    named, request = dict(model.named_parameters()), Diagonal("hessian", 2)
    whole, parts = (
        GraphCurvature(
            named, passes_of(model, weights), generators=generators_of(0, 0), inverse_scale=0.5
        ).diagonal(request)
        for weights in ((1.0,), (0.25, 0.75))
    )
    for key in named:
        torch.testing.assert_close(whole[key], parts[key])
    twice = GraphCurvature(named, passes_of(model), generators=generators_of(0, 0)).diagonal(request)
    torch.testing.assert_close(twice[key], 2 * whole[key])


def test_the_diagonal_of_gauss_newton_is_that_of_the_tape(monkeypatch):
    """The same draws; a parameter on which the output does not depend has none."""
    model, extra = network(F64), nn.Parameter(torch.ones(2, dtype=F64))
    opt = GaussNewton([*model.named_parameters(), ("extra", extra)], preconditioner="diagonal", seed=4)
    request, seen, original = Diagonal("gauss_newton", 2), [], GraphCurvature.diagonal

    def observed(self, _):
        (one,) = self._passes
        named = dict(model.named_parameters())
        own = {key: one.grads[p] for key, p in named.items()}
        losses = [part.loss for part in one.parts]
        seen.append(
            TapeCurvature(named, own, losses=losses, generators=generators_of(4, 0)).diagonal(request)
        )
        seen.append(original(self, request))
        return seen[-1]

    monkeypatch.setattr(GraphCurvature, "diagonal", observed)
    loss_of = classification(model, F64)
    opt.step(closure_of(opt, lambda: loss_of() + extra.pow(2).sum()))
    expected, found = seen
    for key in expected:
        torch.testing.assert_close(found[key], expected[key])
        assert (found[key] >= 0).all()
    assert found["extra"].tolist() == [0.0, 0.0]


def test_an_ill_scaled_regression_by_a_closure():
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -4, 20, dtype=F64)
    x = torch.randn(100, 20, generator=generator, dtype=F64) * scales
    y = x @ (torch.randn(20, generator=generator, dtype=F64) / scales)
    steps = {}
    for preconditioner in (None, "diagonal"):
        w = torch.zeros(20, dtype=F64, requires_grad=True)
        opt = GaussNewton([w], damping=0.0, adapt=False, progress=None, preconditioner=preconditioner, seed=0)
        run(opt, lambda w=w: F.mse_loss(x @ w, y), 1)
        assert opt.stats["ending"] == "CONVERGED"
        steps[preconditioner] = opt.stats["steps"]
    assert steps["diagonal"] < steps[None] / 2


@pytest.mark.parametrize("scale", [1e-3, 3e3])
def test_float16_multiplies_vectors_of_size_one(scale):
    """Others vanish there, or have products that overflow."""
    found = []
    for dtype in (torch.float16, F64):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).half().to(dtype)
        x, y = torch.randn(40, 4).half().to(dtype), torch.arange(40) % 3
        opt = TrustRegionNewton(model.parameters())

        def closure(model=model, opt=opt, x=x, y=y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y) * scale
            loss.backward()
            return loss

        for _ in range(4):
            loss = opt.step(closure)
        found.append(loss.double() / scale)
    torch.testing.assert_close(*found, rtol=2e-2, atol=0)
