from __future__ import annotations

import pytest
import torch

from metagrad.curvature.estimators.basis import LEAST, MARGIN, covariance_of, inflation


def test_the_covariance_is_the_mean_over_pairs():
    changes = torch.tensor([[9.0, 1.0, 2.0], [3.0, 9.0, 4.0], [5.0, 6.0, 9.0]])
    assert covariance_of(changes) == (1 * 3 + 2 * 5 + 4 * 6) / 3


def test_inflation_is_within_bounds():
    samples = torch.tensor([1.0, 2.0, 3.0])  # s^2 = 1, k = 3
    assert inflation(samples, torch.tensor(0.2), most=2.0).item() == pytest.approx(1 + 0.6 * MARGIN)
    assert inflation(samples, torch.tensor(5.0), most=2.0) == 3.0
    assert inflation(samples, torch.tensor(-5.0), most=2.0) == 1 + LEAST


def test_samples_that_agree_and_single_ones_are_not_inflated_by_noise():
    assert inflation(torch.ones(3), torch.tensor(1e-30), most=2.0) == 1 + LEAST
    assert inflation(torch.ones(1), torch.tensor(0.0), most=2.0) == 1.0


def test_for_a_mean_of_correlated_samples_the_variance_is_unbiased():
    """e_i = mean of x_j over j != i, tested on x_i: bilinear, e_i = x_i (sum of the others), all means zero."""
    x = torch.randn(20_000, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    estimates = x * (x.sum(1, keepdim=True) - x)
    changes = -x[:, :, None] * x[:, None, :]  # e_i^(j) - e_i
    off_diagonal = 1 - torch.eye(5)
    covariance = (changes * changes.mT * off_diagonal).sum((1, 2)) / 20
    variance = estimates.var(1) / 5 + covariance
    torch.testing.assert_close(variance.mean(), estimates.mean(1).var(), rtol=0.1, atol=0)
