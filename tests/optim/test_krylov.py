"""Conjugate gradients row by row, cubic models, and the line search, against what is known in closed form."""

from __future__ import annotations

import pytest
import torch

import metagrad as mg
from metagrad.optim.rules.krylov import RESULTS, conjugate_gradients
from metagrad.optim.rules.lanczos_rows import minimize_cubic
from metagrad.optim.rules.strong_wolfe import strong_wolfe

F64 = torch.float64


def matrices(k, n, seed=0, least=0.5):
    """Symmetric matrices with the least eigenvalue given."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(k, n, n, generator=generator, dtype=F64)
    M = root @ root.mT / n
    return M - torch.linalg.eigvalsh(M)[:, :1, None] * torch.eye(n) + least * torch.eye(n)


def multiplied(M):
    return lambda rows: (M @ rows[:, :, None]).squeeze(-1)


def names(found):
    return [RESULTS[index].name for index in found.ending.tolist()]


def test_every_row_has_its_own_matrix_and_its_own_number_of_steps():
    M = matrices(3, 8)
    M[1] = 2 * torch.eye(8)  # one step
    b = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=F64)
    b[2] = 0  # none
    found = conjugate_gradients(multiplied(M), b, rtol=1e-12)
    expected = torch.linalg.solve(M, b)
    torch.testing.assert_close(found.x, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.model, -(b * expected).sum(1) / 2, rtol=1e-9, atol=1e-12)
    assert found.steps.tolist()[1:] == [1, 0]
    assert names(found) == ["CONVERGED"] * 3
    assert found.products == int(found.steps.max())


def test_a_start_that_is_worse_than_zero_is_not_taken():
    M, b = matrices(2, 4), torch.ones(2, 4, dtype=F64)
    solution = torch.linalg.solve(M, b)
    x0 = torch.stack([solution[0], -5 * solution[1]])
    found = conjugate_gradients(multiplied(M), b, x0=x0, max_steps=1)
    assert found.steps.tolist()[0] == 0
    torch.testing.assert_close(found.x[0], solution[0])
    first = conjugate_gradients(multiplied(M), b, max_steps=1)
    torch.testing.assert_close(found.x[1], first.x[1])
    assert found.products == 2


def test_martens_rule_stops_a_slow_solve():
    """Eigenvalues 1, 1/4, 1/9, ...: the model falls ever more slowly."""
    values = 1 / torch.arange(1, 201, dtype=F64) ** 2
    b = torch.ones(1, 200, dtype=F64) * values
    found = conjugate_gradients(lambda rows: rows * values, b, progress=5e-3)
    assert names(found) == ["PROGRESS"]
    assert 10 < int(found.steps) < 100
    whole = conjugate_gradients(lambda rows: rows * values, b, max_steps=1000)
    assert float(found.model / whole.model) > 0.8


def test_negative_curvature_is_followed_by_its_absolute_value():
    values = torch.tensor([-2.0], dtype=F64)
    found = conjugate_gradients(lambda rows: rows * values, torch.tensor([[4.0]], dtype=F64))
    assert names(found) == ["NEGATIVE_CURVATURE"]
    assert found.x.tolist() == [[2.0]]
    assert found.model.tolist() == [-12.0]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_directions_without_curvature_are_left_by_a_step_of_gradient_descent(dtype):
    """Rounding gives them a tiny one, by which steps would be longer and longer until there is NaN."""
    values = torch.tensor([2.0, 50.0, 0.0, 0.0], dtype=dtype)
    b = torch.tensor([[-4.0, 100.0, 1.0, 1.0]], dtype=dtype)
    found = conjugate_gradients(lambda rows: rows * values, b)
    assert names(found) == ["NEGATIVE_CURVATURE"]
    torch.testing.assert_close(found.x[0, :2], b[0, :2] / values[:2], rtol=0.2, atol=0)
    assert (found.x[0, 2:] > 0).all()
    assert (found.x[0, 2:] < 10).all()


def test_a_radius_for_each_row():
    M, b = matrices(3, 5, least=-1.0), torch.ones(3, 5, dtype=F64)
    M[0] = torch.eye(5)
    radius = torch.tensor([100.0, 0.01, 2.0], dtype=F64)
    found = conjugate_gradients(multiplied(M), b, radius=radius)
    assert names(found)[:2] == ["CONVERGED", "BOUNDARY"]
    torch.testing.assert_close(found.x[0], b[0])
    torch.testing.assert_close(found.x[1], 0.01 * b[1] / b[1].norm())
    assert float(found.x[2].norm()) <= 2 * (1 + 1e-12)
    value = found.x[2] @ M[2] @ found.x[2] / 2 - b[2] @ found.x[2]
    torch.testing.assert_close(found.model[2], value)


def test_products_that_are_not_finite_end_a_row():
    def products(rows):
        return torch.tensor([[1.0], [torch.nan]]) * rows

    found = conjugate_gradients(products, torch.ones(2, 3))
    assert names(found) == ["CONVERGED", "NON_FINITE"]
    assert found.x.tolist() == [[1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("radius", [None, 0.5])
def test_derivatives_of_early_stopped_rows_are_those_of_the_steps(radius):
    M = matrices(2, 4).requires_grad_()
    b = torch.randn(2, 4, generator=torch.Generator().manual_seed(2), dtype=F64).requires_grad_()

    def fn(M, b):
        at = None if radius is None else torch.full((2,), radius, dtype=F64)
        found = conjugate_gradients(multiplied(M), b, radius=at, max_steps=2)
        return found.x, found.model

    assert mg.gradcheck(fn, (M, b), order=3)


def stationarity(M, g, cubic, x):
    """The gradient of the cubic model, and the least eigenvalue of H + M |x| / 2."""
    size = x.norm(dim=1)
    gradient = g + (M @ x[:, :, None]).squeeze(-1) + (cubic * size / 2)[:, None] * x
    return gradient, torch.linalg.eigvalsh(M)[:, 0] + cubic * size / 2


@pytest.mark.parametrize("least", [0.5, 0.0, -2.0])
def test_the_minimum_of_a_cubic_model_is_the_global_one(least):
    """Nesterov, Polyak 2006, section 5: stationary, with H + M |x| / 2 positive semi-definite."""
    M = matrices(3, 6, least=least)
    g = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=F64)
    cubic = torch.tensor([0.1, 1.0, 30.0], dtype=F64)
    found = minimize_cubic(multiplied(M), g, cubic, rtol=1e-13, max_steps=6)
    gradient, smallest = stationarity(M, g, cubic, found.x)
    assert float(gradient.abs().max()) < 1e-9
    assert float(smallest.min()) > -1e-9
    quadratic = (g * found.x).sum(1) + (found.x * multiplied(M)(found.x)).sum(1) / 2
    torch.testing.assert_close(found.model, quadratic + cubic * found.x.norm(dim=1) ** 3 / 6)


def test_a_cubic_model_without_a_gradient_has_no_step():
    M, g = matrices(2, 3), torch.zeros(2, 3, dtype=F64)
    g[0] = 1
    found = minimize_cubic(multiplied(M), g, torch.ones(2, dtype=F64), rtol=1e-10, max_steps=5)
    assert found.x[1].tolist() == [0.0] * 3
    assert found.steps.tolist()[1] == 0


@pytest.mark.parametrize("steps", [2, 4])
def test_derivatives_of_the_minimum_of_a_cubic_model(steps):
    M = matrices(2, 4, least=-0.5).requires_grad_()
    g = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), dtype=F64).requires_grad_()
    cubic = torch.tensor([0.7, 3.0], dtype=F64, requires_grad=True)

    def fn(M, g, cubic):
        found = minimize_cubic(multiplied((M + M.mT) / 2), g, cubic, rtol=1e-10, max_steps=steps)
        return found.x, found.model

    assert mg.gradcheck(fn, (M, g, cubic), order=2)


def test_strong_wolfe_in_every_row():
    """Minima at 0.01, 1, 300, and of a function that is flat at 0 and steep behind."""
    places = torch.tensor([0.01, 1.0, 300.0, 2.0], dtype=F64)

    def along(a):
        return (a - places) ** 2 + 0.1 * (a / places) ** 4, 2 * (a - places) + 0.4 * a**3 / places**4

    value, slope = along(torch.zeros(4, dtype=F64))
    lengths, count = strong_wolfe(along, value, slope, slack=torch.zeros(4, dtype=F64))
    new, steep = along(lengths)
    assert (new <= value + 1e-4 * lengths * slope).all()
    assert (steep.abs() <= 0.9 * slope.abs()).all()
    assert count <= 25


def test_strong_wolfe_climbs_nowhere():
    def along(a):
        return a.clone(), torch.ones_like(a)

    zeros = torch.zeros(2)
    lengths, count = strong_wolfe(along, zeros, torch.tensor([1.0, -1.0]), slack=zeros, max_evaluations=6)
    assert lengths.tolist() == [0.0, 0.0]
    assert count == 6
