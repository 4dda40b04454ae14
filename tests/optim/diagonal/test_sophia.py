from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from metagrad.curvature.likelihoods.recognition import evaluate
from metagrad.optim.curvature import Diagonal, KnownDiagonal
from metagrad.optim.diagonal.sophia import sophia_g, sophia_h
from metagrad.optim.tape_curvature import TapeCurvature, WeightedLoss
from tests.optim.cases import formed, scalar

OPTIONS = [
    {},
    {"lr": 0.3, "betas": (0.5, 0.6), "gamma": 2.0, "eps": 1e-2, "curvature_every": 2},
    {"lr": 0.1, "weight_decay": 0.2, "curvature_every": 3},
    {"lr": 0.1, "gamma": 1.0, "maximize": True},
]


def as_tensors(options):
    return formed(options, lambda v: scalar(v) if type(v) is float else v)


both = pytest.mark.parametrize("make", [sophia_h, sophia_g])


@both
@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_papers_formula_on_three_parameters(make, options, tensors):
    """Algorithm 3, on f = sum of c w^4 / 12: gradient c w^3 / 3, diagonal c w^2."""
    c, w = [1.0, 3.0, -0.5], [1.0, -2.0, 0.7]
    gamma = 0.01 if make is sophia_h else 0.05
    given = {"lr": 4e-3, "betas": (0.96, 0.99), "gamma": gamma, "eps": 1e-12, "weight_decay": 0.0}
    at = {**given, "curvature_every": 10, **options}
    (b1, b2), sign = at["betas"], -1 if at.get("maximize") else 1
    m, h = [0.0] * 3, [0.0] * 3
    params = {"w": torch.tensor(w, dtype=torch.float64)}
    rule = make(**(as_tensors(options) if tensors else options))
    state = rule.init(params)
    for t in range(7):
        is_due = t % at["curvature_every"] == 0
        grads = {"w": torch.tensor([a * b**3 / 3 for a, b in zip(c, w, strict=True)], dtype=torch.float64)}
        diagonal = torch.tensor([a * b**2 for a, b in zip(c, w, strict=True)], dtype=torch.float64)
        for i in range(3):
            m[i] = b1 * m[i] + (1 - b1) * sign * grads["w"][i].item()
            if is_due:
                h[i] = b2 * h[i] + (1 - b2) * sign * diagonal[i].item()
            step = max(-1.0, min(1.0, m[i] / max(at["gamma"] * h[i], at["eps"])))
            w[i] = w[i] - at["lr"] * at["weight_decay"] * w[i] - at["lr"] * step
        assert rule.needs_curvature(state.step) == is_due
        known = KnownDiagonal({"w": diagonal}) if is_due else None
        params, state = rule.update(grads, state, params, known)
        expected = torch.tensor(w, dtype=torch.float64)
        torch.testing.assert_close(params["w"].detach(), expected, rtol=1e-12, atol=1e-14)


def test_what_they_ask_for():
    assert sophia_h(samples=3).request == Diagonal("hessian", 3, "normal")
    assert sophia_g().request.matrix == "gauss_newton"


X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 1, 0, 1, 0])


def unrolled(p, rule, steps=3):
    state = rule.init(p)
    for t in range(steps):
        evaluated = evaluate(F.cross_entropy, (X @ p["w"]).tanh(), Y)
        grads = mg.grad(evaluated.value, p, create_graph=True)
        losses = [WeightedLoss(evaluated.known, torch.ones((), dtype=torch.float64))]
        curvature = TapeCurvature(p, grads, losses=losses, create_graph=True)
        p, state = rule.update(grads, state, p, curvature if rule.needs_curvature(t) else None)
    return F.cross_entropy((X @ p["w"]).tanh(), Y)


@both
def test_unrolled_steps_pass_gradcheck_in_parameters_and_hyperparameters(make):
    # So large that no element is clipped: there the derivative jumps.
    hyper = as_tensors({"lr": 0.05, "gamma": 8.0, "eps": 3.0, "weight_decay": 0.1, "betas": (0.5, 0.6)})

    def fn(w, hyper):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return unrolled({"w": w}, make(**hyper, curvature_every=2))

    w = torch.randn(3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert mg.gradcheck(fn, (w.requires_grad_(), hyper), order=2, directions=1)


def test_the_gauss_newton_bartlett_estimate_is_the_papers():
    """Algorithm 2: B times the square of the mean gradient of the loss with drawn labels."""
    w = torch.randn(3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    logits = X @ w
    evaluated = evaluate(F.cross_entropy, logits, Y)
    losses = [WeightedLoss(evaluated.known, torch.ones((), dtype=torch.float64))]
    curvature = TapeCurvature(
        {"w": w},
        mg.grad(evaluated.value, {"w": w}, retain_graph=True),
        losses=losses,
        generators=lambda device: torch.Generator().manual_seed(7),
    )
    found = curvature.diagonal(Diagonal("gauss_newton"))["w"]
    labels = torch.multinomial(
        (X @ w).softmax(1).detach(), 1, generator=torch.Generator().manual_seed(7)
    ).flatten()
    (g,) = torch.autograd.grad(F.cross_entropy(X @ w, labels), w)
    torch.testing.assert_close(found, 6 * g**2)


@both
def test_a_step_that_needs_curvature_is_refused_without(make):
    p = {"w": torch.ones(2)}
    rule = make(curvature_every=2)
    with pytest.raises(
        ValueError, match=rf"{re.escape(make.call)}.update: this step needs curvature, and got None"
    ):
        rule.update({"w": torch.ones(2)}, rule.init(p), p)


@both
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1"),
        ({"gamma": -1.0}, "gamma must be at least 0"),
        ({"eps": -1.0}, "eps must be at least 0"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] must be below 1"),
        ({"curvature_every": 0}, "curvature_every must be a whole number of at least 1, got 0"),
        ({"samples": True}, "samples must be a whole number of at least 1, got True"),
    ],
)
def test_bad_hyperparameters_are_refused(make, keywords, message):
    with pytest.raises(ValueError, match=rf"{re.escape(make.call)}: {message}"):
        make(**keywords)
