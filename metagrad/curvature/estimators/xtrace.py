"""XTrace: each probe tests the rest outside the subspace of all other probes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.curvature.estimators.basis import ProbedBasis, covariance_of, inflation, left_out
from metagrad.curvature.estimators.estimate import Estimate, from_samples
from metagrad.curvature.rows import inner


class XTrace(ProbedBasis):
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

    def estimate(self) -> Estimate:
        """Estimate from all products so far."""
        probing, basis, lower = self.probing, self.basis.rows, self.basis.lower
        on_basis = inner(basis, self.products_of_basis)
        if self.is_complete:
            return self.exact(on_basis.trace(), "trace")
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
        """Return g^T A g for g = z - Q^T c, [k]."""
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
