from __future__ import annotations

import math

import pytest
import torch

import metagrad as mg
from metagrad.curvature.estimators.norms import frobenius_norm
from tests.curvature.coverage import covers
from tests.curvature.maps import SPECTRA, DiagonalMap, MatrixMap, matrix
from tests.marks import fast

DISTRIBUTIONS = ["rademacher", "normal", "sphere"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_is_the_frobenius_norm(distribution):
    A = matrix("indefinite", 200)
    found = frobenius_norm(MatrixMap(A), probes=4000, distribution=distribution, generator=seeded())
    expected = torch.linalg.matrix_norm(A)
    torch.testing.assert_close(found.value, expected, rtol=0.02, atol=0)
    assert (found.value - expected).abs() < 3 * found.stderr
    squares = [
        frobenius_norm(MatrixMap(A), probes=40, distribution=distribution, generator=seeded(s))
        for s in range(100)
    ]
    spread = torch.stack([other.value for other in squares]).std()
    torch.testing.assert_close(torch.stack([s.stderr for s in squares]).mean(), spread, rtol=0.25, atol=0)
    assert (found.samples, found.matvecs) == (4000, 4000)


@pytest.mark.parametrize("spectrum", fast(("polynomial",), SPECTRA))
def test_intervals_cover(spectrum):
    values = SPECTRA[spectrum](1000)

    def estimate(generator):
        return frobenius_norm(DiagonalMap(values), probes=120, distribution="sphere", generator=generator)

    assert covers(estimate, values.norm(), repeats=100)


def test_signs_are_exact_on_diagonal_matrices():
    found = frobenius_norm(MatrixMap(torch.diag(torch.tensor([3.0, -4.0]))), probes=5)
    assert found.value == 5.0
    assert 0 < found.stderr < 1e-5


def test_zero_is_zero():
    found = frobenius_norm(MatrixMap(torch.zeros(4, 4)), probes=5, rtol=0.1)
    assert found.value == found.stderr == 0.0
    assert found.converged


def test_one_sample_knows_nothing_of_its_error():
    assert frobenius_norm(MatrixMap(torch.eye(4)), probes=1).stderr == math.inf


def test_rtol_stops_when_the_interval_is_tight():
    A = matrix("polynomial", 100)
    found = frobenius_norm(MatrixMap(A), rtol=0.2, generator=seeded())
    low, high = found.interval(0.95)
    assert found.converged
    assert (high - low) / 2 <= 0.2 * found.value
    assert 16 < found.matvecs < 1024


def test_differentiable_as_the_products_are():
    A = matrix("flat", 6).clone().requires_grad_()

    def value(A):
        return frobenius_norm(MatrixMap(A), probes=5, generator=seeded()).value

    assert mg.gradcheck(value, (A,), order=2, directions=2)


def test_bad_arguments():
    operator = MatrixMap(torch.eye(5))
    with pytest.raises(
        ValueError, match=r"frobenius_norm\(operator, \.\.\.\): probes must be at least 1, got 0"
    ):
        frobenius_norm(operator, probes=0)
    with pytest.raises(ValueError, match="rtol must be positive"):
        frobenius_norm(operator, rtol=0)
    with pytest.raises(ValueError, match="distribution must be one of"):
        frobenius_norm(operator, distribution="cauchy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a product of the operator has NaN or inf"):
        frobenius_norm(MatrixMap(torch.full((5, 5), torch.inf)))
