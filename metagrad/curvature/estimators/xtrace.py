"""XTrace: each probe estimates the trace outside of the subspace of all other probes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.curvature.estimators.estimate import Estimate
from metagrad.curvature.estimators.probes import Estimator, ProbeSampler
from metagrad.curvature.rows import inner, orthonormal


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
            ValueError: The vectors require grad and are linearly dependent up to half of the digits of their dtype.
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
    """Return the direction that the span loses without each vector: unit rows :math:`s_i`, [k, k].

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


class XTrace(Estimator):
    r"""Estimate the trace by the mean over i of :math:`\mathrm{tr}(Q_i A Q_i^T) + g_i^T A g_i`.

    The rows of :math:`Q_i` span the products of all probes except the i-th. The i-th probe is projected off them to
    give :math:`g_i`. Sphere probes are rescaled to the sphere of the complement. All leave-one-out estimates come
    from one basis, by operations on small matrices. The standard error uses leave-two-out estimates, computed in the
    same way.

    References:
        Epperly, Tropp, Webber, "XTrace: making the most of every sample in stochastic trace estimation", SIAM J.
        Matrix Anal. Appl. 45(1), 2024, sections 2 and 3.
    """

    name = "xtrace"
    least = 2
    # Bound for k Cov / s^2, measured up to 1.6. If the spectrum decays fast it is about 0, with a noisy estimate.
    most = 2.0

    def __init__(self, probing: ProbeSampler) -> None:
        self.probing = probing
        self.basis: Basis = Basis(probing.zeros(0, probing.n))
        self.probes: Tensor = probing.zeros(0, probing.n)
        self.products_of_basis: Tensor = probing.zeros(0, probing.n)

    def extend(self, products: int) -> None:
        """Spend ``products`` more products: half on probes, half on the basis of their products."""
        probing = self.probing
        count = min(products // 2, probing.n - len(self.probes))
        if count:
            probes = probing.draw(count)
            self.add(probes, probing.multiply(probes))

    def add(self, probes: Tensor, products: Tensor) -> None:
        """Add probes [k, n] and their products, and spend k more products on the basis."""
        new = self.basis.append(products, self.probing.call)
        self.probes = torch.cat([self.probes, probes])
        self.products_of_basis = torch.cat([self.products_of_basis, self.probing.multiply(new)])

    def estimate(self) -> Estimate:
        """Estimate from all products so far."""
        probing, basis, lower = self.probing, self.basis.rows, self.basis.lower
        on_basis = inner(basis, self.products_of_basis)
        if len(basis) == probing.n:  # the whole space, orthonormal to a few units of rounding
            bound = 10 * probing.rounding(linalg.matrix_norm(self.products_of_basis))
            return Estimate(on_basis.trace(), bound, 0, probing.matvecs, self.name, quantity="trace")
        inside = inner(self.probes, basis)
        lost = left_out(lower)
        one = _LeaveOneOut(
            on_basis,
            outer=inner(self.probes, self.products_of_basis) + lower,
            lost=lost,
            inside=inside - lost * (lost * inside).sum(1, keepdim=True),
            whole=(inside * lower).sum(1),
        )
        scales = None
        if probing.distribution == "sphere":
            squares = self.probes.square().sum(1) - one.inside.square().sum(1)
            scales = (probing.n - len(basis) + 1, squares)
        samples = _scaled(one.rest(), scales) - (lost @ on_basis * lost).sum(1)
        with torch.no_grad():
            inflated = inflation(samples, one.changes(scales), self.most)
        floor = probing.rounding(linalg.matrix_norm(lower) / len(lower) ** 0.5)
        return self.trace_from(samples, floor, shift=on_basis.trace(), inflation=inflated)


Scales = tuple[int, Tensor] | None
"""Dimension of a complement, and the squared norms of the probes in it. None if probes are not rescaled."""


class _LeaveOneOut(NamedTuple):
    """The i-th probe and the basis without it, in coordinates of the whole basis Q.

    Tensors are [k, k] except ``whole``.
    """

    on_basis: Tensor  # H = Q A Q^T
    outer: Tensor  # u_i, sum of the probe's product with A Q^T and the coordinates of its own product
    lost: Tensor  # s_i, the direction that the span loses with the probe
    inside: Tensor  # c_i, the probe projected on the span of the other probes' products
    whole: Tensor  # the probe's own form z^T A z, [k]

    def rest(self) -> Tensor:
        """Return the quadratic form g^T A g of the rest g = z - Q^T c of each probe z, [k]."""
        c = self.inside
        return self.whole - (self.outer * c).sum(1) + (c @ self.on_basis * c).sum(1)

    def changes(self, scales: Scales) -> Tensor:
        """Return the change of the i-th estimate if the j-th probe is also left out, [k, k].

        The span then also loses the unit vector v_ij, which is s_j made orthogonal to s_i.
        """
        H, s, c = self.on_basis, self.lost, self.inside
        cosines = s @ s.t()
        tiny = torch.finfo(H.dtype).eps
        sines = (1 - cosines.square()).clamp_min(tiny).sqrt()

        def along_v(rows: Tensor) -> Tensor:
            return (rows - cosines * rows.diagonal()[:, None]) / sines

        forms = s @ H @ s.t()
        own, crossed = forms.diagonal(), cosines * (forms + forms.t())
        form_of_v = (own[None, :] - crossed + cosines.square() * own[:, None]) / sines.square()
        step = along_v(c @ s.t())
        slope = along_v((self.outer - c @ (H + H.t())) @ s.t())
        rest = self.rest()[:, None]
        changed = rest + step * slope + step.square() * form_of_v
        if scales is not None:
            dimension, squares = scales[0], scales[1][:, None]
            rest = _scaled(rest, (dimension, squares))
            changed = _scaled(changed, (dimension + 1, squares + step.square()))
        return changed - rest - form_of_v


def _scaled(rest: Tensor, scales: Scales) -> Tensor:
    return rest if scales is None else rest * (scales[0] / scales[1])


LEAST = 0.25  # lower bound for the estimate of k Cov / s^2, because few pairs make it noisy
MARGIN = 1.3  # factor on the covariance, whose unbiased estimate is usually too low


def inflation(samples: Tensor, changes: Tensor, most: float) -> Tensor:
    r"""Return the variance of the mean relative to the mean of uncorrelated estimates.

    The estimates :math:`e_i` are unbiased: the i-th probe is tested and all others are fitted. The estimate
    :math:`e_i^{(j)}` does not use the j-th probe. Given all other probes, :math:`e_i^{(j)}` does not
    depend on the j-th, and the means of both over the i-th probe are the true value. Therefore

    .. math:: \mathrm{Cov}(e_i, e_j) = E[(e_i^{(j)} - e_i) (e_j^{(i)} - e_j)]

    exactly. With the sample variance :math:`s^2`, whose mean is the variance minus the covariance,

    .. math:: \mathrm{Var}(\bar e) = E[s^2] / k + \mathrm{Cov} .

    The mean over all pairs estimates the covariance without bias. The factor is :math:`1 + k \, \mathrm{Cov} / s^2`,
    with a margin and within bounds.

    Args:
        samples: The estimates, [k].
        changes: Change of the i-th estimate if the j-th probe is also left out, [k, k]. The diagonal is not read.
        most: Upper bound for :math:`k \, \mathrm{Cov} / s^2`.
    """
    k = samples.shape[0]
    if k < 2:
        return samples.new_ones(())
    covariance = (changes * changes.t()).fill_diagonal_(0).sum() / (k * (k - 1))
    variance = samples.detach().var()
    ratio = torch.where(variance > 0, MARGIN * k * covariance / variance, 0.0)
    return 1 + ratio.clamp(LEAST, most)
