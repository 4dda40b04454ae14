"""Nonlinear least squares: linear residuals, how a fit ends, and errors. Certified minima are in `test_dense.py`."""

from __future__ import annotations

import math

import pytest
import torch

from metagrad.curvature import SolveError
from metagrad.optim import LeastSquaresResult, least_squares
from tests.functions import custom_function
from tests.optim.second_order.problems import fit_residuals

F64 = torch.float64


def rosenbrock(w):
    return torch.cat([10 * (w[1:] - w[:-1] ** 2), 1 - w[:-1]])


@pytest.mark.parametrize("solver", ["auto", "cg"])
def test_linear_residuals_of_a_dict_take_the_normal_equations(solver):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 4, generator=generator, dtype=F64)
    y = torch.randn(20, 1, generator=generator, dtype=F64)
    start = {"w": torch.zeros(3, 1, dtype=F64), "b": torch.zeros((), dtype=F64)}
    found = least_squares(lambda p: x[:, :3] @ p["w"] + x[:, 3:] * p["b"] - y, start, solver=solver)
    expected = torch.linalg.lstsq(x, y).solution
    assert found.result.is_success
    torch.testing.assert_close(found.value["w"], expected[:3], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.value["b"], expected[3, 0], rtol=1e-6, atol=1e-8)
    assert (found.products > 0) == (solver == "cg")
    assert "after" in repr(found)


def test_how_a_fit_ends():
    def root(w):
        return w**3 - 1

    def two(w):
        return torch.cat([w**3 - 1, w - 3])

    start = torch.tensor([3.0], dtype=F64)
    ended = [
        least_squares(root, start, max_steps=2),
        least_squares(two, start, gtol=0.0, xtol=0.0, ftol=0.5),
        least_squares(two, start, gtol=0.0, ftol=0.0, xtol=0.5),
        least_squares(root, torch.ones(1, dtype=F64)),
        least_squares(root, torch.full((1,), math.inf, dtype=F64)),
    ]
    expected = ["MAX_STEPS", "LOSS", "STEP", "GRADIENT", "NON_FINITE"]
    assert [found.result.name for found in ended] == expected
    assert ended[0].steps == 2
    assert ended[0].loss < float(root(start).pow(2).sum() / 2)
    assert ended[3].steps == 0
    assert not math.isfinite(ended[4].loss)


def test_a_gradient_that_is_wrong_is_no_descent():
    Negative = custom_function(torch.clone, lambda x: torch.full_like(x, -1.0))
    found = least_squares(lambda w: Negative.apply(w) - 1, torch.zeros(1, dtype=F64))
    assert found.result is LeastSquaresResult.NO_DESCENT
    assert found.value.tolist() == [0.0]


def test_float32_ends_at_its_precision():
    found = least_squares(lambda w: fit_residuals(w.double()).float(), torch.tensor([1.0, -0.5, 0.2]))
    assert found.result.is_success
    assert found.value.dtype == torch.float32


@pytest.mark.parametrize(
    ("residuals", "options", "error", "match"),
    [
        (rosenbrock, {"max_steps": 0}, ValueError, "max_steps.*: expected an int of 1 or more, got 0"),
        (rosenbrock, {"ftol": -1.0}, ValueError, "expected a number of 0 or more, got -1.0"),
        (lambda w: w.detach(), {}, ValueError, "the residuals do not depend on the parameters"),
        (lambda w: [w], {}, TypeError, "must return a real floating point tensor of residuals, got list"),
        (lambda w: w + 1j, {}, TypeError, "got torch.complex128"),
        (rosenbrock, {"max_steps": 1, "throw": True}, SolveError, "after 1 steps .*max_steps was reached"),
    ],
)
def test_what_is_refused(residuals, options, error, match):
    with pytest.raises(TypeError, match=r"params\): expected Tensor or Mapping, got list"):
        least_squares(rosenbrock, [torch.ones(2)])
    with pytest.raises(error, match=match):
        least_squares(residuals, torch.tensor([-1.2, 1.0], dtype=F64), **options)
