"""What second-order optimizers are for."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import least_squares as scipy_least_squares

from metagrad.optim.newton.cubic_newton import cubic_newton
from metagrad.optim.newton.gauss_newton import gauss_newton
from metagrad.optim.newton.lbfgs import lbfgs
from metagrad.optim.newton.natural_gradient import natural_gradient
from metagrad.optim.newton.newton_cg import newton_cg
from metagrad.optim.newton.trust_region_newton import trust_region_newton
from tests.optim.newton.problems import (
    classic_start,
    fit_data,
    least_squares,
    logistic,
    minimized,
    parameters,
    rosenbrock,
    stepped,
)


@pytest.mark.parametrize("n", [3, 40])
def test_newton_cg_minimises_a_convex_quadratic_in_one_step(n):
    generator = torch.Generator().manual_seed(n)
    root = torch.randn(n, n, generator=generator, dtype=torch.float64)
    H, b = root @ root.T / n + torch.eye(n), torch.randn(n, generator=generator, dtype=torch.float64)

    def loss(params):
        w = torch.cat([params["a"].reshape(-1), params["b"]])
        return w @ H @ w / 2 - b @ w

    whole = torch.randn(n, generator=generator, dtype=torch.float64)
    start = {"a": whole[:2].reshape(2, 1).clone().requires_grad_(), "b": whole[2:].clone().requires_grad_()}
    rule = newton_cg(progress=None, rtol=1e-13)
    params, state = stepped(rule, loss, start, rule.init(start))
    found = torch.cat([params["a"].reshape(-1), params["b"]]).detach()
    torch.testing.assert_close(found, torch.linalg.solve(H, b), rtol=1e-10, atol=1e-12)
    assert float(state.report.ratio) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("rule", "most"),
    [
        (newton_cg(), 8),
        (gauss_newton(), 8),
        (natural_gradient(damping=0.0), 8),
        (trust_region_newton(), 8),
        (cubic_newton(cubic=0.1), 12),
        (lbfgs(line_search_fn="strong_wolfe"), 40),
    ],
    ids=lambda rule: getattr(rule, "call", ""),
)
def test_logistic_regression_to_a_gradient_of_1e_8(rule, most):
    _, _, count = minimized(rule, logistic, parameters(torch.zeros(3, dtype=torch.float64)))
    assert count <= most


@pytest.mark.parametrize("n", [2, 100])
@pytest.mark.parametrize(
    ("rule", "most"),
    [
        (newton_cg(), 30),
        (newton_cg(damping=1e-2, warm_start=0.95), 30),
        (trust_region_newton(), 40),
        (cubic_newton(), 40),
        (lbfgs(line_search_fn="strong_wolfe"), 60),
    ],
    ids=lambda rule: getattr(rule, "call", ""),
)
def test_rosenbrock_from_the_classic_start(rule, most, n):
    params, _, count = minimized(rule, lambda p: rosenbrock(p["w"]), parameters(classic_start(n)))
    assert count <= most
    torch.testing.assert_close(params["w"].detach(), torch.ones(n, dtype=torch.float64), rtol=1e-6, atol=0)


def test_gauss_newton_finds_what_scipy_finds():
    x, y = (values.numpy() for values in fit_data())
    start = torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64)
    expected = scipy_least_squares(
        lambda w: w[0] * pow(2.718281828459045, w[1] * x) + w[2] - y,
        start.numpy(),
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-15,
    )
    params, _, count = minimized(gauss_newton(), least_squares, parameters(start), norm=1e-11)
    assert count < 30
    torch.testing.assert_close(params["w"].detach(), torch.from_numpy(expected.x), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "make",
    [newton_cg, trust_region_newton, cubic_newton, lambda **k: lbfgs(line_search_fn="strong_wolfe", **k)],
)
def test_climbing_is_descending_the_negative(make):
    start = parameters(classic_start(2))
    down, up = make(), make(maximize=True)
    a, b, s, t = start, start, down.init(start), up.init(start)
    for _ in range(4):
        a, s = stepped(down, lambda p: rosenbrock(p["w"]), a, s)
        b, t = stepped(up, lambda p: -rosenbrock(p["w"]), b, t)
    torch.testing.assert_close(a["w"], b["w"], rtol=1e-12, atol=0)
    assert rosenbrock(a["w"]) < rosenbrock(start["w"])


@pytest.mark.parametrize("make", [newton_cg, trust_region_newton, cubic_newton])
def test_a_loss_that_is_infinite_beyond_a_wall_is_not_walked_into(make):
    """-log(1 - |w|^2) + 20 w_0: Newton's step from 0 ends outside of the unit disc."""

    def barrier(params):
        w = params["w"]
        return -torch.log(1 - w.pow(2).sum()) + 20 * w[0]

    start = parameters(torch.zeros(2, dtype=torch.float64))
    params, _, count = minimized(make(), barrier, start)
    assert count < 60
    # The minimum has 20 + 2 w / (1 - w^2) = 0 in its first coordinate.
    expected = (2 - (4 + 4 * 400) ** 0.5) / (2 * 20)
    assert float(params["w"].detach()[0]) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rule",
    [newton_cg(), trust_region_newton(), cubic_newton(), lbfgs(line_search_fn="strong_wolfe")],
    ids=lambda rule: rule.call,
)
def test_dtypes_are_kept_and_steps_at_the_minimum_stay_there(rule, dtype):
    params = {
        "w": torch.full((4,), 2.0, dtype=dtype, requires_grad=True),
        "scale": torch.ones((), dtype=dtype),
    }
    params["scale"].requires_grad_()

    def loss(p):
        return (p["w"] - 3).pow(2).sum() + (p["scale"] - 1).pow(2)

    state = rule.init(params)
    for _ in range(30):
        params, state = stepped(rule, loss, params, state)
    assert params["w"].dtype == dtype
    assert params["scale"].shape == ()
    torch.testing.assert_close(params["w"].detach(), torch.full((4,), 3.0, dtype=dtype), rtol=1e-4, atol=1e-4)


def test_a_warm_start_that_climbs_is_turned_round():
    """Along negative curvature a step and its opposite have one model; the gradient tells which descends."""
    rule, params = newton_cg(warm_start=1.0, adapt=False), parameters(torch.zeros(1, dtype=torch.float64))
    state = rule.init(params)._replace(step=1, solution={"w": torch.ones(1, dtype=torch.float64)})
    new, _ = stepped(rule, lambda p: (0.1 * p["w"] - p["w"] ** 2).sum(), params, state)
    assert new["w"].tolist() == pytest.approx([-1.95])


def test_a_parameter_without_curvature_moves_by_its_gradient():
    """A linear loss has no Newton step; conjugate gradients take that of gradient descent."""
    params = parameters(torch.zeros(3, dtype=torch.float64))
    rule = newton_cg(adapt=False)
    new, _ = stepped(
        rule, lambda p: (torch.tensor([1.0, -2.0, 0.5]) * p["w"]).sum(), params, rule.init(params)
    )
    torch.testing.assert_close(new["w"].detach(), torch.tensor([-1.0, 2.0, -0.5], dtype=torch.float64))
