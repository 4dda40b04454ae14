"""Newton steps, their matrices and conjugate gradients against dense matrices."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metagrad.curvature import ParameterSpace, Result
from metagrad.curvature.solvers.methods import RESULTS
from metagrad.optim import GaussNewton, NewtonCG
from metagrad.optim.newton.newton import Curvature, conjugate_gradients
from metagrad.optim.second_order.curvature_optimizer import BackwardPass
from tests.curvature.maps import matrix as matrix_of
from tests.optim.second_order.problems import (
    I3,
    START,
    fit_data,
    fit_residuals,
    logistic_data,
    quartic,
    quartic_gradient,
    quartic_hessian,
)
from tests.optim.torch_optim.cases import closure_of

F64 = torch.float64


# Steps


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


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("damping", [0.0, 0.5, 20.0])
def test_newton_cg_is_martens(scale, damping):
    """Martens 2010, section 4.1, and Armijo's rule."""
    start = scale * START
    w, dense = start.clone().requires_grad_(), (1.0, 0.0, damping)
    opt, expected = NewtonCG([w], lr=0.9, damping=damping, rtol=1e-14, progress=None), start
    for _ in range(5):
        opt.step(closure_of(opt, lambda: quartic(w)))
        expected, dense, ratio = damped_newton(
            expected, dense, quartic, quartic_gradient, quartic_hessian, 0.9, 1.5
        )
        torch.testing.assert_close(w.detach(), expected, rtol=1e-8, atol=1e-10)
        assert opt.stats["damping"] == pytest.approx(dense[0] * damping + dense[1], rel=1e-6)
        assert opt.stats["ratio"] == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("damping", [1e-3, 1.0])
def test_gauss_newton_is_marquardts(damping):
    """Marquardt 1963: J^T J of the residuals, by hand."""
    x, _ = fit_data()

    def jacobian(w):
        e = torch.exp(w[1] * x)
        return torch.stack([e, w[0] * x * e, torch.ones_like(x)], 1)

    expected = torch.tensor([1.0, -0.5, 0.2], dtype=F64)
    w, dense = expected.clone().requires_grad_(), (1.0, 0.0, damping)
    opt = GaussNewton([w], damping=damping, rtol=1e-14, progress=None)

    def loss():
        r = fit_residuals(w)
        return F.mse_loss(r, torch.zeros_like(r), reduction="sum") / 2

    for _ in range(3):  # at the minimum the ratio of reductions is one of roundings
        opt.step(closure_of(opt, loss))
        expected, dense, _ = damped_newton(
            expected,
            dense,
            lambda w: fit_residuals(w).pow(2).sum() / 2,
            lambda w: jacobian(w).T @ fit_residuals(w),
            lambda w: jacobian(w).T @ jacobian(w),
            1.0,
            3.0,
        )
        torch.testing.assert_close(w.detach(), expected, rtol=1e-8, atol=1e-10)
    assert opt.stats["damping"] == pytest.approx(dense[0] * damping, rel=1e-6)


@pytest.mark.parametrize("maximize", [False, True])
def test_the_fisher_matrix_is_a_metric(maximize):
    """Amari 1998, with X^T diag(p (1 - p)) X / N of a logistic regression. Climbing uses the same matrix."""
    x, y = logistic_data()
    expected = torch.zeros(3, dtype=F64)
    w = expected.clone().requires_grad_()
    options = {"adapt": False, "rtol": 1e-14, "progress": None, "maximize": maximize}
    opt = GaussNewton([w], lr=0.7, matrix="fisher", damping=0.01, **options)
    for _ in range(4):
        opt.step(
            closure_of(opt, lambda: F.binary_cross_entropy_with_logits(x @ w, y) * (-1 if maximize else 1))
        )
        p = torch.sigmoid(x @ expected)
        fisher = x.T @ ((p * (1 - p))[:, None] * x) / len(y)
        g = x.T @ (p - y) / len(y)
        expected = expected - 0.7 * torch.linalg.solve(fisher + 0.01 * I3, g)
        torch.testing.assert_close(w.detach(), expected, rtol=1e-8, atol=1e-10)


def test_a_direction_of_negative_curvature_descends_by_its_absolute_value():
    """Dauphin et al. 2014."""
    w = torch.tensor([0.0, 0.1], dtype=F64, requires_grad=True)
    opt = NewtonCG([w], adapt=False)
    opt.step(closure_of(opt, lambda: w[0] ** 2 - w[1] ** 2))
    torch.testing.assert_close(w.detach(), torch.tensor([0.0, 0.2], dtype=F64))


