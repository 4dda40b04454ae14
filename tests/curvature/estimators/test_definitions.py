"""The formulas on small matrices are the definitions with a basis for every probe that is left out."""

import torch

from metagrad.curvature.estimators import xtrace
from metagrad.curvature.estimators.trace import HutchPlusPlus
from metagrad.curvature.estimators.xtrace import XTrace
from tests.curvature.estimators import naive
from tests.curvature.maps import matrix

DISTRIBUTIONS = ["rademacher", "sphere"]
K, N = 6, 25


def test_the_value_is_the_mean_of_leave_one_out_estimates():
    for distribution in DISTRIBUTIONS:
        for batches in [1, 3]:
            spectrum = "polynomial"
            A = matrix(spectrum, N)
            fitted = naive.fitted(XTrace, A, 2 * K, distribution, batches=batches)
            expected = torch.stack([naive.xtrace(A, fitted.probes, i, (), distribution) for i in range(K)])
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
            fitted = naive.fitted(XTrace, A, 2 * K, distribution, seed)
            found = fitted.estimate()
            if not found.stderr.isnan().any():
                break
        else:
            raise AssertionError("no seed has a positive variance")
        pairs = [(i, j) for i in range(K) for j in range(K) if i != j]
        one = torch.stack([naive.xtrace(A, fitted.probes, i, (), distribution) for i in range(K)])
        two = {pair: naive.xtrace(A, fitted.probes, pair[0], pair[1:], distribution) for pair in pairs}
        covariance = sum(((two[i, j] - one[i]) * (two[j, i] - one[j])).sum() for i, j in pairs) / len(pairs)
        variance = one.var(0)
        expected = variance / K * (1 + K * covariance / variance.sum())
        torch.testing.assert_close(found.stderr.square(), expected, rtol=1e-8, atol=1e-14)


def test_hutchpp_in_batches_is_hutchpp_on_all_its_probes():
    for distribution in DISTRIBUTIONS:
        for batches in [1, 4]:
            A = matrix("polynomial", N)
            fitted = naive.fitted(HutchPlusPlus, A, 24, distribution, batches=batches)
            basis, rest = fitted.basis.rows, naive.off(fitted.basis.rows)
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
