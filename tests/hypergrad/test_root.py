"""Roots and fixed points against closed forms, dense Jacobians and Newton's method."""

import math

import pytest
import torch
from torch import nn

from metagrad import hypergrad
from metagrad.curvature import SolveError
from metagrad.curvature.solvers.methods import RESULTS, gmres
from metagrad.curvature.solvers.solution import Result
from metagrad.hypergrad import (
    Anderson,
    Broyden,
    NewtonKrylov,
    fixed_point,
    implicit_diff,
    implicit_root,
    root,
)

F64 = torch.float64
TIGHT = {"rtol": 1e-14, "atol": 1e-15}


def unsymmetric(seed=0):
    generator = torch.Generator().manual_seed(seed)
    M = 0.4 * torch.randn(3, 3, generator=generator, dtype=F64)
    theta = torch.tensor([0.3, 0.7, -0.2], dtype=F64, requires_grad=True)

    def f(x):
        return torch.tanh(M @ x + theta) * theta.sum() - x + 0.1 * x**2 * theta

    return f, theta


def on_the_tape(f, x, steps=4):
    """Newton's method from a root: each step has one more correct derivative."""
    for _ in range(steps + 1):
        x = x - torch.linalg.solve(torch.func.jacrev(f)(x), f(x))
    return x


def derivatives(x, theta, order):
    """Repeated derivatives of non-linear contractions."""
    found = []
    for _ in range(order):
        (x,) = torch.autograd.grad((x.sin() + x**2).sum(), theta, create_graph=True)
        found.append(x)
    return found


@pytest.mark.parametrize("solver", ["gmres", "lu"])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_derivatives_of_every_order_are_those_of_newtons_method_on_the_tape(solver, order):
    f, theta = unsymmetric()
    found = root(f, torch.zeros(3, dtype=F64), order=order, solver=solver, **TIGHT)
    assert found.result is Result.CONVERGED
    expected = derivatives(on_the_tape(f, found.value.detach()), theta, order)
    for own, other in zip(derivatives(found.value, theta, order), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match=rf"order={order}\): .* Pass order={order + 1}"):
        derivatives(found.value, theta, order + 1)


def test_keplers_equation_in_rows_that_stop_one_by_one():
    """E - e sin E = M, whose derivative is 1 / (1 - e cos E) by M, and sin E times that by e."""
    e = torch.tensor([[0.0], [0.3], [0.9]], dtype=F64, requires_grad=True)
    M = torch.tensor([[1.0], [2.0], [0.5]], dtype=F64, requires_grad=True)
    found = root(lambda E: E - e * E.sin() - M, torch.ones(3, 1, dtype=F64), batch_ndim=1, order=2, **TIGHT)
    E = found.value
    torch.testing.assert_close(E - e * E.sin(), M, rtol=0, atol=1e-14)
    by_M, by_e = torch.autograd.grad(E.sum(), (M, e), create_graph=True)
    slope = 1 / (1 - e * E.detach().cos())
    torch.testing.assert_close(by_M, slope, rtol=1e-12, atol=0)
    torch.testing.assert_close(by_e, slope * E.detach().sin(), rtol=1e-12, atol=1e-15)
    (second,) = torch.autograd.grad(by_M.sum(), M)
    torch.testing.assert_close(second, -e * E.detach().sin() * slope**3, rtol=1e-10, atol=1e-12)
    assert found.stats.steps[0] < found.stats.steps[2]
    alone = root(lambda E: E - e[2] * E.sin() - M[2], torch.ones(1, dtype=F64), **TIGHT)
    assert torch.equal(alone.value.detach(), E[2].detach())
    assert alone.stats.steps == found.stats.steps[2]


@pytest.mark.parametrize("method", [Anderson(), Broyden(), Broyden(memory=3), NewtonKrylov()])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_every_method_finds_the_fixed_point_of_a_layer(method, dtype):
    """In single precision at the defaults, value and derivative are off by rtol times the condition, about 10."""
    torch.manual_seed(0)
    W, b = 0.1 * torch.randn(30, 30, dtype=F64), torch.randn(30, dtype=F64)
    W, b = W.to(dtype), b.to(dtype).requires_grad_()
    z = fixed_point(
        lambda z: {"z": torch.tanh(W @ z["z"] + b)}, {"z": torch.zeros(30, dtype=dtype)}, method=method
    )
    assert z.result is Result.CONVERGED
    value = z.value["z"]
    (found,) = torch.autograd.grad(value.square().sum(), b)
    exact = value.detach().double()
    for _ in range(200):
        exact = torch.tanh(W.double() @ exact + b.detach().double())
    slope = torch.diag(1 - exact**2)
    expected = slope @ torch.linalg.solve((torch.eye(30) - slope @ W.double()).T, 2 * exact)
    torch.testing.assert_close(value.detach().double(), exact, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4 * float(expected.norm()))


