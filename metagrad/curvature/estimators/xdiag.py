"""XDiag: every probe makes the subspace of all others, and tests the diagonal of what that leaves."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.curvature.estimators.basis import left_out
from metagrad.curvature.estimators.estimate import Estimate, from_samples
from metagrad.curvature.estimators.leave_one_out import inflation
from metagrad.curvature.estimators.probed_basis import ProbedBasis

MOST = 2.0  # bound for k Cov / s^2, as for XTrace


class XDiag(ProbedBasis):
    r"""Estimate the diagonal by the mean over i of :math:`\mathrm{diag}(P_i A) + z_i \odot (I - P_i) A z_i`.

    :math:`P_i` projects on the span of the products of all probes but the i-th. What the i-th product has outside of
    that is a multiple of one direction, so everything comes from one basis.

    References:
        Epperly, Tropp, Webber, "XTrace: making the most of every sample in stochastic trace estimation", SIAM J.
        Matrix Anal. Appl. 45(1), 2024, section 2.4.
    """

    name = "xdiag"

    def estimate(self) -> Estimate:
        """Estimate from all the products so far."""
        probing, basis = self.probing, self.basis.rows
        on_basis = (basis * self.products_of_basis).sum(0)
        lost = left_out(self.basis.lower)
        alone = (lost * self.basis.lower).sum(1, keepdim=True)  # of each product, outside of the others' span
        directions, products = lost @ basis, lost @ self.products_of_basis
        samples = directions * (self.probes * alone - products)
        with torch.no_grad():
            covariance = self._covariance(lost, alone, directions, products)
        norm = torch.linalg.matrix_norm(self.basis.lower) / len(lost) ** 0.5
        floor = probing.rounding(norm) / probing.n
        return from_samples(
            samples,
            floor.expand(probing.n),
            matvecs=probing.matvecs,
            method=self.name,
            quantity="diagonal",
            shift=on_basis,
            inflation=inflation(samples, covariance, MOST),
        )

    def _covariance(self, lost: Tensor, alone: Tensor, directions: Tensor, products: Tensor) -> Tensor:
        """Estimate the covariance of the leave-one-out estimates, summed over the elements.

        When the j-th probe is left out too, the i-th estimate loses the unit vector v of s_j made orthogonal to s_i,
        and its product has a component along v: only through s_i, being orthogonal to s_j.
        """
        cosines = lost @ lost.t()
        sines = (1 - cosines.square()).clamp_min(torch.finfo(lost.dtype).eps).sqrt()
        total = torch.zeros((), dtype=lost.dtype, device=lost.device)
        for i in range(len(lost)):
            cosine, sine = cosines[i, :, None], sines[i, :, None]
            one = (directions - cosine * directions[i]) * (
                products - cosine * products[i] + cosine * self.probes[i] * alone[i]
            )
            other = (directions[i] - cosine * directions) * (
                products[i] - cosine * products + cosine * self.probes * alone
            )
            pairs = (one * other).sum(1) / sine.squeeze(1) ** 4
            total = total + pairs.sum() - pairs[i]
        return total / max(1, len(lost) * (len(lost) - 1))
