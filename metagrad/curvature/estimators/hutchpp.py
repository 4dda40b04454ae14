"""Hutch++: the trace on a random subspace, and Hutchinson's estimate of the rest."""

from __future__ import annotations

import torch

from metagrad.curvature.estimators.basis import Basis
from metagrad.curvature.estimators.estimate import Estimate, from_samples
from metagrad.curvature.estimators.probing import Probing


class HutchPlusPlus:
    r"""Estimate the trace by :math:`\mathrm{tr}(Q A Q^T) + \frac1l \sum_k g_k^T A g_k`.

    The rows of :math:`Q` span the products of the first third of the budget; a third goes into :math:`Q A`; and the
    probes :math:`g_k` of the last are projected off :math:`Q`. The error falls as 1 / products, and faster
    where the spectrum decays. Probes on the sphere are brought back to the sphere of the complement. When
    the subspace grows, the probes drawn so far are projected again, at no products.

    References:
        Meyer, Musco, Musco, Woodruff, "Hutch++: optimal stochastic trace estimation", SOSA 2021; for the growth,
        Persson, Cortinovis, Kressner, "Improved variants of the Hutch++ algorithm", SIAM J. Matrix Anal. Appl. 43(3),
        2022, section 3.
    """

    name = "hutch++"

    def __init__(self, probing: Probing) -> None:
        self.probing = probing
        dtype, device = probing.operator.dtype, probing.operator.device
        self.basis = Basis(probing.n, dtype, device)
        nothing = torch.empty(0, probing.n, dtype=dtype, device=device)
        self.products_of_basis, self.probes, self.products = nothing, nothing, nothing

    def extend(self, products: int) -> None:
        """Spend so many more products, a third on each part."""
        probing, basis = self.probing, self.basis
        grown = min(products // 3, probing.n - len(basis.rows))
        if grown:
            new = basis.append(probing.products(probing.draw(grown)), probing.call)
            products_of_new = probing.products(new)
            self.products_of_basis = torch.cat([self.products_of_basis, products_of_new])
            inside = self.probes @ new.t()
            self.probes = self.probes - inside @ new
            self.products = self.products - inside @ products_of_new
        probes = probing.draw(products - 2 * grown)
        for _ in range(2):  # once leaves rounding errors of the size of the probe, not of its rest
            probes = probes - (probes @ basis.rows.t()) @ basis.rows
        self.probes = torch.cat([self.probes, probes])
        self.products = torch.cat([self.products, probing.products(probes)])

    def estimate(self) -> Estimate:
        """Estimate from all the products so far; the standard error is that of the rest."""
        probing = self.probing
        on_basis = (self.basis.rows * self.products_of_basis).sum()
        rest = (self.probes * self.products).sum(1)
        outside = probing.n - len(self.basis.rows)
        if probing.distribution == "sphere" and outside:
            rest = rest * (outside / self.probes.square().sum(1))
        norm = (self.products_of_basis.square().sum() + self.products.square().sum(1).mean()).sqrt()
        return from_samples(
            rest,
            probing.rounding(norm),
            matvecs=probing.matvecs,
            method=self.name,
            quantity="trace",
            shift=on_basis,
        )