def test_projections_constrain_a_fixed_point():
    """The minimum of |z - c|^2 on the simplex: c minus a number, where that is positive."""
    c = torch.tensor([0.6, 0.9, -0.4], dtype=F64, requires_grad=True)

    def simplex(v):
        ordered = v.sort(descending=True).values
        means = (ordered.cumsum(0) - 1) / torch.arange(1, len(v) + 1, dtype=v.dtype)
        count = int((ordered > means).sum())
        return (v - means[count - 1]).clamp(min=0)

    z = fixed_point(lambda z: simplex(z - 0.5 * (z - c)), torch.ones(3, dtype=F64) / 3, **TIGHT).value
    torch.testing.assert_close(z.detach(), torch.tensor([0.35, 0.65, 0.0], dtype=F64))
    (found,) = torch.autograd.grad(z[0], c)
    torch.testing.assert_close(found, torch.tensor([0.5, -0.5, 0.0], dtype=F64), rtol=1e-10, atol=1e-12)


def test_roots_found_elsewhere_and_modules_with_state():
    theta = torch.tensor([2.0], dtype=F64, requires_grad=True)
    x = implicit_root(lambda x: x**3 - theta, theta.detach() ** (1 / 3), order=2, rtol=1e-14)
    first, second = derivatives(x, theta, 2)
    y = theta ** (1 / 3)
    for own, other in zip((first, second), derivatives(y, theta, 2), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh()).double()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    x = torch.randn(8, 4, dtype=F64)
    z = fixed_point(lambda z: 0.1 * net(z + x), torch.zeros_like(x))
    assert z.result is Result.CONVERGED  # one mask of dropout for all evaluations
    z.value.sum().backward()
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_minima_have_derivatives_of_higher_order():
    """The minimum of (w - theta^2)^2 / 2 + w^4 / 4 satisfies w + w^3 = theta^2."""
    theta = torch.tensor([0.8, 1.3], dtype=F64, requires_grad=True)

    def inner(params):
        w = params["w"]
        return ((w - theta**2) ** 2 / 2 + w**4 / 4).sum()

    w = torch.zeros(2, dtype=F64)
    for _ in range(50):
        w = w - (w + w**3 - theta.detach() ** 2) / (1 + 3 * w**2)
    for method in (hypergrad.CG(), hypergrad.Exact()):
        found = implicit_diff(inner, {"w": w}, method=method, order=3)["w"]
        expected = on_the_tape(lambda x: x + x**3 - theta**2, w)
        for own, other in zip(derivatives(found, theta, 3), derivatives(expected, theta, 3), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match="Take CG or Exact, without damping"):
        implicit_diff(inner, {"w": w}, method=hypergrad.CG(damping=0.1), order=2)


