"""Each update against the formula of its paper, on three parameters, with matrices written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.optimize import brentq

from metagrad.curvature import Result
from metagrad.optim.newton.cubic_newton import cubic_newton
from metagrad.optim.newton.gauss_newton import gauss_newton
from metagrad.optim.newton.lbfgs import lbfgs
from metagrad.optim.newton.natural_gradient import natural_gradient
from metagrad.optim.newton.newton_cg import newton_cg
from metagrad.optim.newton.second_order import endings
from metagrad.optim.newton.trust_region_newton import trust_region_newton
from metagrad.optim.tape_curvature import WeightedLoss
from tests.optim.newton.problems import (
    I3,
    START,
    bfgs,
    close,
    fit_data,
    fit_residuals,
    least_squares,
    logistic,
    logistic_data,
    parameters,
    quartic,
    quartic_gradient,
    quartic_hessian,
    quartic_of,
    stepped,
)

STARTS = [START, 4 * START, torch.tensor([0.1, 0.2, -0.1], dtype=torch.float64)]


def shifted(params):
    """A loss whose Hessian is indefinite near zero."""
    return quartic(params["w"]) - 2 * params["w"].pow(2).sum()


def derivatives(loss, w):
    """Return the dense gradient and Hessian."""

    def fn(w):
        return loss({"w": w})

    return torch.autograd.functional.jacobian(fn, w), torch.autograd.functional.hessian(fn, w)


def damped_newton(w, state, value, gradient, matrix, lr, change):
    """A step of Martens, or of Marquardt, with a dense positive definite matrix."""
    damping, added, base = state
    total = base * damping + added
    g, M = gradient(w), matrix(w)
    s = -lr * torch.linalg.solve(M + total * I3, g)
    curved = float(s @ M @ s)
    ratio = float((value(w + s) - value(w)) / (g @ s + curved / 2))
    length = 1.0
    while value(w + length * s) > value(w) + 1e-4 * length * (g @ s):
        length /= 2
    if ratio < 0.25:
        added = added * change if total else 0.1 * curved / float(s @ s)
        damping *= change
    elif ratio > 0.75:
        damping, added = damping / change, added / change
    return w + length * s, (damping, added, base), ratio


@pytest.mark.parametrize("start", STARTS, ids=str)
@pytest.mark.parametrize("damping", [0.0, 0.5, 20.0])
def test_newton_cg(start, damping):
    """Martens 2010, section 4.1, and Armijo's rule."""
    rule = newton_cg(lr=0.9, damping=damping, rtol=1e-14, progress=None)
    params, w, dense = parameters(start), start, (1.0, 0.0, damping)
    state = rule.init(params)
    for _ in range(5):
        params, state = stepped(rule, quartic_of, params, state)
        w, dense, ratio = damped_newton(w, dense, quartic, quartic_gradient, quartic_hessian, 0.9, 1.5)
        close(params["w"], w)
        close(state.factor, torch.tensor(dense[0], dtype=torch.float64))
        close(state.report.ratio, torch.tensor(ratio, dtype=torch.float64), rtol=1e-6)


@pytest.mark.parametrize("damping", [1e-3, 1.0])
def test_gauss_newton(damping):
    """Marquardt 1963: J^T J of the residuals, by hand."""
    x, _ = fit_data()

    def jacobian(w):
        e = torch.exp(w[1] * x)
        return torch.stack([e, w[0] * x * e, torch.ones_like(x)], 1)

    start = torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64)
    rule = gauss_newton(damping=damping, rtol=1e-14, progress=None)
    params, w, dense = parameters(start), start, (1.0, 0.0, damping)
    state, ratios = rule.init(params), []
    for _ in range(3):  # at the minimum the ratio of reductions is one of roundings
        params, state = stepped(rule, least_squares, params, state)
        w, dense, ratio = damped_newton(
            w,
            dense,
            lambda w: fit_residuals(w).pow(2).sum() / 2,
            lambda w: jacobian(w).T @ fit_residuals(w),
            lambda w: jacobian(w).T @ jacobian(w),
            1.0,
            3.0,
        )
        close(params["w"], w)
        close(state.factor, torch.tensor(dense[0], dtype=torch.float64))
        ratios.append(ratio)
    assert max(ratios) > 0.75


