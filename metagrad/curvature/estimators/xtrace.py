"""XTrace and XNysTrace: each probe tests what the subspace of all others leaves."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.curvature.estimators.basis import ProbedBasis, covariance_of, inflation, inverse_rows, left_out
from metagrad.curvature.estimators.estimate import Estimate, from_samples
from metagrad.curvature.estimators.probing import Estimator, Probing
from metagrad.curvature.rows import inner


class XTrace(ProbedBasis):
    r"""Estimate the trace by the mean over i of :math:`\mathrm{tr}(Q_i A Q_i^T) + g_i^T A g_i`.

    The rows of :math:`Q_i` span the products of all probes but the i-th, which is projected off them to give
    :math:`g_i`. Probes on the sphere are brought back to the sphere of the complement. All leave-one-out estimates
    come from one basis, by small matrices alone; so do the leave-two-out ones that the standard error takes.

    References:
        Epperly, Tropp, Webber, "XTrace: making the most of every sample in stochastic trace estimation", SIAM J.
        Matrix Anal. Appl. 45(1), 2024, sections 2 and 3.
    """

    name = "xtrace"
    summary = (
        "each probe tests what the subspace of all others leaves; its error falls as that of Hutch++ and is smaller, "
        "and it keeps 3/2 n-vectors for each probe"
    )
    least = 2
    # Bound for k Cov / s^2: measured up to 1.6. Where the spectrum decays fast it is about 0, with a noisy estimate.
    most = 2.0

    def estimate(self) -> Estimate:
        """Estimate from all the products so far."""
        probing, basis, lower = self.probing, self.basis.rows, self.basis.lower
        on_basis = inner(basis, self.products_of_basis)
        if self.is_complete:
            return self.exact(on_basis.trace(), "trace")
        inside = inner(self.probes, basis)
        lost = left_out(lower)
        one = _LeftOut(
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
            inflated = inflation(samples, covariance_of(one.changes(scales)), self.most)
        return from_samples(
            samples,
            probing.rounding(linalg.matrix_norm(lower) / len(lower) ** 0.5),
            matvecs=probing.matvecs,
            method=self.name,
            quantity="trace",
            shift=on_basis.trace(),
            inflation=inflated,
        )


Scales = tuple[int, Tensor] | None
"""Dimension of a complement, and the squared norms of the probes in it; None where they stay as they are."""


class _LeftOut(NamedTuple):
    """The i-th probe and the basis without it, in coordinates of the whole basis Q; all [k, k] but the last."""

    on_basis: Tensor  # H = Q A Q^T
    outer: Tensor  # u_i: the probe's product with A Q^T, and the coordinates of its own product, added
    lost: Tensor  # s_i: what the span loses with the probe
    inside: Tensor  # c_i: the probe projected on the span of the others
    whole: Tensor  # [k], the probe's own form z^T A z

    def rest(self) -> Tensor:
        """g^T A g for g = z - Q^T c, [k]."""
        c = self.inside
        return self.whole - (self.outer * c).sum(1) + (c @ self.on_basis * c).sum(1)

    def changes(self, scales: Scales) -> Tensor:
        """Return how the i-th estimate changes when the j-th probe is left out too, [k, k].

        The span loses the unit vector v_ij next, which is s_j made orthogonal to s_i.
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


