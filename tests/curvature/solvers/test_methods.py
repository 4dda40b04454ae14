"""Conjugate gradients: steps, negative curvature, Martens' rule."""

import pytest
import torch

from metagrad.curvature.solvers.methods import CG, Neumann
from metagrad.curvature.solvers.solution import Result
from metagrad.curvature.solvers.solve import solve
from tests.curvature.maps import MatrixMap, drawn, matrix, with_spectrum
from tests.marks import slow


def test_it_ends_after_as_many_steps_as_there_are_distinct_eigenvalues():
    for distinct in ([2.0], [1.0, 5.0], [1.0, 2.0, 9.0], [1.0, 2.0, 3.0, 50.0]):
        A = with_spectrum(torch.tensor(distinct * 6))
        b = drawn(len(A))
        solution = solve(MatrixMap(A), b, method="cg", rtol=1e-10)
        assert solution.result is Result.CONVERGED
        assert int(solution.stats.steps) == len(distinct)
        torch.testing.assert_close(solution.value, torch.linalg.solve(A, b), rtol=1e-8, atol=1e-9)


def test_iterates_that_grow_beyond_all_bounds_are_not_returned():
    """A product with the null space that is exactly zero leaves a curvature of rounding errors squared."""
    A = torch.diag(torch.tensor([1.0, 2.0, 0.0, 0.0, 3.0], dtype=torch.float64))
    found = solve(MatrixMap(A), torch.ones(5, dtype=torch.float64), method="cg")
    assert found.result is Result.NON_FINITE
    assert found.value.isfinite().all()


def between(residuals: torch.Tensor, rtol: float) -> tuple[int, float]:
    """Return after how many steps the residual falls most at once below about rtol, and a tolerance halfway."""
    lowest = residuals.cummin(0).values
    falls = torch.where(lowest[1:] < rtol, lowest[:-1] / lowest[1:], 0)
    step = int(falls.argmax()) + 1
    return step + 1, float((lowest[step - 1] * lowest[step]).sqrt())


@pytest.mark.parametrize("jacobi", [False, True])
@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("rtol", [1e-3, 1e-8])
def test_it_takes_the_steps_that_scipy_takes(rtol, start, jacobi):
    linalg = pytest.importorskip("scipy.sparse.linalg")
    n = 60
    A = with_spectrum(torch.logspace(0, 1.5, n)) + torch.diag(torch.linspace(0, 500, n).double())
    b, x0 = drawn(n), drawn(n, seed=1) if start else None
    iterates = []
    linalg.cg(
        A.numpy(),
        b.numpy(),
        None if x0 is None else x0.numpy(),
        rtol=rtol / 100,
        M=torch.diag(1 / A.diagonal()).numpy() if jacobi else None,
        callback=lambda x: iterates.append(torch.from_numpy(x.copy())),
    )
    steps, rtol = between(torch.stack([(b - A @ x).norm() / b.norm() for x in iterates]), rtol)
    preconditioner = (lambda rows: rows / A.diagonal()) if jacobi else None
    solution = solve(MatrixMap(A), b, x0=x0, rtol=rtol, preconditioner=preconditioner)
    assert int(solution.stats.steps) == steps > 3
    torch.testing.assert_close(solution.value, iterates[steps - 1], rtol=1e-6, atol=1e-9)


def test_products_are_counted_and_rows_that_ended_are_not_multiplied():
    A, b = matrix("flat", 50), drawn(3, 50)
    b[1] = 0
    b[2] = A @ torch.linalg.eigh(A).eigenvectors[:, 0]
    operator = MatrixMap(A)
    solution = solve(operator, b, rtol=1e-8)
    steps = solution.stats.steps.tolist()
    assert steps[0] > 5
    assert steps[1:] == [0, 1]
    # Two for symmetry, three for the true residuals.
    assert solution.stats.matvecs == operator.matvecs == sum(steps) + 2 + 3


def test_negative_curvature_is_met_with_its_direction():
    A, b = with_spectrum(torch.tensor([5.0, 4.0, 3.0, 2.0, -1.0])), drawn(5)
    solution = solve(MatrixMap(A), b, method="cg")
    assert solution.result is Result.NEGATIVE_CURVATURE
    d = solution.stats.direction
    assert d is not None
    assert d @ A @ d < 0
    torch.testing.assert_close(d.norm(), torch.ones_like(d.norm()))
    assert b @ d > 0  # the model falls along it
    steps = int(solution.stats.steps)
    # The iterate equals the iterate of a separate run of as many steps.
    truncated = solve(MatrixMap(A), b, method="cg", max_steps=steps)
    assert truncated.result is Result.MAX_STEPS
    torch.testing.assert_close(solution.value, truncated.value)
    model = 0.5 * solution.value @ A @ solution.value - b @ solution.value
    assert model < 0


