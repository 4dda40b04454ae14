"""The non-adaptive variant of Hutch++: all products are made at once."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.curvature.estimators.basis import Basis
from metagrad.curvature.estimators.estimate import Estimate, from_samples
from metagrad.curvature.estimators.probing import Estimator, Probing
from metagrad.curvature.rows import inner


class NonAdaptiveHutchPlusPlus(Estimator):
    r"""Estimate the trace by :math:`\mathrm{tr} \hat A + \frac1l \sum_k g_k^T (A - \hat A) g_k`.

    .. math:: \hat A = Q^T (R Q^T)^+ R A

    The rows of :math:`Q` span the products of a quarter of the random vectors; half of them, :math:`R`, find the
    coordinates of :math:`A` in that span by least squares; and a quarter are the probes :math:`g_k`. No vector
    depends on a product, so that one pass over the data serves them all, where Hutch++ and XTrace take two or three.
    The error falls as 1 / products as theirs does, and is larger; unlike theirs, it is not zero for the identity.
    The standard error is that of the mean over the probes, for :math:`\hat A` does not depend on them.

    Example:
        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.estimators.trace import trace
        >>> A = torch.ones(50, 50, dtype=torch.float64)  # of rank 1
        >>> H = SimpleNamespace(shape=A.shape, dtype=A.dtype, device=A.device, products=lambda v: v @ A)
        >>> print(f"{float(trace(H, method='na-hutch++', probes=8)):.6f}")
        50.000000

    References:
        Meyer, Musco, Musco, Woodruff, "Hutch++: optimal stochastic trace estimation", SOSA 2021, algorithm 2; here
        with a basis of the span, so that the pseudo-inverse is of a well-conditioned matrix.
    """

    name = "na-hutch++"
    summary = (
        "as Hutch++, with all products at once, in one pass over the data; its error falls likewise and is larger, "
        "and it keeps 7/4 n-vectors for each probe"
    )
    least = 4

    def __init__(self, probing: Probing) -> None:
        self.probing = probing
        self.basis: Basis = Basis(probing.zeros(0, probing.n))
        self.tests: Tensor = probing.zeros(0, probing.n)
        self.products_of_tests: Tensor = probing.zeros(0, probing.n)
        self.probes: Tensor = probing.zeros(0, probing.n)
        self.products: Tensor = probing.zeros(0, probing.n)

    def extend(self, products: int) -> None:
        """Spend so many more products: a quarter on the span, half on coordinates in it, the rest on probes."""
        probing = self.probing
        grown = min(products // 4, probing.n - len(self.basis.rows))
        parts = [grown, 2 * grown, products - 3 * grown]
        vectors = probing.draw(products)
        _, tests, probes = vectors.split_with_sizes(parts)
        spanning, of_tests, of_probes = probing.products(vectors).split_with_sizes(parts)
        if grown:
            self.basis.append(spanning, probing.call)
        self.tests = torch.cat([self.tests, tests])
        self.products_of_tests = torch.cat([self.products_of_tests, of_tests])
        self.probes, self.products = torch.cat([self.probes, probes]), torch.cat([self.products, of_probes])

    def estimate(self) -> Estimate:
        """Estimate from all the products so far."""
        probing, basis = self.probing, self.basis.rows
        coordinates = linalg.pinv(inner(self.tests, basis)) @ self.products_of_tests
        inside = (inner(self.probes, basis) * inner(self.probes, coordinates)).sum(1)
        return from_samples(
            (self.probes * self.products).sum(1) - inside,
            probing.rounding(self.products.square().sum(1).mean().sqrt()),
            matvecs=probing.matvecs,
            method=self.name,
            quantity="trace",
            shift=(basis * coordinates).sum(),
        )
