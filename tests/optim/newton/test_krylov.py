"""Conjugate gradients row by row, cubic models, and the line search, against what is known in closed form."""

from __future__ import annotations

import pytest
import torch

import metagrad as mg
from metagrad.curvature.solvers.iteration import RESULTS
from metagrad.optim.newton.krylov import conjugate_gradients
from metagrad.optim.newton.lbfgs import strong_wolfe, two_loop

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
    M[0], M[1] = torch.eye(5), 2 * torch.eye(5)
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
    assert count <= 12


def test_strong_wolfe_climbs_nowhere():
    def along(a):
        return a.clone(), torch.ones_like(a)

    zeros = torch.zeros(2)
    lengths, count = strong_wolfe(along, zeros, torch.tensor([1.0, -1.0]), slack=zeros, max_eval=6)
    assert lengths.tolist() == [0.0, 0.0]
    assert count == 6


def test_a_preconditioner_gives_the_steps_of_the_scaled_system():
    """y = M^1/2 x solves M^-1/2 A M^-1/2 y = M^-1/2 b, with the same iterates; the residual is that of x."""
    M = matrices(2, 6)
    b = torch.randn(2, 6, generator=torch.Generator().manual_seed(1), dtype=F64)
    metric = torch.rand(2, 6, generator=torch.Generator().manual_seed(2), dtype=F64) + 0.1
    root = metric.sqrt()
    scaled = M / root[:, :, None] / root[:, None, :]
    for max_steps in range(1, 5):
        found = conjugate_gradients(multiplied(M), b, metric=metric, max_steps=max_steps)
        plain = conjugate_gradients(multiplied(scaled), b / root, max_steps=max_steps)
        torch.testing.assert_close(found.x, plain.x / root, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.model, plain.model)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_scale_of_a_preconditioner_is_no_matter(scale):
    """Neither for the residual at which a row ends, nor for what curvature is told from rounding."""
    M = matrices(1, 20, least=1e-3)
    b = torch.randn(1, 20, generator=torch.Generator().manual_seed(1), dtype=F64)
    metric = scale * (torch.rand(1, 20, generator=torch.Generator().manual_seed(2), dtype=F64) + 0.1)
    found = conjugate_gradients(multiplied(M), b, metric=metric, rtol=1e-2)
    assert names(found) == ["CONVERGED"]
    for steps, is_enough in ((int(found.steps) - 1, False), (int(found.steps), True)):
        x = conjugate_gradients(multiplied(M), b, metric=metric, max_steps=steps).x
        residual = float((b - multiplied(M)(x)).norm() / b.norm())
        assert (residual <= 1e-2) == is_enough


def test_a_metric_of_ones_changes_no_bit():
    M = matrices(2, 6, least=-0.3)
    b = torch.randn(2, 6, generator=torch.Generator().manual_seed(1), dtype=F64)
    plain, same = (conjugate_gradients(multiplied(M), b, metric=m) for m in (None, torch.ones_like(b)))
    assert torch.equal(plain.x, same.x)
    assert torch.equal(plain.ending, same.ending)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2), (F64, 1)])
def test_scales_of_coordinates_cost_nothing_with_their_diagonal(dtype, most):
    """Condition 1e8: one step, where conjugate gradients without it need many, and float32 takes some for flat."""
    values = torch.logspace(-8, 0, 30, dtype=dtype)
    b = values * torch.linspace(1, 2, 30, dtype=dtype)
    found = conjugate_gradients(lambda rows: rows * values, b[None], metric=values[None])
    assert int(found.steps) <= most
    assert names(found) == ["CONVERGED"]
    torch.testing.assert_close(found.x[0], b / values, rtol=1e-4, atol=0)
    plain = conjugate_gradients(lambda rows: rows * values, b[None])
    assert int(plain.steps) > 20 or names(plain) == ["NEGATIVE_CURVATURE"]


def test_negative_curvature_is_followed_under_a_preconditioner_too():
    M = matrices(4, 5, least=-1.0)
    b = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=F64)
    metric = torch.rand(4, 5, generator=torch.Generator().manual_seed(2), dtype=F64) + 0.1
    found = conjugate_gradients(multiplied(M), b, metric=metric)
    assert "NEGATIVE_CURVATURE" in names(found)
    expected = (found.x * (multiplied(M)(found.x) / 2 - b)).sum(1)
    torch.testing.assert_close(found.model, expected)
    assert (found.model < 0).all()


