"""The Neumann series: its sum, its truncation, its divergence."""

import pytest
import torch

from metagrad.curvature.solvers.neumann import Neumann
from metagrad.curvature.solvers.solution import Result
from metagrad.curvature.solvers.solve import solve
from tests.curvature.maps import MatrixMap, drawn, matrix


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
