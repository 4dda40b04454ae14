"""The standard error of a mean of leave-one-out estimates, which are not independent."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 0.25  # of k Cov / s^2 that is assumed whatever the pairs say, which are few and noisy
MARGIN = (
    1.3  # on the covariance: its estimate is right in the mean but skewed, too low more than half of the time
)


def inflation(samples: Tensor, covariance: Tensor, most: float) -> Tensor:
    r"""Return by how much correlation inflates the variance of the mean, as a factor.

    Let :math:`e_i` be unbiased estimates, where the i-th probe is tested and all others are fitted, and
    :math:`e_i^{(j)}` the same with the j-th probe left out altogether. Given all other probes, :math:`e_i^{(j)}` does
    not depend on the j-th, and both have their mean over the i-th at the true value; therefore

    .. math:: \mathrm{Cov}(e_i, e_j) = E[(e_i^{(j)} - e_i) (e_j^{(i)} - e_j)]

    exactly, and with the sample variance :math:`s^2` (whose mean is the variance less the covariance)

    .. math:: \mathrm{Var}(\bar e) = E[s^2] / k + \mathrm{Cov} .

    The mean over all pairs estimates the covariance without bias; the factor is :math:`1 + k \, \mathrm{Cov} / s^2`,
    with a margin and kept within bounds. The elements of a vector share one factor, of their sums.

    Args:
        samples: The estimates, [k] or [k, n].
        covariance: Their covariance, summed over the elements; see :func:`covariance_of`.
        most: Bound for :math:`k \, \mathrm{Cov} / s^2`.
    """
    k = samples.shape[0]
    if k < 2:
        return torch.ones_like(covariance)
    variance = samples.detach().var(0).sum()
    ratio = torch.where(variance > 0, MARGIN * k * covariance / variance, 0.0)
    return 1 + ratio.clamp(LEAST, most)


def covariance_of(changes: Tensor) -> Tensor:
    """Estimate the covariance of leave-one-out estimates.

    Args:
        changes: How the i-th changes when the j-th probe is left out too, [k, k]; the diagonal is not read.
    """
    k = len(changes)
    return (changes * changes.t()).fill_diagonal_(0).sum() / max(1, k * (k - 1))
