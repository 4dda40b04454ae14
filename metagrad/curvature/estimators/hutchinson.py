"""Hutchinson's estimator: the mean of z^T A z."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.curvature.estimators.estimate import Estimate, from_samples
from metagrad.curvature.estimators.probing import Probing


class Hutchinson:
    r"""Estimate the trace by :math:`\frac1m \sum_k z_k^T A z_k`.

    The standard error falls as :math:`\lVert A \rVert_F \sqrt{2 / m}`, whatever the spectrum; nothing is kept but a
    number for each probe. Exact for diagonal matrices with Rademacher probes, and for multiples of the identity with
    those and with the sphere's.
    """

    name = "hutchinson"

    def __init__(self, probing: Probing) -> None:
        self.probing = probing
        empty = torch.empty(0, dtype=probing.operator.dtype, device=probing.operator.device)
        self.samples, self.squares = empty, empty

    def extend(self, products: int) -> None:
        """Spend so many more products."""
        found = self.probing.reduced(products, _forms)
        self.samples = torch.cat([self.samples, found[:, 0]])
        self.squares = torch.cat([self.squares, found[:, 1].detach()])

    def estimate(self) -> Estimate:
        """Estimate from all the samples so far."""
        floor = self.probing.rounding(self.squares.mean().sqrt())
        return from_samples(
            self.samples, floor, matvecs=self.probing.matvecs, method=self.name, quantity="trace"
        )


def _forms(probes: Tensor, products: Tensor) -> Tensor:
    """z^T A z, and ||A z||^2, whose mean is the square of the Frobenius norm."""
    return torch.stack([(probes * products).sum(1), products.square().sum(1)], 1)


class Exact:
    """Sum the diagonal, from a product with each row of the identity."""

    name = "exact"

    def __init__(self, probing: Probing) -> None:
        self.probing = probing
        empty = torch.empty(0, dtype=probing.operator.dtype, device=probing.operator.device)
        self.diagonal, self.squares = empty, empty

    def extend(self, products: int) -> None:
        """Make all the products, n whatever is asked."""
        probing = self.probing
        for start in range(0, probing.n, probing.rows):
            rows = range(start, min(start + probing.rows, probing.n))
            units = torch.zeros(len(rows), probing.n, dtype=self.diagonal.dtype, device=self.diagonal.device)
            units.diagonal(start).fill_(1)
            found = probing.products(units)
            self.diagonal = torch.cat([self.diagonal, found.diagonal(start)])
            self.squares = torch.cat([self.squares, found.detach().square().sum(1)])

    def estimate(self) -> Estimate:
        """Return the trace, with a bound on its rounding error."""
        bound = self.probing.rounding(self.squares.sum().sqrt())
        return Estimate(self.diagonal.sum(), bound, 0, self.probing.matvecs, self.name, quantity="trace")
