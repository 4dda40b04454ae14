"""Growing orthonormal bases, their leave-one-out forms, and the error of means of leave-one-out estimates."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.curvature.estimators.estimate import Estimate
from metagrad.curvature.estimators.probing import Estimator, ProbeSampler
from metagrad.curvature.rows import orthonormal


class Basis:
    """An orthonormal basis of all appended vectors: appended = lower @ rows.

    Args:
        nothing: An empty tensor [0, n].

    Attributes:
        rows: The basis, [k, n], orthonormal up to rounding for any vectors.
        lower: Coordinates of the appended vectors, [k, k], lower triangular.
    """

    def __init__(self, nothing: Tensor) -> None:
        self.rows: Tensor = nothing
        self.lower: Tensor = nothing.new_zeros(0, 0)

    def append(self, vectors: Tensor, call: str) -> Tensor:
        """Add vectors, [j, n]. Return the new rows of the basis, [j, n].

        Householder's method runs on the old rows and the new vectors together. Gram-Schmidt would lose orthogonality
        if the new vectors lie in the old span (an operator of low rank).

        Raises:
            ValueError: The vectors require grad and are linearly dependent to half of the digits.
        """
        k = self.rows.shape[0]
        rows, lower = orthonormal(torch.cat([self.rows, vectors]))
        signs = torch.sign(lower.diagonal()[:k].detach())
        coordinates = lower[k:]
        coordinates = torch.cat([coordinates[:, :k] * signs, coordinates[:, k:]], 1)
        self.lower = torch.cat([torch.nn.functional.pad(self.lower, (0, vectors.shape[0])), coordinates])
        new = rows[k:]
        self.rows = torch.cat([self.rows, new])
        if self.lower.requires_grad:
            self._check_independence(call)
        return new

    def _check_independence(self, call: str) -> None:
        pivots = self.lower.detach().diagonal().abs()
        if not pivots.min() >= torch.finfo(pivots.dtype).eps ** 0.5 * pivots.max():
            raise ValueError(
                f"{call}: the products require grad, and {len(pivots)} of them are numerically dependent, so their "
                'orthonormal basis has no usable derivative. Take method="hutchinson" or fewer probes.'
            )


def left_out(lower: Tensor) -> Tensor:
    """Return the directions that the span loses if one vector is left out: unit rows :math:`s_i`, [k, k].

    The rows :math:`Q` are a basis of k vectors. The span of all vectors but the i-th has the projector :math:`Q^T (I
    - s_i s_i^T) Q`. Here :math:`s_i` is the normalized i-th column of the inverse of ``lower``, which is orthogonal
    to every other vector's coordinates.

    References:
        Epperly, Tropp, Webber, "XTrace: making the most of every sample in stochastic trace estimation", SIAM J.
        Matrix Anal. Appl. 45(1), 2024, section 2.
    """
    inverse = inverse_rows(lower)
    return inverse / linalg.vector_norm(inverse, dim=1, keepdim=True)


def inverse_rows(lower: Tensor) -> Tensor:
    """Return the columns of the inverse of a triangular matrix as rows. Rounding errors replace pivots of zero."""
    eye = torch.eye(lower.shape[0], dtype=lower.dtype, device=lower.device)
    pivots = lower.detach().diagonal()
    largest = lower.detach().abs().amax()
    least = torch.finfo(lower.dtype).eps * torch.where(largest > 0, largest, torch.ones_like(largest))
    moved = torch.where(pivots.abs() < least, torch.copysign(least, pivots) - pivots, 0.0)
    return linalg.solve_triangular(lower + torch.diag(moved), eye, upper=False).t()


class ProbedBasis(Estimator):
    """Probes ``[k, n]``, an orthonormal basis of their products, and the products of the basis.

    Args:
        probing: Draws probes and multiplies them.
    """

    def __init__(self, probing: ProbeSampler) -> None:
        self.probing = probing
        self.basis: Basis = Basis(probing.zeros(0, probing.n))
        self.probes: Tensor = probing.zeros(0, probing.n)
        self.products_of_basis: Tensor = probing.zeros(0, probing.n)

    @property
    def is_complete(self) -> bool:
        """Whether the basis spans the whole space, so that nothing is left to estimate."""
        return len(self.basis.rows) == self.probing.n

    def exact(self, value: Tensor, quantity: str) -> Estimate:
        """Return the value from a complete basis, with a bound on its rounding error."""
        # The basis is orthonormal to a few units of rounding.
        bound = 10 * self.probing.rounding(linalg.matrix_norm(self.products_of_basis))
        return Estimate(value, bound.expand_as(value), 0, self.probing.matvecs, self.name, quantity=quantity)

    def extend(self, products: int) -> None:
        """Spend ``products`` more products: half on probes, half on the basis of their products."""
        probing = self.probing
        count = min(products // 2, probing.n - len(self.probes))
        if count:
            probes = probing.draw(count)
            self.add(probes, probing.multiply(probes))

    def add(self, probes: Tensor, products: Tensor) -> None:
        """Add probes [k, n] that were already multiplied. Spend as many products on the basis."""
        new = self.basis.append(products, self.probing.call)
        self.probes = torch.cat([self.probes, probes])
        self.products_of_basis = torch.cat([self.products_of_basis, self.probing.multiply(new)])


LEAST = 0.25  # lower bound for the estimate of k Cov / s^2, which comes from few and noisy pairs
MARGIN = 1.3  # factor on the covariance, whose estimate is unbiased but too low more than half of the time


def inflation(samples: Tensor, covariance: Tensor, most: float) -> Tensor:
    r"""Return the variance of the mean relative to the mean of uncorrelated estimates.

    The estimates :math:`e_i` are unbiased: the i-th probe is tested and all others are fitted. The estimate
    :math:`e_i^{(j)}` does not use the j-th probe. Given all other probes, :math:`e_i^{(j)}` does not
    depend on the j-th, and the means of both over the i-th probe are the true value. Therefore

    .. math:: \mathrm{Cov}(e_i, e_j) = E[(e_i^{(j)} - e_i) (e_j^{(i)} - e_j)]

    exactly. With the sample variance :math:`s^2`, whose mean is the variance minus the covariance,

    .. math:: \mathrm{Var}(\bar e) = E[s^2] / k + \mathrm{Cov} .

    The mean over all pairs estimates the covariance without bias. The factor is :math:`1 + k \, \mathrm{Cov} / s^2`,
    with a margin and within bounds. All elements of a vector share one factor, computed from their sums.

    Args:
        samples: The estimates, [k] or [k, n].
        covariance: Their covariance, summed over the elements. See :func:`covariance_of`.
        most: Upper bound for :math:`k \, \mathrm{Cov} / s^2`.
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
        changes: Change of the i-th estimate if the j-th probe is also left out, [k, k]. The diagonal is not read.
    """
    k = len(changes)
    return (changes * changes.t()).fill_diagonal_(0).sum() / max(1, k * (k - 1))
