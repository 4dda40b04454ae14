"""Dense Gauss-Newton steps against closed forms and certified minima, and their errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp

from metagrad.optim import GaussNewton, least_squares
from metagrad.optim.newton.gauss_newton import DenseSystem, Residuals
from tests.optim.torch_optim.cases import run

F64 = torch.float64


def linear(n: int, count: int, rank: int | None = None):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, n, generator=generator, dtype=F64)
    if rank is not None:
        x[:, rank:] = x[:, :1]
    return x, torch.randn(count, generator=generator, dtype=F64)


def miss(params, x, y):
    return params["w"] @ x - y


@pytest.mark.parametrize(
    ("n", "count", "rank"), [(3, 8, None), (5, 5, None), (9, 4, None), (9, 4, 2), (6, 8, 3)]
)
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_step_on_linear_residuals_solves_the_damped_normal_equations(n, count, rank, is_whole):
    x, y = linear(n, count, rank)
    w = torch.zeros(n, dtype=F64, requires_grad=True)
    opt = GaussNewton([("w", w)], damping=1e-2)
    whole = (lambda p: x @ p["w"] - y,)
    run(opt, lambda: opt.residuals(*(whole if is_whole else (miss, x, y)), reduction="sum") / 2, 1)
    expected = torch.linalg.solve(x.T @ x + 1e-2 * torch.eye(n, dtype=F64), x.T @ y)
    torch.testing.assert_close(w.detach(), expected, rtol=1e-9, atol=1e-11)
    assert opt.stats["products"] == 0


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("is_written", [False, True])
def test_penalties_belong_to_the_objective(decay, is_written):
    """With fewer residuals than parameters, a system in the space of residuals would lose penalties."""
    x, y = linear(7, 4)
    w = torch.ones(7, dtype=F64, requires_grad=True)
    opt = GaussNewton([("w", w)], damping=1e-8, weight_decay=0.0 if is_written else decay, solver="dense")

    def loss():
        penalty = decay / 2 * w.square().sum() if is_written else 0.0
        return 3 * opt.residuals(miss, x, y, reduction="sum") / 2 + penalty

    run(opt, loss, 20 if is_written else 4)
    gradient = 3 * x.T @ (x @ w.detach() - y) + decay * w.detach()
    assert float(gradient.abs().max()) < 1e-6


def test_groups_differ_in_their_learning_rates():
    x, y = linear(4, 6)
    params = {"w": torch.zeros(2, dtype=F64), "v": torch.ones(2, dtype=F64)}
    w, v = (p.requires_grad_() for p in params.values())
    opt = GaussNewton([{"params": [("w", w)]}, {"params": [("v", v)], "lr": 0.0}], damping=1e-10)
    run(opt, lambda: opt.residuals(lambda p: x[:, :2] @ p["w"] + x[:, 2:] @ p["v"] - y), 3)
    expected = torch.linalg.lstsq(x[:, :2], (y - x[:, 2:].sum(1))[:, None]).solution[:, 0]
    torch.testing.assert_close(w.detach(), expected, rtol=1e-7, atol=1e-9)
    assert bool((v == 1).all())


def test_the_acceleration_is_that_of_the_second_directional_derivative():
    """The difference quotient over a tenth of a short step is off by its third derivative, a few percent."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(*shape, generator=generator, dtype=F64) for shape in ((6, 3), (3,)))
    w.requires_grad_()

    def fn(params, x):
        return torch.tanh(params["w"] @ x) * x[0] - 1

    def all_of(w):
        return torch.tanh(x @ w) * x[:, 0] - 1

    out = all_of(w.detach())
    one, two = torch.tensor([1.0, 2.0], dtype=F64)
    known = Residuals(all_of(w), one, two, fn=lambda p: all_of(p["w"]), examples=None, params={"w": w})
    rows, r = torch.func.jacrev(all_of)(w.detach()) * 2**0.5, out * 2**0.5
    system = DenseSystem([(known, one)], {"w": w}, rows.T @ r, 0.0, one)
    damping = 30.0
    assert system.factorize(damping)
    d = system.direction()
    matrix = rows.T @ rows + damping * torch.eye(3, dtype=F64)
    torch.testing.assert_close(d, -torch.linalg.solve(matrix, rows.T @ r))
    _, curved = jvp(lambda w: jvp(all_of, (w,), (d,))[1], (w.detach(),), (d,))
    expected = -torch.linalg.solve(matrix, rows.T @ curved * 2**0.5) / 2
    assert (system.acceleration(w.detach(), d) - expected).norm() <= 0.05 * expected.norm()


def test_a_constant_in_the_loss_accepts_no_step_that_climbs():
    """The full step from 10 leads to -139, where the arctangent is larger."""
    w = torch.full((1,), 10.0, dtype=F64, requires_grad=True)
    opt = GaussNewton([("w", w)], damping=1e-12)
    run(opt, lambda: opt.residuals(lambda p: p["w"].atan()) + 1.0, 1)
    assert float(w.detach().abs()) < 10


MISRA1A = (
    [10.07, 14.73, 17.94, 23.93, 29.61, 35.18, 40.02, 44.82, 50.76, 55.05, 61.01, 66.40, 75.47, 81.78],
    [77.6, 114.9, 141.1, 190.8, 239.9, 289.0, 332.8, 378.4, 434.8, 477.3, 536.8, 593.1, 689.1, 760.0],
)
MGH09 = (
    [0.1957, 0.1947, 0.1735, 0.16, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246],
    [4.0, 2.0, 1.0, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625],
)


