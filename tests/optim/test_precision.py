"""Rules in float32 at their defaults against float64, and parameters of other layouts and mixed dtypes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import metagrad as mg
from metagrad.optim import KFAC, SOAP, AdaHessian, Lion, Muon, Shampoo, SparseAdam, rules
from metagrad.optim.kronecker.matrix_roots import inverse_root
from tests.optim.cases import draw
from tests.optim.torch_optim.cases import (
    assert_equal,
    assert_near,
    batch,
    classification,
    every_one,
    network,
    of_cases,
    optimizer,
    run,
    snapshot,
)

F32, F64 = torch.float32, torch.float64
EPS = torch.finfo(F32).eps


def matrix(rows, columns, *singular_values):
    """Draw a matrix with given singular values."""
    n, seeds = len(singular_values), ((rows, 1), (columns, 2))
    u, v = (torch.linalg.qr(draw({"w": (size, n)}, seed=seed)["w"])[0] for size, seed in seeds)
    return u @ torch.diag(torch.tensor(singular_values, dtype=F64)) @ v.T


MATRICES = {
    "square": matrix(5, 5, 3.0, 2.0, 1.0, 0.5, 0.3),
    "tall": matrix(8, 3, 3.0, 2.0, 1.0),
    "wide": matrix(3, 8, 3.0, 2.0, 1.0),
    "badly scaled": matrix(6, 6, 0.1, 0.03, 0.01, 0.003, 0.002, 0.001),
    "rank-deficient": matrix(6, 6, 0.03, 0.01),
}
dtypes = pytest.mark.parametrize("dtype", [F32, F64])
matrices = pytest.mark.parametrize("g", MATRICES.values(), ids=MATRICES)


def step_and_derivative(rule, g, dtype):
    """Return a step and the derivative of its cubes, which is not linear in the step, in float64."""
    g = g.to(dtype).requires_grad_()
    params = {"w": torch.zeros_like(g)}
    step = rule.update({"w": g}, rule.init(params), params)[0]["w"]
    (derivative,) = torch.autograd.grad(step.pow(3).sum(), g)
    return step.detach().double(), derivative.double()


@pytest.mark.parametrize(
    ("rule", "slope"),
    [
        (rules.sgd(1.0), lambda g: torch.ones_like(g)),
        (rules.adam(1.0), lambda g: 1 / (g.abs() + 1e-8)),
        (rules.adamw(1.0), lambda g: 1 / (g.abs() + 1e-8)),
        (rules.adagrad(1.0), lambda g: 1 / (g.abs() + 1e-10)),
        (rules.rmsprop(1.0), lambda g: 1 / (0.1 * g.abs() + 1e-8)),
        (rules.lion(1.0), lambda g: torch.zeros_like(g)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_elementwise_rules(rule, slope):
    """A quotient of g and its size has two terms in its derivative, each as large as the slope, rounded 20 times."""
    g = draw({"w": (6, 8)})["w"] * 10.0 ** torch.linspace(-12, 6, 8, dtype=F64)
    (step, derivative), expected = (step_and_derivative(rule, g, dtype) for dtype in (F32, F64))
    assert ((step - expected[0]).abs() <= 20 * EPS * expected[0].abs()).all()
    assert ((derivative - expected[1]).abs() <= 20 * EPS * 3 * expected[0].square() * slope(g)).all()


@matrices
def test_muon(g):
    """Each of 5 iterations stretches errors by 3.4445 at most."""
    got, expected = (step_and_derivative(rules.muon(1.0), g, dtype) for dtype in (F32, F64))
    bound = max(g.shape) * EPS * 3.4445**5
    assert (got[0] - expected[0]).norm() <= bound * expected[0].norm()
    assert (got[1] - expected[1]).norm() <= bound * 3.4445**5 * expected[0].norm() ** 3 / g.norm()


@matrices
@dtypes
def test_shampoo_is_the_polar_factor(g, dtype):
    r"""The first step is U diag(s / sqrt(s^2 + eps)) V^T.

    Rounding changes an eigenvalue of the smaller Gram matrix by n times the precision times the largest one. The
    larger matrix has a null space, whose fourth roots enter in two terms that cancel.
    """
    eps, rounding = 1e-6, torch.finfo(dtype).eps
    got = step_and_derivative(rules.shampoo(1.0, momentum=0.0), g, dtype)
    g = (g if g.shape[0] >= g.shape[1] else g.T).clone().requires_grad_()
    gram = g.T @ g
    step = -g @ inverse_root(gram + eps * torch.eye(len(gram), dtype=F64), 2)
    (derivative,) = torch.autograd.grad(step.pow(3).sum(), g)
    values = torch.linalg.eigvalsh(gram.detach())
    condition = max(float((values[-1] + eps) / (values[0] + eps)), float(values[-1] / eps + 1) ** 0.25)
    bound = 10 * max(g.shape) * rounding * condition
    for a, b in zip(got, (step.detach(), derivative), strict=True):
        a = a if a.shape == b.shape else a.T
        assert (a - b).norm() <= bound * b.norm()


@matrices
@dtypes
def test_soap_steps_within_the_space_of_the_gradient(g, dtype):
    """The first step is U V^T. A component of zero has an error of a few units, and the divisor is at least ten."""
    u, s, vt = torch.linalg.svd(g, full_matrices=True)
    rule, params = rules.soap(1.0, weight_decay=0.0), {"w": torch.zeros_like(g, dtype=dtype)}
    step = rule.update({"w": g.detach().to(dtype)}, rule.init(params), params)[0]["w"].double()
    inner = -u.detach().T @ step @ vt.detach().T
    rank = int((s > 1e-9 * s[0]).sum())
    sizes = inner.diagonal()[:rank].clone()
    inner.diagonal()[:rank] = 0
    assert inner.abs().max() <= 0.5
    # A singular value is above the error 10 (eps + shift / rank) s[0]^2 / s.
    error = 10 * (torch.finfo(dtype).eps + 1e-6) * (s[0] / s[:rank]) ** 2
    assert (sizes >= 1 / (1 + error**2).sqrt() - 0.1).all()
    assert (sizes <= 1.1).all()


@matrices
def test_the_derivative_of_soap_is_as_exact_as_its_shift(g):
    for shift in (1e-4, 1e-3):
        rule = rules.soap(1.0, weight_decay=0.0, shift=shift)
        got, expected = (step_and_derivative(rule, g, dtype)[1] for dtype in (F32, F64))
        assert (got - expected).norm() <= 10 * max(g.shape) * EPS / shift * expected.norm()
    with pytest.raises(ValueError, match=r"soap.*float32, where shift=1e-06 .* Use shift=1e-3"):
        step_and_derivative(rules.soap(1.0), g, F32)


@pytest.mark.parametrize("scales", [(1, 1, 1, 1), (1, 0.3, 0.1, 0.03)])
@of_cases(lambda case: "backward" in case.traits and "calls again" not in case.traits)
def test_curvature_optimizers_at_their_defaults(case, scales):
    """Weights are rounded before and after a step, and the n sums of a system are rounded times its condition.

    Conjugate gradients add the errors of up to n steps. The system is singular for the mean over classes, which the
    loss does not depend on.
    """
    steps = []
    for dtype in (F32, F64):
        model = torch.nn.Linear(4, 3, bias=False, dtype=dtype)
        start = draw({"w": (3, 4)})["w"].detach().to(dtype)
        model.weight.data = start.clone()
        x, y = batch(dtype)
        x = x * torch.tensor(scales)
        opt = case.of(model, **{"seed": 0} if "seed" in case.traits else {})
        run(opt, lambda x=x, y=y, model=model: cross_entropy(model(x), y), 1)
        steps.append((model.weight - start).detach().double())
    with mg.ggn(model, cross_entropy, {"weight": start}, (x, y)) as G:
        values = torch.linalg.eigvalsh(G.to_dense())
    (got, expected), condition = (
        (step - step.mean(0) for step in steps),
        values[-1] / values[values > 1e-9][0],
    )
    sums = len(values) ** (2 if "one vector" in case.traits else 1)
    assert (got - expected).norm() <= EPS * (2 * start.norm() + sums * condition * expected.norm())


# Layouts and dtypes ---------------------------------------------------------------------------------------------


@every_one
def test_transposed_parameters_take_the_steps_of_contiguous_ones(case):
    results = []
    for lay_out in (lambda p: p, lambda p: p.T.contiguous().T):
        model = network(F64)
        for p in model.parameters():
            p.data = lay_out(p.data)
        run(optimizer(case, model), classification(model, F64), 3)
        results.append(snapshot(model))
    assert_near(*results)


@pytest.mark.parametrize(
    "make", [KFAC, lambda m, **o: AdaHessian(m.parameters(), **o)], ids=["KFAC", "AdaHessian"]
)
def test_channels_last_kernels_take_the_steps_of_contiguous_ones(make):
    x = draw({"x": (4, 2, 5, 5)})["x"]
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(2, 3, 3, dtype=F64)
        model.weight.data = model.weight.data.contiguous(memory_format=memory_format)
        opt = make(model, lr=0.1, seed=0)
        for _ in range(3):
            opt.zero_grad()
            with opt.recording():
                model(x.contiguous(memory_format=memory_format)).tanh().square().sum().backward()
            opt.step()
        results.append(snapshot(model))
    assert_near(*results)


@pytest.mark.parametrize("make", [Lion, Muon, Shampoo, SOAP, SparseAdam], ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtypes", [(F32, F64), (torch.bfloat16, F32)], ids=str)
def test_two_dtypes_in_one_optimizer_take_the_steps_of_two_optimizers(make, dtypes):
    results = []
    for sizes in ((2,), (1, 1)):
        shapes = zip(((4, 3), (3, 4)), dtypes, strict=True)
        params = [torch.ones(shape, dtype=dtype).requires_grad_() for shape, dtype in shapes]
        groups = iter(params)
        opts = [make([next(groups) for _ in range(size)], lr=0.1) for size in sizes]
        for seed in range(4):
            for p in params:
                p.grad = draw({"w": p.shape}, p.dtype, seed)["w"]
            for opt in opts:
                opt.step()
        results.append(params)
    assert_equal(*results)


@of_cases(lambda case: case.traits >= {"backward", "told"} and not case.traits & {"one vector", "model"})
def test_half_precision_beside_float32_takes_the_step_of_float32_rounded(case):
    """The loss reads the same numbers. Rounded are the new weight, and its gradient, probes and products."""
    results = []
    for dtype in (F32, torch.bfloat16):
        model = network(torch.bfloat16).float()
        model.second.to(dtype)
        start, (x, y) = snapshot(model), batch()

        def loss(model=model, x=x, y=y):
            return cross_entropy(model.first(x).tanh() @ model.second.weight.float().T, y)

        run(optimizer(case, model), loss, 1)
        results.append(snapshot(model))
    for weight, expected, got in zip(start, *results, strict=True):
        bound = 2**-8 * (expected.abs() + 4 * (expected - weight.float()).abs())
        assert got.dtype == weight.dtype
        assert ((got.float() - expected).abs() <= bound).all()
