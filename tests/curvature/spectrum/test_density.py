"""Spectral densities: mass, moments, outliers, and the error over probes, against the eigenvalues themselves."""

import math

import pytest
import torch

from metagrad.curvature.spectrum.quadrature import Density, spectral_density
from tests.curvature.maps import SPECTRA, MatrixMap, matrix, seeded

N = 300


def smoothed(spectrum: torch.Tensor, grid: torch.Tensor, sigma: float) -> torch.Tensor:
    bells = torch.exp(-0.5 * ((grid.unsqueeze(1) - spectrum) / sigma) ** 2)
    return bells.mean(1) / (sigma * math.sqrt(2 * math.pi))


def test_a_density_has_mass_one_and_the_moments_of_the_spectrum():
    for name, dtype in [*((name, torch.float64) for name in SPECTRA), ("indefinite", torch.float32)]:
        spectrum = SPECTRA[name](N)
        phi = spectral_density(MatrixMap(matrix(name, N).to(dtype)), steps=20, probes=40, generator=seeded())
        grid = phi.grid()
        assert float(torch.trapezoid(phi(grid).value, grid)) == pytest.approx(1, abs=1e-3)
        torch.testing.assert_close(phi.weights.sum(1), torch.ones(40, dtype=torch.float64))
        assert phi.nodes.dtype == phi.weights.dtype == torch.float64
        scale = float(spectrum.abs().max())
        for degree in range(6):
            found = (phi.weights * phi.nodes**degree).sum(1)
            error = abs(found.mean() - spectrum.pow(degree).mean())
            assert error <= 5 * found.std() / 40**0.5 + 1e-5 * scale**degree
        assert phi.matvecs <= 20 * 40


def test_the_smoothed_density_is_that_of_the_eigenvalues():
    spectrum, sigma = SPECTRA["flat"](N), 0.1
    phi = spectral_density(MatrixMap(matrix("flat", N)), steps=60, probes=60, sigma=sigma, generator=seeded())
    grid = torch.linspace(0.5, 3.5, 61, dtype=torch.float64)
    found, exact = phi(grid), smoothed(spectrum, grid, sigma)
    low, high = found.interval(0.999)
    assert ((exact >= low - 1e-6) & (exact <= high + 1e-6)).double().mean() > 0.95
    assert (found.value - exact).abs().max() < 0.1 * exact.max()
    assert found.samples == 60


def test_outliers_are_nodes():
    phi = spectral_density(MatrixMap(matrix("indefinite", N)), steps=60, probes=4, generator=seeded())
    for outlier in (100.0, 50.0, -10.0, -4.0):
        assert ((phi.nodes - outlier).abs().min(1).values < 1e-6).all()
    near = (phi.nodes - 100).abs() < 1e-6
    assert float((phi.weights * near).sum(1).mean()) == pytest.approx(1 / N, rel=1)


def test_multiples_of_the_identity_are_one_peak():
    for value, n in [(0.0, 2), (2.0, 50), (-5.0, 1)]:
        phi = spectral_density(MatrixMap(value * torch.eye(n)), probes=3, generator=seeded())
        grid = phi.grid()
        assert float(torch.trapezoid(phi(grid).value, grid)) == pytest.approx(1, abs=1e-3)
        rounding = 16 * torch.finfo(torch.float32).eps * abs(value)  # of a product, and a norm of it
        assert float(grid[phi(grid).value.argmax()]) == pytest.approx(value, abs=phi.sigma + rounding)
        assert phi.matvecs == 3


def test_processes_that_end_early_beside_others():
    dense = torch.diag(torch.tensor([0.0, 0.0, 1.0, 2.0], dtype=torch.float64))
    dense[0, 1] = dense[1, 0] = 1.0  # eigenvalues 1 and -1. A probe of signs sees one of them
    phi = spectral_density(MatrixMap(dense), probes=8, generator=seeded())
    assert phi.nodes.shape == phi.weights.shape == (8, 4)
    torch.testing.assert_close(phi.weights.sum(1), torch.ones(8, dtype=torch.float64))
    assert phi.nodes.min() >= -1 - 1e-12
    assert phi.nodes.max() <= 2 + 1e-12
    assert phi.matvecs < 32


def test_grid_and_repr():
    phi = Density(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.5, 0.5]]), sigma=0.25, n=2, matvecs=2)
    torch.testing.assert_close(phi.grid(5), torch.linspace(0, 4, 5, dtype=torch.float64))
    assert len(phi.grid()) == 33
    assert phi(torch.ones(2, 3)).value.shape == (2, 3)
    assert repr(phi) == "density of 2 eigenvalues from 1 to 3 (1 probe, 2 products)"