# Matrices


def classified(dtype=F64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    x, y = torch.randn(5, 3, dtype=F64), torch.tensor([0, 1, 1, 0, 1])
    return model, x.to(dtype), y


def seen(matrix, batches=1, **options):
    """Return a matrix of a loss as the sum over batches, as an optimizer takes it, and the parameters."""
    model, x, y = classified(**options)
    params = dict(model.named_parameters())
    make = NewtonCG if matrix == "hessian" else GaussNewton
    opt = make(list(params.values()), adapt=False)
    with opt.recording():
        for part, labels in zip(x.chunk(batches), y.chunk(batches), strict=True):
            F.cross_entropy(model(part), labels, reduction="sum").backward()
    return Curvature(params, opt._passes, matrix), params, opt


def dense(matrix):
    model, x, y = classified()
    space = ParameterSpace(dict(model.named_parameters()))
    point = space.flatten(dict(model.named_parameters())).detach()

    def output(vector):
        return torch.func.functional_call(model, space.unflatten(vector), (x,)).flatten()

    def loss(z):
        return F.cross_entropy(z.view(5, 2), y, reduction="sum")

    if matrix == "hessian":
        return torch.func.hessian(lambda v: loss(output(v)))(point)
    J, z = torch.func.jacrev(output)(point), output(point)
    return J.T @ torch.func.hessian(loss)(z) @ J  # also the Fisher matrix of a softmax


@pytest.mark.parametrize("batches", [1, 5])
@pytest.mark.parametrize("matrix", ["hessian", "ggn", "fisher"])
def test_products_are_those_of_the_dense_matrix(matrix, batches):
    curvature, params, _ = seen(matrix, batches)
    v = torch.randn(
        sum(p.numel() for p in params.values()), generator=torch.Generator().manual_seed(1), dtype=F64
    )
    torch.testing.assert_close(curvature @ v, dense(matrix) @ v, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-3, 3e3])
def test_float16_multiplies_vectors_of_size_one(scale):
    """Small vectors would vanish there, and products of large ones overflow."""
    w = torch.tensor([1.0, 2.0], dtype=torch.float16, requires_grad=True)
    (g,) = torch.autograd.grad((100 * w**2).sum(), w, create_graph=True)
    curvature = Curvature({"w": w}, [BackwardPass(w.sum().detach(), {w: g}, ())], "hessian")
    v = scale * torch.tensor([1.0, -3.0])
    torch.testing.assert_close(curvature @ v, 200 * v, rtol=2e-3, atol=0)


# Conjugate gradients


def solved(multiply, b, x0=None, rtol=1e-10, max_steps=250):
    return conjugate_gradients(multiply, b, x0, rtol, None, max_steps)


def test_conjugate_gradients_solve():
    M, b = matrix_of("flat", 8), torch.linspace(-1, 2, 8, dtype=F64)
    found = solved(lambda v: M @ v, b, rtol=1e-12)
    expected = torch.linalg.solve(M, b)
    torch.testing.assert_close(found.x[0], expected, rtol=1e-9, atol=1e-11)
    assert RESULTS[int(found.status)] is Result.CONVERGED
    assert found.matvecs == int(found.steps)
    at_once = solved(lambda v: M @ v, b, x0=expected)
    assert (int(at_once.steps), at_once.matvecs) == (0, 1)
    worse = solved(lambda v: M @ v, b, x0=-5 * expected, max_steps=1)
    torch.testing.assert_close(worse.x, solved(lambda v: M @ v, b, max_steps=1).x)


def test_flat_and_negative_directions_descend():
    values = torch.tensor([-2.0, -8.0], dtype=F64)
    b = torch.tensor([4.0, 16.0], dtype=F64)
    found = solved(lambda v: v * values, b)
    assert RESULTS[int(found.status)] is Result.NEGATIVE_CURVATURE
    x = found.x[0]
    assert (x > 0).all()
    assert x @ (values * x) / 2 - b @ x < 0
    flat = solved(torch.zeros_like, torch.ones(2, dtype=F64))
    torch.testing.assert_close(flat.x, torch.ones(1, 2, dtype=F64))


def test_what_is_not_finite_ends_a_solve():
    b = torch.ones(2, dtype=F64)
    assert RESULTS[int(solved(lambda v: v * math.nan, b).status)] is Result.NON_FINITE
