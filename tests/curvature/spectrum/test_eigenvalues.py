"""Eigenvalues against torch.linalg.eigh: known spectra, repeated eigenvalues, small sizes, bounds and derivatives."""

import pytest
import torch

from metagrad.curvature.spectrum.eigenvalues import Eigenpairs, eigenvalues
from tests.curvature.maps import SPECTRA, MatrixMap, basis, matrix, seeded, with_spectrum

N = 300
WHICH = ["largest", "smallest", "both", "magnitude"]


def exact(dense: torch.Tensor, k: int, which: str) -> torch.Tensor:
    up = torch.linalg.eigvalsh(dense.double())
    down = up.flip(0)
    if which == "both":
        return torch.cat([down[: (k + 1) // 2], down[len(down) - k // 2 :]])
    if which == "magnitude":
        return down[down.abs().argsort(descending=True, stable=True)][:k]
    return (down if which == "largest" else up)[:k]


def check_pairs(dense: torch.Tensor, pairs: Eigenpairs, k: int, which: str, rtol: float) -> None:
    everything, vectors = torch.linalg.eigvalsh(dense.double()), pairs.vectors
    values, norm = pairs.values.double(), float(everything.abs().max())
    assert pairs.converged
    assert values.shape == pairs.residuals.shape == (k,)
    assert pairs.values.dtype == vectors.dtype == dense.dtype
    torch.testing.assert_close(values, exact(dense, k, which), rtol=0, atol=2 * rtol * norm)
    nearest = (values.unsqueeze(1) - everything).abs().min(1).values
    rounding = len(dense) * torch.finfo(torch.float64).eps * norm  # of the reference
    assert (nearest <= pairs.residuals.double() + rounding).all()
    rest = vectors @ dense - pairs.values.unsqueeze(1) * vectors
    slack = 5 * torch.finfo(dense.dtype).eps * norm
    assert (rest.norm(dim=1) <= pairs.residuals + slack).all()
    assert (pairs.residuals <= rtol * norm + 10 * slack).all()
    atol = 1e-12 if dense.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(
        vectors @ vectors.t(), torch.eye(k, dtype=dense.dtype), rtol=0, atol=10 * rtol + atol
    )


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_known_spectra(name, dtype):
    for which in WHICH if name == "indefinite" else ["both", "magnitude"]:
        operator = MatrixMap(matrix(name, N).to(dtype))
        pairs = eigenvalues(operator, 5, which=which, copies=name == "step", generator=seeded())
        check_pairs(operator.matrix, pairs, 5, which, rtol=1e-5)
        assert pairs.matvecs == operator.matvecs


COPIES = {
    "copies at both ends": torch.cat(
        [torch.tensor([5.0] * 3 + [4.0] * 2 + [3.0] * 5), torch.linspace(1, -1, 80), torch.tensor([-2.0] * 4)]
    ),
    "everything twice": torch.linspace(1, 0, 50).repeat_interleave(2),
    "low rank": torch.cat([torch.tensor([5.0, 5.0, 4.0]), torch.zeros(97)]),
    "one and copies": torch.cat([torch.tensor([2.0]), torch.ones(99)]),
    "copies over a narrow bulk": torch.cat([torch.ones(3), 1e-6 * torch.linspace(-1, 1, 97)]),
    "identity": 3 * torch.ones(100),
    "zero": torch.zeros(100),
}


def test_every_copy_of_a_repeated_eigenvalue():
    for name in COPIES:
        dense = with_spectrum(COPIES[name])
        for which in ("largest", "smallest", "both", "magnitude"):
            pairs = eigenvalues(MatrixMap(dense), 6, which=which, copies=True, generator=seeded())
            check_pairs(dense, pairs, 6, which, rtol=1e-5)


def test_all_eigenvalues():
    for n, which in [(1, "both"), (2, "smallest"), (3, "both"), (12, "largest")]:
        dense = torch.randn(n, n, dtype=torch.float64, generator=seeded())
        dense = dense + dense.t()
        for k in {1, n}:
            pairs = eigenvalues(MatrixMap(dense), k, which=which, generator=seeded())
            check_pairs(dense, pairs, k, which, rtol=1e-5)


@pytest.mark.parametrize("magnitude", [1e-25, 1e25])
def test_any_magnitude(magnitude):
    dense = (magnitude * matrix("indefinite", 100)).float()
    pairs = eigenvalues(MatrixMap(dense), 3, generator=seeded())
    torch.testing.assert_close(pairs.values / magnitude, torch.tensor([100.0, 90.0, 80.0]), rtol=1e-5, atol=0)
    assert pairs.converged


def test_a_budget_is_kept_and_what_is_reached_comes_with_its_bound():
    for max_matvecs in [20, 25, 41]:
        operator = MatrixMap(matrix("flat", N))
        pairs = eigenvalues(operator, 3, max_matvecs=max_matvecs, rtol=1e-10, generator=seeded())
        assert operator.matvecs == pairs.matvecs <= max_matvecs
        assert not pairs.converged
        assert "not converged" in repr(pairs)
        nearest = (pairs.values.unsqueeze(1) - SPECTRA["flat"](N)).abs().min(1).values
        assert (nearest <= pairs.residuals).all()
        assert (pairs.values > 2.5).all()


def test_without_the_search_for_copies_every_product_is_for_the_pairs():
    operator = MatrixMap(matrix("polynomial", N))
    searched = eigenvalues(operator, 3, copies=True, generator=seeded())
    plain = eigenvalues(operator, 3, generator=seeded())
    torch.testing.assert_close(plain.values, searched.values)
    assert plain.converged
    assert plain.matvecs < 0.8 * searched.matvecs
    check_pairs(operator.matrix, plain, 3, "largest", rtol=1e-5)


def test_without_the_search_a_repeated_eigenvalue_stands_once():
    dense = with_spectrum(torch.cat([torch.tensor([5.0, 5.0, 4.0]), torch.linspace(1, 0, 97)]))
    pairs = eigenvalues(MatrixMap(dense), 2, generator=seeded())
    torch.testing.assert_close(pairs.values, torch.tensor([5.0, 4.0], dtype=dense.dtype))


def test_values_are_differentiable():
    dense = with_spectrum(torch.linspace(1, 5, 12))
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def gradient(values_of) -> torch.Tensor:
        x = dense.clone().requires_grad_()
        values = values_of((x + x.t()) / 2)
        return torch.autograd.grad((weights * values**3).sum(), x)[0]

    found = gradient(lambda m: eigenvalues(MatrixMap(m), 3, rtol=1e-11, generator=seeded()).values)
    expected = gradient(lambda m: torch.linalg.eigvalsh(m).flip(0)[:3])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_the_sum_over_copies_is_differentiable():
    x = with_spectrum(torch.tensor([2.0, 2.0, 1.0, 0.5, 0.0])).requires_grad_()
    pairs = eigenvalues(MatrixMap(x), 2, generator=seeded())
    (found,) = torch.autograd.grad(pairs.values.sum(), x)
    q = basis(5)[:, :2]
    torch.testing.assert_close((found + found.t()) / 2, q @ q.t(), rtol=0, atol=1e-9)