def test_directions_are_zero_for_the_rows_without():
    A = torch.diag(torch.tensor([1.0, 2.0, -1.0]))
    solution = solve(MatrixMap(A), torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), method="cg")
    assert solution.stats.results == (Result.CONVERGED, Result.NEGATIVE_CURVATURE)
    assert solution.result is Result.NEGATIVE_CURVATURE
    expected = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(solution.stats.direction, expected)


@pytest.mark.parametrize(("spectrum", "epsilon"), [("polynomial", 5e-4), slow("polynomial", 1e-7)])
def test_martens_rule_stops(spectrum, epsilon):
    A, b = matrix(spectrum, 300), drawn(300)
    operator = MatrixMap(A)
    solution = solve(operator, b, method=CG(progress=epsilon), rtol=1e-14, max_steps=2000)
    assert solution.result is Result.PROGRESS
    assert solution.result.is_success
    last = int(solution.stats.steps)

    def model(steps):
        x = solve(operator, b, method="cg", rtol=1e-14, max_steps=steps).value
        return float(0.5 * x @ A @ x - b @ x)

    def stops(i):
        k = max(10, -(-i // 10))
        return model(i) < 0 and (model(i) - model(i - k)) / model(i) < k * epsilon

    assert last > (11 if epsilon > 1e-5 else 110)
    assert stops(last)
    assert not any(stops(i) for i in range(max(12, last - 5), last))


@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_converges_to_the_solution(scale):
    A, b = matrix("flat", 30), drawn(2, 30)
    generator = torch.Generator().manual_seed(0)
    solution = solve(MatrixMap(A), b, method=Neumann(scale=scale), rtol=1e-9, generator=generator)
    assert solution.result is Result.CONVERGED
    torch.testing.assert_close(solution.value, torch.linalg.solve(A, b.t()).t(), rtol=1e-7, atol=1e-9)


def test_truncated_it_is_gradient_descent():
    for steps in [1, 2, 7]:
        for start in [False, True]:
            A, b, scale = matrix("flat", 20), drawn(20), 0.25
            x0 = drawn(20, seed=1) if start else None
            expected = torch.zeros(20).double() if x0 is None else x0
            for _ in range(steps):
                expected = expected - scale * (A @ expected - b)
            operator = MatrixMap(A)
            solution = solve(
                operator,
                b,
                method=Neumann(scale=scale),
                max_steps=steps,
                x0=x0,
                rtol=1e-12,
                check_symmetry=False,
            )
            assert solution.result is Result.MAX_STEPS
            torch.testing.assert_close(solution.value, expected)
            assert operator.matvecs == solution.stats.matvecs == steps + 1 + start


def test_a_series_that_diverges_ends_where_its_residual_is_least():
    A = torch.diag(torch.tensor([0.1, 1.0, 4.4], dtype=torch.float64))
    b = torch.tensor([1.0, 1.0, 1e-2], dtype=torch.float64)
    solution = solve(MatrixMap(A), b, method=Neumann(scale=0.5), rtol=1e-8)
    assert solution.result is Result.DIVERGED
    steps = int(solution.stats.steps)
    assert steps > 3
    # The residual of the series is (I - scale A)^k b.
    residuals = [((1 - 0.5 * A.diagonal()) ** k * b).norm() for k in range(2 * steps)]
    assert torch.stack(residuals).argmin() == steps
    torch.testing.assert_close(solution.stats.residual_norms, residuals[steps])


def test_negative_eigenvalues_diverge():
    A = torch.diag(torch.tensor([1.0, -1.0]))
    solution = solve(MatrixMap(A), torch.ones(2), method=Neumann(scale=0.5), max_steps=1000)
    assert solution.result is Result.DIVERGED


def test_the_scale_is_estimated_from_below_two_over_the_largest_eigenvalue():
    for name in ("flat", "polynomial", "exponential", "step"):
        operator = MatrixMap(matrix(name, 100))
        solution = solve(
            operator, drawn(100), method="neumann", max_steps=50, generator=torch.Generator().manual_seed(1)
        )
        assert solution.result in (Result.MAX_STEPS, Result.CONVERGED)
        assert operator.matvecs == solution.stats.matvecs
