"""The diagonal of a linear map, from products with random probes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metagrad.curvature.estimators.estimate import Estimate
from metagrad.curvature.estimators.probes import Estimator, ProbeSampler, checked_budget, spend
from metagrad.curvature.linear_map import LinearMap


def diagonal(
    operator: LinearMap,
    *,
    probes: int | None = None,
    rtol: float | None = None,
    generator: torch.Generator | None = None,
    chunk: str | int | float = "64MiB",
) -> Estimate:
    r"""Estimate the diagonal of a symmetric linear map.

    .. math:: \mathrm{diag} A = E[z \odot A z], \qquad z \in \{-1, 1\}^n

    The error of an element is the norm of the off-diagonal part of its row, divided by sqrt(probes). Diagonal maps
    are exact. Memory: four n-vectors and a chunk.

    Args:
        operator: The map, n x n and symmetric.
        probes: Number of probes and of products with the operator, 64 by default. With ``rtol`` it is a maximum, 1024
            by default.
        rtol: Stop if the vector of 95 % half-widths is at most ``rtol`` times the diagonal, by Euclidean norms.
            Products come in batches, as in :func:`trace`.
        generator: Draws the probes. The same state gives bitwise identical results.
        chunk: Probes are drawn and multiplied in pieces of this many bytes.

    Returns:
        The diagonal, shape [n], with a standard error for each element. Differentiable if the products are. Its
        intervals hold for each element, not for all elements at once.

    Raises:
        ValueError: A product has NaN or Inf, or an argument is out of range.
        TypeError: An argument has the wrong type.

    Example:
        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.estimators.diagonal import diagonal
        >>> A = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
        >>> H = SimpleNamespace(shape=A.shape, dtype=A.dtype, device=A.device, multiply=lambda v: v @ A)
        >>> diagonal(H, probes=4).value
        tensor([1., 2., 3.])

    References:
        Bekas, Kokiopoulou, Saad, "An estimator for the diagonal of a matrix", Appl. Numer. Math. 57, 2007.
    """
    call = "diagonal(operator, ...)"
    budget = checked_budget(call, probes, rtol)
    return spend(_Signs(ProbeSampler(call, operator, "rademacher", generator, chunk)), budget, rtol)


class _Signs(Estimator):
    """The mean of z * Az over probes of signs, and its standard error, in one pass over the probes.

    The summed squares are squares of z * Az - d0, where d0 is the mean over the first piece. Therefore the
    standard error of an element without variance has no cancellation error.
    """

    name = "hutchinson"

    def __init__(self, probing: ProbeSampler) -> None:
        self.probing = probing
        # Sums of z * Az, of its change from d0, and of the squares of the change.
        self.total = self.first = self.second = probing.zeros(probing.n)
        self.origin: Tensor | None = None  # d0
        self.squares = probing.zeros()  # sum of the squares of the elements of Az

    def extend(self, products: int) -> None:
        for probes, found in self.probing.pieces(products):
            terms = probes * found
            self.total = self.total + terms.sum(0)
            with torch.no_grad():
                if self.origin is None:
                    self.origin = terms.detach().mean(0)
                rest = terms.detach() - self.origin
                self.first = self.first + rest.sum(0)
                self.second = self.second + rest.square().sum(0)
                self.squares = self.squares + found.detach().square().sum()

    def estimate(self) -> Estimate:
        count, error = self.probing.matvecs, torch.full_like(self.second, math.inf)
        if count > 1:
            spread = (self.second - self.first.square() / count).clamp_min(0) / (count - 1)
            norm = (self.squares / count).sqrt()
            error = (spread / count).sqrt().hypot(self.probing.rounding(norm) / self.probing.n)
        return Estimate(self.total / count, error, count, count, self.name, quantity="diagonal")