@pytest.mark.parametrize("bound", [None, 0.01])
def test_natural_gradient(bound):
    """Amari 1998, with the Fisher matrix X^T diag(p (1 - p)) X / N of a logistic regression."""
    x, y = logistic_data()
    rule = natural_gradient(
        lr=0.7, damping=0.01, max_divergence=bound, adapt=False, rtol=1e-14, progress=None
    )
    params, w = parameters(torch.zeros(3, dtype=torch.float64)), torch.zeros(3, dtype=torch.float64)
    state, lengths = rule.init(params), []
    for _ in range(4):
        p = torch.sigmoid(x @ w)
        fisher = x.T @ ((p * (1 - p))[:, None] * x) / len(y)
        d = -torch.linalg.solve(fisher + 0.01 * I3, x.T @ (p - y) / len(y))
        lengths.append(0.7 if bound is None else min(0.7, math.sqrt(2 * bound / float(d @ fisher @ d))))
        w = w + lengths[-1] * d
        params, state = stepped(rule, logistic, params, state)
        close(params["w"], w)
        assert float(state.report.length) == pytest.approx(lengths[-1], rel=1e-8)
    assert (min(lengths) < 0.7) == (bound is not None)


def test_the_metric_of_a_loss_that_is_climbed_is_the_same():
    def negative(params):
        loss, parts = logistic(params)
        return -loss, [WeightedLoss(part.loss, -part.weight) for part in parts]

    params = parameters()
    down, _ = stepped(natural_gradient(), logistic, params, natural_gradient().init(params))
    up, _ = stepped(natural_gradient(maximize=True), negative, params, natural_gradient().init(params))
    close(up["w"], down["w"])


def steihaug(g, H, radius):
    """Nocedal, Wright, algorithm 7.2."""
    z, r, d = torch.zeros_like(g), g, -g
    for _ in range(3):
        curved = d @ H @ d
        a, b, c = d @ d, 2 * z @ d, z @ z - radius**2
        tau = (-b + (b * b - 4 * a * c).sqrt()) / (2 * a)
        if curved <= 0:
            return z + tau * d, "NEGATIVE_CURVATURE"
        alpha = (r @ r) / curved
        if (z + alpha * d).norm() >= radius:
            return z + tau * d, "BOUNDARY"
        z, new = z + alpha * d, r + alpha * H @ d
        d, r = -new + (new @ new) / (r @ r) * d, new
    return z, "CONVERGED"


def least_on_the_boundary(g, H, radius):
    """Nocedal, Wright, theorem 4.1: (H + m) d = -g with |d| the radius, and H + m positive definite."""

    def step(m):
        return -torch.linalg.solve(H + m * I3, g)

    least = max(0.0, -float(torch.linalg.eigvalsh(H)[0]))
    most = float(g.norm()) / radius + float(torch.linalg.eigvalsh(H).abs().max()) + 1
    m = brentq(lambda m: 1 / radius - 1 / float(step(m).norm()), least + 1e-12, most, xtol=1e-15, rtol=1e-14)
    return step(m)


@pytest.mark.parametrize(
    ("radius", "loss", "boundary_steps", "start"),
    [
        (radius, loss, boundary_steps, STARTS[(i + j) % 3])
        for i, radius in enumerate([0.05, 0.6, 2.0, 100.0])
        for j, (loss, boundary_steps) in enumerate(itertools.product([quartic_of, shifted], [0, 50]))
    ],
)
def test_trust_region_newton(loss, start, radius, boundary_steps):
    rule = trust_region_newton(radius=radius, rtol=1e-12, boundary_steps=boundary_steps)
    params, w = parameters(start), start
    state = rule.init(params)
    for _ in range(4):
        g, H = derivatives(loss, w)
        d, ending = steihaug(g, H, radius)
        if boundary_steps and ending != "CONVERGED":
            d = least_on_the_boundary(g, H, radius)
        ratio = float((loss({"w": w + d}) - loss({"w": w})) / (g @ d + d @ H @ d / 2))
        w = w + d if ratio > 1e-4 else w
        if ratio < 0.25:
            radius = 0.25 * float(d.norm())
        elif ratio > 0.75 and float(d.norm()) > 0.99 * radius and 2 * radius <= 1e3:
            radius *= 2
        params, state = stepped(rule, loss, params, state)
        close(params["w"], w)
        assert endings(state.report) == [ending]
        given = rule.radius
        close(state.factor * given, torch.tensor(radius, dtype=torch.float64))


