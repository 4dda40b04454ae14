import pytest
import torch

import metagrad as mg
from metagrad.curvature.estimators.trace import diagonal
from tests.curvature.maps import SPECTRA, MatrixMap, coverage, matrix, seeded


@pytest.mark.parametrize("chunk", ["64MiB", 3 * 8 * 12, 1])
def test_the_value_is_the_mean_over_signs_with_its_standard_error(chunk):
    A = matrix("flat", 12)
    seen = []

    class Watched(MatrixMap):
        def multiply(self, vectors):
            seen.append(vectors)
            return super().multiply(vectors)

    found = diagonal(Watched(A), probes=10, generator=seeded(), chunk=chunk)
    z = torch.cat(seen)
    x = z * (z @ A)
    torch.testing.assert_close(found.value, x.mean(0))
    torch.testing.assert_close(found.stderr, x.std(0) / 10**0.5, rtol=1e-8, atol=1e-14)
    assert (found.samples, found.matvecs, found.method) == (10, 10, "hutchinson")


def test_diagonal_matrices_are_exact_and_known_to_be():
    values = torch.randn(30, generator=seeded()) * 10 ** torch.linspace(-3, 3, 30)
    found = diagonal(MatrixMap(torch.diag(values)), probes=6, generator=seeded())
    torch.testing.assert_close(found.value, values, rtol=1e-5, atol=0)
    eps = torch.finfo(torch.float32).eps
    assert (found.stderr <= 100 * eps * values.norm()).all()
    assert ((found.value - values).abs() <= 4 * found.stderr + 16 * eps * values.abs()).all()


def test_unbiased():
    A = matrix("polynomial", 15)
    options = {"probes": 8}
    values = torch.stack(
        [diagonal(MatrixMap(A), **options, generator=seeded(seed)).value for seed in range(200)]
    )
    errors = (values.mean(0) - A.diagonal()).abs() / (values.std(0) / 200**0.5)
    assert errors.max() < 4


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_intervals_cover(spectrum):
    A = matrix(spectrum)

    def estimate(generator):
        return diagonal(MatrixMap(A), probes=60, generator=generator)

    assert 0.85 <= coverage(estimate, A.diagonal(), repeats=8) <= 0.99


def test_rtol_stops_when_the_intervals_are_tight():
    A = matrix("polynomial", 100) + 0.02 * torch.eye(100)
    found = diagonal(MatrixMap(A), rtol=0.3, generator=seeded())
    low, high = found.interval(0.95)
    assert found.converged
    assert ((high - low) / 2).norm() <= 0.3 * found.value.norm()
    assert found.matvecs < 1024
    assert (found.value - A.diagonal()).norm() < 0.3 * A.diagonal().norm()
    assert not diagonal(MatrixMap(A), rtol=1e-3, probes=20).converged


def test_differentiable_as_the_products_are():
    root = torch.randn(7, 7, dtype=torch.float64, generator=seeded(1)).requires_grad_()

    def value(root):
        operator = MatrixMap(root @ root.t())
        return diagonal(operator, probes=6, generator=seeded()).value

    assert mg.gradcheck(value, (root,), order=2, directions=2)
