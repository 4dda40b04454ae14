"""Hutchinson's estimator, the exact trace, and Hutch++, which takes a subspace exactly and estimates the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.core.tree import widened
from metagrad.curvature.estimators.basis import Basis
from metagrad.curvature.estimators.estimate import Estimate, from_samples
from metagrad.curvature.estimators.probing import Estimator, Probing
from metagrad.curvature.rows import inner


class Hutchinson(Estimator):
    r"""Estimate the trace by :math:`\frac1m \sum_k z_k^T A z_k`.

    The standard error falls as :math:`\lVert A \rVert_F \sqrt{2 / m}`, whatever the spectrum; nothing is kept but a
    number for each probe. Exact for diagonal matrices with Rademacher probes, and for multiples of the identity with
    those and with the sphere's.
    """

    name = "hutchinson"
    has_subspace = False

    def __init__(self, probing: Probing) -> None:
        self.probing = probing
        self.samples: Tensor = probing.zeros(0)
        self.squares: Tensor = probing.zeros(0)

    def extend(self, products: int) -> None:
        """Spend so many more products."""
        self._append(self.probing.reduced(products, _forms))

    def add(self, probes: Tensor, products: Tensor) -> None:
        """Take probes that were multiplied already, [k, n]."""
        self._append(_forms(probes, widened(products)))

    def _append(self, found: Tensor) -> None:
        self.samples = torch.cat([self.samples, found[:, 0]])
        self.squares = torch.cat([self.squares, found[:, 1]])

    def estimate(self) -> Estimate:
        """Estimate from all the samples so far."""
        floor = self.probing.rounding(self.squares.mean().sqrt())
        return from_samples(
            self.samples, floor, matvecs=self.probing.matvecs, method=self.name, quantity="trace"
        )


def _forms(probes: Tensor, products: Tensor) -> Tensor:
    """z^T A z, and ||A z||^2, whose mean is the square of the Frobenius norm."""
    return torch.stack([(probes * products).sum(1), products.square().sum(1)], 1)


class Exact(Estimator):
    """Sum the diagonal, from a product with each row of the identity."""

    name = "exact"
    has_subspace = False

    def __init__(self, probing: Probing) -> None:
        self.probing = probing
        self.diagonal: Tensor = probing.zeros(0)
        self.squares: Tensor = probing.zeros(0)

    def extend(self, products: int) -> None:
        """Make all n products, whatever ``products`` is."""
        probing = self.probing
        for start in range(0, probing.n, probing.rows):
            units = probing.zeros(min(probing.rows, probing.n - start), probing.n)
            units.diagonal(start).fill_(1)
            found = widened(probing.products(units))
            self.diagonal = torch.cat([self.diagonal, found.diagonal(start)])
            self.squares = torch.cat([self.squares, found.detach().square().sum(1)])

    def estimate(self) -> Estimate:
        """Return the trace, with a bound on its rounding error."""
        bound = self.probing.rounding(self.squares.sum().sqrt())
        return Estimate(self.diagonal.sum(), bound, 0, self.probing.matvecs, self.name, quantity="trace")


class HutchPlusPlus(Estimator):
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
    least = 3

    def __init__(self, probing: Probing) -> None:
        self.probing = probing
        self.basis: Basis = Basis(probing.zeros(0, probing.n))
        self.products_of_basis: Tensor = probing.zeros(0, probing.n)
        self.probes: Tensor = probing.zeros(0, probing.n)
        self.products: Tensor = probing.zeros(0, probing.n)

    def extend(self, products: int) -> None:
        """Spend so many more products, a third on each part."""
        probing, basis = self.probing, self.basis
        grown = min(products // 3, probing.n - len(basis.rows))
        if grown:
            new = basis.append(probing.products(probing.draw(grown)), probing.call)
            products_of_new = probing.products(new)
            self.products_of_basis = torch.cat([self.products_of_basis, products_of_new])
            inside = inner(self.probes, new)
            self.probes = self.probes - inside @ new
            self.products = self.products - inside @ products_of_new
        probes = probing.draw(products - 2 * grown)
        for _ in range(2):  # once leaves rounding errors of the size of the probe, not of its rest
            probes = probes - inner(probes, basis.rows) @ basis.rows
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