def test_a_flat_direction_is_left_by_a_step_of_gradient_descent_in_the_metric():
    found = conjugate_gradients(
        lambda rows: 0 * rows, torch.tensor([[4.0, 6.0]]), metric=torch.tensor([[2.0, 1.0]])
    )
    assert names(found) == ["NEGATIVE_CURVATURE"]
    assert found.x.tolist() == [[2.0, 6.0]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_preconditioner_that_is_not_finite_ends_a_row(value):
    metric = torch.tensor([[1.0, 1.0], [1.0, value]])
    found = conjugate_gradients(lambda rows: rows, torch.ones(2, 2), metric=metric)
    assert names(found) == ["CONVERGED", "NON_FINITE"]
    assert found.x.tolist() == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("is_scaled", [False, True])
def test_pairs_are_conjugate_and_of_the_matrix(is_scaled):
    M = matrices(2, 6)
    b = torch.randn(2, 6, generator=torch.Generator().manual_seed(1), dtype=F64)
    metric = torch.diagonal(M, dim1=1, dim2=2) if is_scaled else None
    found = conjugate_gradients(multiplied(M), b, metric=metric, pairs=8, rtol=1e-12)
    moves, changes = (torch.stack(some, 1) for some in found.pairs)
    assert moves.shape == changes.shape == (2, 8, 6)
    torch.testing.assert_close(changes, moves @ M)
    gram = moves @ changes.mT
    size = torch.diagonal(gram, dim1=1, dim2=2).clamp_min(1e-300).sqrt()
    cosines = gram / size[:, :, None] / size[:, None, :]
    known = (size > 1e-100).double()
    torch.testing.assert_close(cosines, torch.diag_embed(known), rtol=0, atol=1e-6)
    assert known[:, :2].sum() == 0
    # Of all directions together they are the inverse.
    torch.testing.assert_close(two_loop(-b, moves, changes), torch.linalg.solve(M, b), rtol=1e-8, atol=1e-10)


def test_pairs_of_a_row_are_those_of_the_row_alone():
    M = matrices(3, 12)
    M[1] = 2 * torch.eye(12)
    M[2, :3, :3] = torch.diag(torch.tensor([-4.0, -5.0, 1.0], dtype=F64))
    b = torch.randn(3, 12, generator=torch.Generator().manual_seed(1), dtype=F64)
    together = conjugate_gradients(multiplied(M), b, pairs=3)
    assert len(set(together.steps.tolist())) == 3
    for row in range(3):
        alone = conjugate_gradients(multiplied(M[row : row + 1]), b[row : row + 1], pairs=3)
        for some, own in zip(together.pairs, alone.pairs, strict=True):
            torch.testing.assert_close(torch.stack(some, 1)[row], torch.stack(own, 1)[0])
    moves, changes = (torch.stack(some, 1) for some in together.pairs)
    assert ((moves * changes).sum(-1) >= 0).all()


def test_pairs_are_spread_over_the_steps():
    M, b = matrices(1, 30), torch.ones(1, 30, dtype=F64)
    every = conjugate_gradients(multiplied(M), b, pairs=40, max_steps=13)
    some = conjugate_gradients(multiplied(M), b, pairs=4, max_steps=13)
    steps = every.pairs.moves[-13:]
    for move, step in zip(some.pairs.moves, (0, 4, 8, 12), strict=True):
        assert torch.equal(move, steps[step])


def test_a_direction_of_negative_curvature_is_no_pair():
    found = conjugate_gradients(lambda rows: -rows, torch.ones(1, 2), pairs=2)
    assert not torch.stack(found.pairs.moves).any()


def test_derivatives_of_preconditioned_steps_and_their_pairs():
    M = matrices(2, 4).requires_grad_()
    b = torch.randn(2, 4, generator=torch.Generator().manual_seed(2), dtype=F64).requires_grad_()
    metric = (torch.rand(2, 4, generator=torch.Generator().manual_seed(3), dtype=F64) + 0.3).requires_grad_()

    def fn(M, b, metric):
        found = conjugate_gradients(multiplied(M), b, metric=metric, max_steps=2, pairs=2)
        return found.x, found.model, torch.stack(found.pairs.moves), torch.stack(found.pairs.changes)

    assert mg.gradcheck(fn, (M, b, metric), order=2)