@pytest.mark.parametrize("is_by_points", [False, True])
@pytest.mark.parametrize(
    ("data", "fn", "start", "certified", "squares"),
    [
        (
            MISRA1A,
            lambda b, x: b[0] * (1 - torch.exp(-b[1] * x)),
            [500, 1e-4],
            [238.94212918, 5.5015643181e-4],
            1.2455138894e-1,
        ),
        (
            MGH09,
            lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
            [25, 39, 41.5, 39],
            [0.19280693458, 0.19128232873, 0.12305650693, 0.13606233068],
            3.0750560385e-4,
        ),
    ],
)
def test_minima_are_the_certified_ones(data, fn, start, certified, squares, is_by_points):
    """Problems of the Statistical Reference Datasets of NIST, from their first starts."""
    y, x = (torch.tensor(column, dtype=F64) for column in data)
    start = torch.tensor(start, dtype=F64)

    def miss(b, x, y):
        return fn(b, x) - y

    residuals = {"data": (miss, x, y)} if is_by_points else lambda b: miss(b, x, y)
    found = least_squares(residuals, start, max_steps=400, ftol=0.0, xtol=0.0, gtol=0.0)
    # Certified to 11 digits. The minimum of a sum of squares is known to the root of its rounding.
    torch.testing.assert_close(found.value, torch.tensor(certified, dtype=F64), rtol=1e-7, atol=0)
    assert found.loss == pytest.approx(squares / 2, rel=1e-9)
    assert not found.value.requires_grad


def oscillator(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).to(dtype)

    def u(params, x):
        return functional_call(net, params, (x[None],))[0]

    def equation(params, x):  # u'' = -u
        return grad(grad(u, argnums=1), argnums=1)(params, x) + u(params, x)

    def start(params, x):
        return torch.stack([u(params, x) - 1, grad(u, argnums=1)(params, x)])

    x = torch.linspace(0, 2, 30, dtype=dtype)
    return net, ((equation, x), (start, x[:1]))


def test_a_differential_equation_is_solved():
    net, terms = oscillator(F64)
    opt = GaussNewton(net.named_parameters())
    run(opt, lambda: sum(opt.residuals(*term) for term in terms), 25)
    x = torch.linspace(0, 2, 7, dtype=F64)
    assert float((net(x[:, None])[:, 0] - x.cos()).detach().abs().max()) < 1e-3


def test_a_step_in_single_precision_is_that_in_double():
    """The relative error of a solve is at most the rounding of rows times the condition number, 16 / damping."""
    moved = []
    for dtype in (torch.float32, F64):
        net, terms = oscillator(dtype)
        before = [p.detach().clone() for p in net.parameters()]
        opt = GaussNewton(net.named_parameters(), damping=1.0)
        run(opt, lambda opt=opt, terms=terms: sum(opt.residuals(*term) for term in terms), 1)
        moved.append(
            torch.cat([(p - q).flatten().double() for p, q in zip(net.parameters(), before, strict=True)])
        )
    assert (
        float((moved[0] - moved[1]).detach().norm() / moved[1].detach().norm())
        < 64 * torch.finfo(torch.float32).eps * 16
    )


def test_the_path_by_products_takes_the_same_step():
    """Products are used if another loss of known form is in the closure, or if they are requested."""
    x, y = linear(3, 8)
    found = []
    for solver, is_mixed in (("auto", False), ("cg", False), ("auto", True)):
        w = torch.zeros(3, dtype=F64, requires_grad=True)
        opt = GaussNewton([("w", w)], damping=1e-2, solver=solver, progress=None)

        def loss(opt=opt, w=w, is_mixed=is_mixed):
            if not is_mixed:
                return opt.residuals(miss, x, y)
            rest = F.mse_loss(x[4:] @ w, y[4:])
            return (opt.residuals(miss, x[:4], y[:4]) + rest) / 2

        run(opt, loss, 1)
        assert (opt.stats["products"] == 0) == (solver == "auto" and not is_mixed)
        found.append(w.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found[2], found[0], rtol=1e-8, atol=1e-10)


def test_outside_of_a_step_the_loss_has_a_graph():
    x, y = linear(3, 8)
    w = torch.zeros(3, dtype=F64, requires_grad=True)
    opt = GaussNewton([("w", w)])
    (gradient,) = torch.autograd.grad(opt.residuals(miss, x, y), w)
    torch.testing.assert_close(gradient, -x.T @ y / 4)


def refused(options, loss_fn, names=True):
    w = torch.zeros(3, dtype=F64, requires_grad=True)
    opt = GaussNewton([("w", w)] if names else [w], **options)
    run(opt, lambda: loss_fn(opt, w), 1)


def test_what_has_no_dense_system_is_refused():
    x, y = linear(3, 8)
    dense = {"solver": "dense"}
    with pytest.raises(ValueError, match=r"rows of a loss .* opt.residuals"):
        refused(dense, lambda opt, w: F.mse_loss(x @ w, y))
    with pytest.raises(ValueError, match="negative weight"):
        refused(dense, lambda opt, w: opt.residuals(miss, x, y) - 0.1 * opt.residuals(miss, x[:2], y[:2]))
    with pytest.raises(ValueError, match="maximize need products"):
        refused({**dense, "maximize": True}, lambda opt, w: opt.residuals(miss, x, y))
    with pytest.raises(ValueError, match=r"model.named_parameters\(\)"):
        refused({}, lambda opt, w: opt.residuals(miss, x, y), names=False)
    with pytest.raises(TypeError, match=r"dict of tuples \(fn, \*data\)"):
        least_squares({"data": miss}, torch.zeros(3))