@pytest.mark.parametrize(
    ("cubic", "loss", "start"),
    [
        (cubic, loss, STARTS[(i + j) % 3])
        for i, cubic in enumerate([0.1, 1.0, 50.0])
        for j, loss in enumerate([quartic_of, shifted])
    ],
)
def test_cubic_newton(loss, start, cubic):
    """Nesterov, Polyak 2006, equation 2.5: d = -(H + M r / 2)^-1 g with r = |d|."""
    rule = cubic_newton(lr=0.8, cubic=cubic, rtol=1e-13)
    params, w = parameters(start), start
    state = rule.init(params)
    for _ in range(4):
        g, H = derivatives(loss, w)

        def step(r, H=H, g=g, cubic=cubic):
            return -torch.linalg.solve(H + cubic * r / 2 * I3, g)

        least = max(0.0, -2 * float(torch.linalg.eigvalsh(H)[0]) / cubic)
        r = brentq(lambda r: float(step(r).norm()) - r, least + 1e-9, least + 1e4, xtol=1e-14, rtol=1e-15)
        d = 0.8 * step(r)
        model = float(g @ d + d @ H @ d / 2 + cubic * d.norm() ** 3 / 6)
        ratio = float(loss({"w": w + d}) - loss({"w": w})) / model
        w = w + d if ratio > 1e-4 else w
        cubic *= 2 if ratio < 0.25 else 0.5 if ratio > 0.75 else 1
        params, state = stepped(rule, loss, params, state)
        close(params["w"], w, rtol=1e-7)
        close(state.factor * rule.cubic, torch.tensor(cubic, dtype=torch.float64))
        assert float(state.report.ratio) == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize("history_size", [1, 3, 20])
def test_lbfgs_is_that_of_torch(history_size):
    rule = lbfgs(lr=0.8, history_size=history_size)
    params, w = parameters(), START.clone().requires_grad_()
    opt = torch.optim.LBFGS(
        [w], lr=0.8, max_iter=1, history_size=history_size, tolerance_change=0, tolerance_grad=0
    )
    state = rule.init(params)

    def closure():
        opt.zero_grad()
        loss = quartic(w)
        loss.backward()
        return loss

    for _ in range(12):
        grads = {"w": quartic_gradient(params["w"].detach())}
        params, state = rule.update(grads, state, params)
        opt.step(closure)
        torch.testing.assert_close(params["w"].detach(), w.detach(), rtol=1e-10, atol=1e-12)


def test_lbfgs_with_all_pairs_is_bfgs():
    pairs, w = [], START
    rule, params = lbfgs(lr=0.5, history_size=5), parameters()
    state = rule.init(params)
    for _ in range(4):
        g = quartic_gradient(w)
        H = bfgs(pairs) if pairs else I3 / g.abs().sum().clamp(min=1)
        new = w - 0.5 * H @ g
        pairs.append((new - w, quartic_gradient(new) - g))
        w = new
        grads = {"w": quartic_gradient(params["w"].detach())}
        params, state = rule.update(grads, state, params)
        close(params["w"], w)


def test_a_pair_without_positive_curvature_is_left_out():
    rule, params = lbfgs(), {"w": torch.zeros(2, dtype=torch.float64)}
    state = rule.init(params)
    params, state = rule.update({"w": torch.tensor([0.5, 0.0])}, state, params)
    _, state = rule.update({"w": torch.tensor([0.9, 0.0])}, state, params)  # downhill, and steeper
    assert state.num_pairs == 0
    assert not any(pair.any() for pair in (*state.moves, *state.changes))


def test_negative_curvature_is_followed_downhill():
    """At the saddle of x^2 - y^2 + y^4 / 4, whose minima are at y = +-sqrt(2)."""

    def saddle(params):
        x, y = params["w"]
        return x**2 - y**2 + y**4 / 4

    for rule in (newton_cg(), trust_region_newton(), cubic_newton()):
        params = parameters(torch.tensor([0.0, 1e-3], dtype=torch.float64))
        state, seen = rule.init(params), set()
        for _ in range(40):
            before = float(saddle(params).detach())
            params, state = stepped(rule, saddle, params, state)
            assert float(saddle(params).detach()) <= before + 1e-14
            seen.update(endings(state.report))
        if rule.call != "cubic_newton(...)":
            assert Result.NEGATIVE_CURVATURE.name in seen
        assert float(params["w"].detach()[1]) == pytest.approx(math.sqrt(2), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "rule",
    [cubic_newton(), lbfgs(), lbfgs(line_search_fn="strong_wolfe"), newton_cg(), trust_region_newton()],
    ids=lambda rule: rule.call,
)
def test_half_precision_is_solved_for_in_float32(rule, dtype):
    """Torch factorises no matrices of half precision, and residuals that are small vanish in float16."""

    def after_two_steps(dtype):
        params = {"w": (START / 8).to(torch.bfloat16).to(dtype).requires_grad_()}
        state = rule.init(params)
        for _ in range(2):
            loss = lambda p: quartic(p["w"].double()).to(dtype)  # noqa: E731
            params, state = stepped(rule, loss, params, state)
        assert params["w"].dtype == dtype
        return params["w"].double()

    expected = after_two_steps(torch.float64)
    torch.testing.assert_close(after_two_steps(dtype), expected, rtol=8 * torch.finfo(dtype).eps, atol=4e-3)
