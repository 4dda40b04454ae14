"""Chebyshev's iteration: its polynomial, its truncation, its interval."""

from __future__ import annotations

import pytest
import torch

from metagrad.curvature.solvers.chebyshev import Chebyshev
from metagrad.curvature.solvers.solution import Result
from metagrad.curvature.solvers.solve import solve
from tests.curvature.maps import MatrixMap

EIGENVALUES = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
B = torch.tensor([1.0, -2.0, 3.0, 1.0], dtype=torch.float64)


def chebyshev(k: int, x: torch.Tensor) -> torch.Tensor:
    before, now = torch.ones_like(x), x
    for _ in range(k - 1):
        before, now = now, 2 * x * now - before
    return now


@pytest.mark.parametrize("steps", [2, 5])
def test_truncated_it_is_the_polynomial_in_value_and_derivatives(steps):
    """Implicitly too, for the solve of a derivative is with the same polynomial."""
    values, b = EIGENVALUES.clone().requires_grad_(), B.clone().requires_grad_()
    options = {"method": Chebyshev((0.8, 4.0)), "max_steps": steps, "check_symmetry": False}
    x = solve(MatrixMap(torch.diag(values)), b, differentiate="unroll", **options).value
    c, e = 2.4, 1.6
    residual = chebyshev(steps, (c - values) / e) / chebyshev(steps, torch.tensor(c / e).double())
    expected = b * (1 - residual) / values
    torch.testing.assert_close(x, expected)
    found, wanted = (torch.autograd.grad((y**3).sum(), [values, b], create_graph=True) for y in (x, expected))
    torch.testing.assert_close(found, wanted)
    second, closed = (
        torch.autograd.grad((g[0] ** 2).sum(), [values, b], retain_graph=True) for g in (found, wanted)
    )
    torch.testing.assert_close(second, closed)
    implicit = solve(MatrixMap(torch.diag(EIGENVALUES)), b, **options).value
    torch.testing.assert_close(torch.autograd.grad((implicit**3).sum(), b)[0], wanted[1])


def test_eigenvalues_outside_of_the_interval():
    below = solve(
        MatrixMap(torch.diag(EIGENVALUES)), B, method=Chebyshev((2.0, 4.0)), rtol=1e-8, max_steps=400
    )
    assert below.result is Result.CONVERGED
    for last in (-0.1, 9.0):
        spectrum = torch.tensor([1.0, 2.0, 4.0, last], dtype=torch.float64)
        found = solve(MatrixMap(torch.diag(spectrum)), B, method=Chebyshev((1.0, 4.0)), rtol=1e-8)
        assert found.result is Result.DIVERGED


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"Chebyshev\(interval\): expected 0 < low <= high, or None"):
        Chebyshev((2.0, 1.0))
    with pytest.raises(ValueError, match=r"preconditioner\): the interval is that of the operator"):
        solve(MatrixMap(torch.eye(2)), torch.ones(2), method="chebyshev", preconditioner=torch.ones(2))
