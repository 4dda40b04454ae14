"""Sums over a million elements in single precision, and estimates from them, against double precision."""

import pytest
import torch

from metagrad.curvature.estimators.trace import trace
from metagrad.curvature.rows import inner, norm, orthonormal, safe_norm
from metagrad.curvature.spectrum.eigenvalues import eigenvalues
from metagrad.curvature.spectrum.quadrature import log_determinant
from tests.curvature.maps import seeded
from tests.marks import slow

LONG = 2**20 + 5


class Diagonal:
    """A diagonal matrix, in single precision."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, diagonal: torch.Tensor) -> None:
        self.diagonal, self.shape = diagonal, (len(diagonal), len(diagonal))

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors * self.diagonal


class OfRankThree(Diagonal):
    """u u^T + 0.3 v v^T + 0.1 w w^T for vectors of signs."""

    def __init__(self, n: int) -> None:
        self.shape = (n, n)
        self.signs = torch.randint(0, 2, (3, n), generator=seeded()).float() * 2 - 1

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor([1.0, 0.3, 0.1])
        return ((vectors[:, None] * self.signs).sum(-1) * weights) @ self.signs


def test_long_sums_are_as_precise_as_their_terms():
    rows = torch.rand(3, LONG, generator=seeded())
    exact = rows.double() @ rows.double().t()
    torch.testing.assert_close(inner(rows, rows).double(), exact, rtol=2e-6, atol=0)
    torch.testing.assert_close(inner(rows[None], rows[None, :1])[0].double(), exact[:, :1], rtol=2e-6, atol=0)
    for length in (norm(rows), safe_norm(1e-30 * rows) * 1e30):
        torch.testing.assert_close(length.double(), exact.diagonal().sqrt(), rtol=2e-6, atol=0)


def test_long_vectors_become_orthonormal_whatever_they_are():
    """Torch's factorization is off by 1e-4 for a million elements, and where vectors are dependent by 1e-3."""
    vectors = torch.randn(3, LONG, generator=seeded())
    for rows in (vectors, torch.cat([vectors, vectors.sum(0, keepdim=True), vectors[:1]])):
        basis, lower = orthonormal(rows)
        torch.testing.assert_close(
            basis.double() @ basis.double().t(), torch.eye(len(rows)).double(), rtol=0, atol=1e-5
        )
        torch.testing.assert_close(lower @ basis, rows, rtol=0, atol=1e-4)
        assert torch.equal(lower, lower.tril())


def test_orthonormal_rows_of_pieces_have_the_derivatives_of_one_factorization():
    vectors = torch.randn(3, 10_000, dtype=torch.float64, generator=seeded())
    weights = torch.randn(3, 10_000, dtype=torch.float64, generator=seeded())

    def ours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return orthonormal(x)

    def whole(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, r = torch.linalg.qr(x.t())
        return q.t(), r.t()

    def derivatives(factorize) -> list[torch.Tensor]:
        x = vectors.clone().requires_grad_()
        rows, lower = factorize(x)
        signs = lower.detach().diagonal().sign()
        value = (signs[:, None] * rows * weights).sum().sin() + (signs * lower).tril().square().sum().log()
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        return [value.detach(), first.detach(), torch.autograd.grad((first * weights.cos()).sum(), x)[0]]

    for found, expected in zip(derivatives(ours), derivatives(whole), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["hutch++", slow("xtrace")])
def test_the_trace_of_few_directions_in_a_million(method):
    """By torch's factorization off by up to 5e-3, more than three standard errors."""
    estimate = trace(OfRankThree(LONG), method=method, probes=12, generator=seeded())
    assert abs(float(estimate.value) / (1.4 * LONG) - 1) < 5e-5


@pytest.mark.slow
def test_lanczos_of_a_million_elements():
    diagonal = 1 + torch.rand(LONG, generator=seeded())
    found = log_determinant(Diagonal(diagonal), probes=2, steps=8, generator=seeded())
    assert abs(float(found.value) / float(diagonal.double().log().sum()) - 1) < 1e-6
    spread = torch.linspace(-1, 1, LONG) ** 3
    spread[:3] = torch.tensor([3.0, 2.5, 2.0])
    pairs = eigenvalues(Diagonal(spread), 2, rtol=1e-6, generator=seeded())
    assert pairs.converged
    assert (pairs.residuals < 1e-5).all()