class XNysTrace(Estimator):
    r"""Estimate the trace by the mean over i of :math:`\mathrm{tr} A_i + z_i^T (A - A_i) z_i`.

    :math:`A_i` is Nystrom's approximation from all probes but the i-th, :math:`A Z^T (Z A Z^T)^{-1} Z A`. One product
    for each probe, so it is the most accurate where A is positive semi-definite. Probes on the sphere
    are brought back to the sphere of the complement of the other probes, whose span :math:`A - A_i` annihilates.
    A shift by rounding errors, taken off again, keeps the inverse defined where A is of low rank.

    References:
        Epperly, Tropp, Webber, "XTrace: making the most of every sample in stochastic trace estimation", SIAM J.
        Matrix Anal. Appl. 45(1), 2024, sections 2.3 and 3; the shift: Tropp, Yurtsever, Udell, Cevher, "Fixed-rank
        approximation of a positive-semidefinite matrix from streaming data", NeurIPS 2017, algorithm 3.
    """

    name = "xnystrace"
    summary = (
        "as XTrace, by Nystrom's approximation, which takes half the products; positive semi-definite maps only; its "
        "error falls twice as fast, and it keeps 4 n-vectors for each probe"
    )
    # Bound for k Cov / s^2: measured up to 16, where the spectrum decays fast, with an estimate that is right there.
    most = 50.0

    def __init__(self, probing: Probing) -> None:
        self.probing = probing
        self.probes: Tensor = probing.zeros(0, probing.n)
        self.products: Tensor = probing.zeros(0, probing.n)

    def extend(self, products: int) -> None:
        """Spend so many more products, one on each probe."""
        count = min(products, self.probing.n - len(self.probes))
        if count:
            probes = self.probing.draw(count)
            self.probes = torch.cat([self.probes, probes])
            self.products = torch.cat([self.products, self.probing.products(probes)])

    def estimate(self) -> Estimate:
        """Estimate from all the products so far.

        Raises:
            ValueError: The probes meet a negative eigenvalue, or the products are to be differentiated and are
                numerically dependent.
        """
        probing, gram = self.probing, inner(self.probes, self.probes)
        form, shift = self._shifted(gram)
        products = self.products + shift * self.probes
        rows = inverse_rows(linalg.cholesky(form))
        factor = rows.t() @ products  # the approximation from all probes is factor^T factor
        removed = rows @ factor
        directions = None
        if probing.distribution == "sphere":
            directions = inverse_rows(linalg.cholesky(gram))
            directions = directions @ directions.t()
        left = _NystromLeftOut(rows @ rows.t(), removed @ removed.t(), directions, probing.n)
        samples = left.one()
        with torch.no_grad():
            inflated = inflation(samples, covariance_of(left.two() - samples[:, None]), self.most)
        norm = linalg.matrix_norm(products) / len(gram) ** 0.5
        return from_samples(
            samples,
            probing.rounding(norm),
            matvecs=probing.matvecs,
            method=self.name,
            quantity="trace",
            shift=factor.square().sum() - shift * probing.n,
            inflation=inflated,
        )

    def _shifted(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        """Return the form Z A Z^T, [k, k], shifted so that rounding leaves it positive definite, and the shift."""
        form = inner(self.probes, self.products)
        k, eps = len(form), torch.finfo(form.dtype).eps
        asymmetry = linalg.matrix_norm((form - form.t()).detach())
        form = (form + form.t()) / 2
        lowest, highest = linalg.eigvalsh(form.detach())[[0, -1]]
        noise = 10 * eps * self.probing.n**0.5 * linalg.matrix_norm(self.products.detach())
        if lowest < -(noise + asymmetry):
            raise ValueError(
                f"{self.probing.call}: xnystrace needs a positive semi-definite operator, but its form on {k} probes "
                f'has the eigenvalue {lowest.item():.3g} (largest {highest.item():.3g}). Take method="xtrace".'
            )
        if form.requires_grad and lowest < eps**0.5 * highest:
            raise ValueError(
                f"{self.probing.call}: the products require grad, and {k} of them are numerically dependent, so "
                'that their inverse has no usable derivative. Take method="hutchinson" or fewer probes.'
            )
        smallest = linalg.eigvalsh(gram)[0]
        if smallest <= k * eps * self.probing.n:
            raise ValueError(
                f"{self.probing.call}: the {k} probes are linearly dependent, as random signs in {self.probing.n} "
                'dimensions may be. Take distribution="sphere", or method="exact".'
            )
        least = k**0.5 * eps * torch.where(highest > 0, highest, torch.ones_like(highest))
        shift = (least - lowest.clamp_max(0)) / smallest
        return form + shift * gram, shift


class _NystromLeftOut(NamedTuple):
    """The approximation from all probes, and from all but one or two, by the inverse N of Z A Z^T."""

    inverse: Tensor  # N, [k, k]
    removed: Tensor  # N Z A A Z^T N, [k, k]
    directions: Tensor | None  # the inverse of Z Z^T, [k, k], where probes go back to a sphere
    n: int

    def one(self) -> Tensor:
        """Return tr A_i + z_i^T (A - A_i) z_i, less the trace of the approximation from all, [k]."""
        own = self.inverse.diagonal()
        rest = 1 / own
        if self.directions is not None:
            rest = rest * (self.n - len(own) + 1) * self.directions.diagonal()
        return rest - self.removed.diagonal() / own

    def two(self) -> Tensor:
        """Return the same with the j-th probe left out too, [k, k]; the diagonal has no meaning."""
        N, F = self.inverse, self.removed
        own, lost = N.diagonal(), F.diagonal()
        both = own[:, None] * own[None, :]
        determinant = torch.maximum(both - N.square(), torch.finfo(N.dtype).eps * both)
        rest = own[None, :] / determinant
        if self.directions is not None:
            D, d = self.directions, self.directions.diagonal()
            rest = rest * (self.n - len(own) + 2) * (d[:, None] - D.square() / d[None, :])
        trace = own[None, :] * lost[:, None] + own[:, None] * lost[None, :] - 2 * N * F
        return rest - trace / determinant