def test_what_is_no_root_has_no_derivative():
    theta = torch.tensor([1.0], dtype=F64, requires_grad=True)
    found = root(lambda x: x**2 + theta, torch.ones(1, dtype=F64), max_steps=20)
    assert not found.result.is_success
    with pytest.raises(RuntimeError, match=r"root\(f, x0\): row 0 of 1.* no root"):
        found.value.sum().backward()
    with pytest.raises(SolveError, match=r"root\(f, x0\): row 0 of 1"):
        root(lambda x: x**2 + theta, torch.ones(1, dtype=F64), throw=True)
    with pytest.warns(UserWarning, match="as far from that of the root"):
        near = root(lambda x: x**2 - theta, torch.tensor([1.3], dtype=F64), max_steps=2, rtol=1e-12)
    assert float(torch.autograd.grad(near.value.sum(), theta)[0]) == pytest.approx(0.5, abs=1e-3)
    assert root(lambda x: x * math.nan, torch.ones(1)).result is Result.NON_FINITE
    for solver in ("gmres", "lu"):
        double = implicit_root(lambda x: (x - theta) ** 2, theta.detach(), solver=solver)
        with pytest.raises(SolveError, match=r"implicit_root\(f, x\).*singular"):
            double.sum().backward()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_given_value_that_is_no_root_is_a_warning(scale):
    theta = torch.tensor([2.0, 3.0], dtype=F64, requires_grad=True)
    f, roots = lambda x: scale * (x**2 - theta), theta.detach().sqrt()
    implicit_root(f, roots * 1.001, batch_ndim=1)
    implicit_root(lambda x: f(x + roots), torch.zeros(2, dtype=F64))
    with torch.no_grad():
        implicit_root(f, 2 * roots)
    with pytest.warns(UserWarning, match=r"implicit_root\(f, x\): x is no root.* In row 1 of 2, .f. is"):
        implicit_root(f, roots * torch.tensor([1.001, 1.1], dtype=F64), batch_ndim=1)


def test_wrong_arguments_are_errors():
    with pytest.raises(ValueError, match=r"form and shapes of the start, .*\(2,\).*, got .*\(\)"):
        root(lambda x: x.sum(), torch.ones(2))
    with pytest.raises(ValueError, match="form and shapes of the start"):
        fixed_point(lambda x: x.sum() / 4, torch.ones(2))
    for method in ("anderson", Anderson):
        with pytest.raises(TypeError, match=r"fixed_point\(g, z0\): method: expected a method such as"):
            fixed_point(torch.cos, torch.ones(2), method=method)
    one = torch.ones(2, 1, requires_grad=True)
    for start in (one.long(), one.half(), one.bfloat16(), {"a": one, "b": one.double()}, [], [1.0]):
        with pytest.raises(TypeError, match=r"root\(f, x0\): .*pytree of floating point tensors, all"):
            root(lambda x: x, start)
    with pytest.raises(ValueError, match=r"expected tensors \[k, ...\]"):
        root(lambda x: x, [torch.ones(2), torch.ones(3)], batch_ndim=1)
    with pytest.raises(ValueError, match="rows that depend on each other, as by batch statistics"):
        implicit_root(lambda x: x - one * x.mean(0), one.detach(), batch_ndim=1, solver="lu").sum().backward()
    with pytest.raises(ValueError, match="max_steps"):
        root(lambda x: x, torch.ones(2), max_steps=0)
    with pytest.raises(ValueError, match=r"inside a torch\.func transform"):
        torch.func.grad(lambda t: root(lambda x: x - t, torch.zeros(())).value)(torch.tensor(1.0))


@pytest.mark.parametrize("restart", [3, 50])
def test_gmres_solves_rows_with_matrices_of_their_own(restart):
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(4, 8, 8, generator=generator, dtype=F64) + 8 * torch.eye(8, dtype=F64)
    A[3] = torch.eye(8, dtype=F64)
    b = torch.randn(4, 8, generator=generator, dtype=F64)
    tolerance = torch.full((4,), 1e-11, dtype=F64)
    run = gmres(
        lambda v: (A @ v[:, :, None])[:, :, 0], b, tolerance=tolerance, max_steps=200, restart=restart
    )
    assert [RESULTS[i] for i in run.status] == [Result.CONVERGED] * 4
    torch.testing.assert_close(run.x, torch.linalg.solve(A, b), rtol=1e-9, atol=1e-10)
    assert run.steps[3] == 1
    singular = gmres(
        lambda v: v * torch.tensor([1.0, 0.0]), torch.ones(1, 2), tolerance=torch.tensor([1e-6]), max_steps=9
    )
    assert RESULTS[int(singular.status)] is not Result.CONVERGED


def test_every_order_of_a_sum_is_that_of_the_closed_form():
    """No cotangent depends on the root."""
    theta = torch.tensor([4.0], dtype=F64, requires_grad=True)
    own, exact = root(lambda x: x * x - theta, torch.ones(1, dtype=F64), order=5, **TIGHT).value, theta.sqrt()
    for _ in range(5):
        own, exact = (torch.autograd.grad(y.sum(), theta, create_graph=True)[0] for y in (own, exact))
        torch.testing.assert_close(own, exact, rtol=1e-10, atol=0)
