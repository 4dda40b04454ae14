"""The formulas on small matrices are the definitions with a basis for every probe that is left out."""

from collections.abc import Collection

import torch
from torch import Tensor

from metagrad.curvature.estimators import xtrace
from metagrad.curvature.estimators.probes import ProbeSampler
from metagrad.curvature.estimators.trace import HutchPlusPlus
from metagrad.curvature.estimators.xtrace import Basis, XTrace, inverse_rows, left_out
from tests.curvature.maps import MatrixMap, matrix

DISTRIBUTIONS = ["rademacher", "sphere"]
K, N = 6, 25


def spent(cls, matrix: Tensor, products: int, distribution="rademacher", seed=0, batches=1):
    """An estimator that has spent its products, in equal batches."""
    generator = torch.Generator().manual_seed(seed)
    estimator: XTrace | HutchPlusPlus = cls(
        ProbeSampler("trace(operator, ...)", MatrixMap(matrix), distribution, generator, "64MiB")
    )
    for _ in range(batches):
        estimator.extend(products // batches)
    return estimator


def without(rows: Tensor, left_out: Collection[int]) -> Tensor:
    return rows[[i for i in range(len(rows)) if i not in left_out]]


def off(span: Tensor) -> Tensor:
    """The projector off the span of rows, [n, n]."""
    q = torch.linalg.qr(span.t())[0]
    return torch.eye(span.shape[1], dtype=span.dtype) - q @ q.t()


def _resphered(probe: Tensor, dimension: int, distribution: str) -> Tensor:
    return probe * (dimension**0.5 / probe.norm()) if distribution == "sphere" else probe


def leave_one_out(A: Tensor, probes: Tensor, i: int, left_out: Collection[int], distribution: str) -> Tensor:
    """The i-th estimate, with i and perhaps others left out of the basis."""
    others = without(probes, {i, *left_out})
    P = off(others @ A)
    g = _resphered(P @ probes[i], len(A) - len(others), distribution)
    return A.trace() - (P @ A @ P).trace() + g @ A @ g


def test_the_value_is_the_mean_of_leave_one_out_estimates():
    for distribution in DISTRIBUTIONS:
        for batches in [1, 3]:
            spectrum = "polynomial"
            A = matrix(spectrum, N)
            fitted = spent(XTrace, A, 2 * K, distribution, batches=batches)
            expected = torch.stack([leave_one_out(A, fitted.probes, i, (), distribution) for i in range(K)])
            found = fitted.estimate()
            torch.testing.assert_close(found.value, expected.mean(0), rtol=1e-10, atol=1e-12)
            assert (found.samples, found.matvecs) == (K, 2 * K)


def test_the_standard_error_has_the_covariance_of_all_pairs(monkeypatch):
    for distribution in DISTRIBUTIONS:
        spectrum = "polynomial"
        monkeypatch.setattr(xtrace, "LEAST", -float("inf"))
        monkeypatch.setattr(xtrace, "MARGIN", 1.0)
        monkeypatch.setattr(XTrace, "most", float("inf"))
        A = matrix(spectrum, N)
        for seed in range(20):  # the first seed whose variance is positive: an unbiased one need not be
            fitted = spent(XTrace, A, 2 * K, distribution, seed)
            found = fitted.estimate()
            if not found.stderr.isnan().any():
                break
        else:
            raise AssertionError("no seed has a positive variance")
        pairs = [(i, j) for i in range(K) for j in range(K) if i != j]
        one = torch.stack([leave_one_out(A, fitted.probes, i, (), distribution) for i in range(K)])
        two = {pair: leave_one_out(A, fitted.probes, pair[0], pair[1:], distribution) for pair in pairs}
        covariance = sum(((two[i, j] - one[i]) * (two[j, i] - one[j])).sum() for i, j in pairs) / len(pairs)
        variance = one.var(0)
        expected = variance / K * (1 + K * covariance / variance.sum())
        torch.testing.assert_close(found.stderr.square(), expected, rtol=1e-8, atol=1e-14)


def test_hutchpp_in_batches_is_hutchpp_on_all_its_probes():
    for distribution in DISTRIBUTIONS:
        for batches in [1, 4]:
            A = matrix("polynomial", N)
            fitted = spent(HutchPlusPlus, A, 24, distribution, batches=batches)
            basis, rest = fitted.basis.rows, off(fitted.basis.rows)
            torch.testing.assert_close(basis @ basis.t(), torch.eye(8, dtype=A.dtype))
            torch.testing.assert_close(fitted.products, fitted.probes @ A)
            torch.testing.assert_close(fitted.probes @ rest, fitted.probes)
            samples = ((fitted.probes @ A) * fitted.probes).sum(1)
            if distribution == "sphere":
                samples = samples * (N - 8) / fitted.probes.square().sum(1)
            found = fitted.estimate()
            torch.testing.assert_close(found.value, (basis @ A @ basis.t()).trace() + samples.mean())
            torch.testing.assert_close(found.stderr, samples.std() / 8**0.5)
            assert (found.samples, found.matvecs) == (8, 24)


def vectors(count, n=12, seed=0):
    return torch.randn(count, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_signs_of_a_factorisation_do_not_matter():
    """LAPACK returns its own rows with a plus sign. Other libraries may not."""
    given = vectors(7)
    basis = Basis(given.new_zeros(0, 12))
    basis.append(given[:4], "f()")
    basis.rows, basis.lower = -basis.rows, -basis.lower
    basis.append(given[4:], "f()")
    torch.testing.assert_close(basis.lower @ basis.rows, given)


def test_zero_pivots_have_directions_too():
    for pivots in (torch.zeros(3), torch.tensor([2.0, 0.0, 1.0])):
        lower = torch.diag(pivots)
        assert inverse_rows(lower).isfinite().all()
        torch.testing.assert_close(left_out(lower), torch.eye(3))
