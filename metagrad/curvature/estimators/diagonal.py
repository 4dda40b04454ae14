"""The diagonal of a linear map, from products with random probes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metagrad.curvature.estimators.estimate import Estimate
from metagrad.curvature.estimators.probes import Distribution
from metagrad.curvature.estimators.probing import Estimator, ProbeSampler, checked_budget, spend
from metagrad.curvature.linear_map import LinearMap


def diagonal(
    operator: LinearMap,
    *,
    probes: int | None = None,
    rtol: float | None = None,
    distribution: Distribution = "rademacher",
    generator: torch.Generator | None = None,
    chunk: str | int | float = "64MiB",
) -> Estimate:
    r"""Estimate the diagonal of a symmetric linear map.

    .. math:: \mathrm{diag} A = \Big(\sum_k z_k \odot A z_k\Big) \Big/ \Big(\sum_k z_k \odot z_k\Big)

    The error of an element is the norm of its off-diagonal row over sqrt(probes). Diagonal maps are exact. Stored are
    six n-vectors and a chunk.

    Args:
        operator: The map, n x n and symmetric.
        probes: Number of probes and of products with the operator, 64 by default. With ``rtol`` it is a maximum, 1024
            by default.
        rtol: Stop if the vector of 95 % half-widths is at most ``rtol`` times the diagonal, by Euclidean norms.
            Products come in batches, as in :func:`trace`.
        distribution: "rademacher", "normal" or "sphere", see :func:`sample_probes`. Signs have the least variance.
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
    return spend(_Ratio(ProbeSampler(call, operator, distribution, generator, chunk)), budget, rtol)


class _Ratio(Estimator):
    """The ratio of sums, and the variance of a ratio, in one pass over the probes.

    The summed squares are squares of x - d0 z^2, where x = z * Az and d0 is the ratio over the first piece. This way
    the standard error of an element without variance has no cancellation error.
    """

    name = "hutchinson"

    def __init__(self, probing: ProbeSampler) -> None:
        self.probing = probing
        zero = probing.zeros(probing.n)
        self.numerator, self.weights = zero, zero  # sums of x and of z^2
        self.origin: Tensor | None = None  # d0
        # sums of y, y^2, y z^2 and z^4, with y = x - d0 z^2
        self.first, self.second, self.crossed, self.fourth = zero, zero, zero, zero
        self.squares = probing.zeros()  # sum of the squares of the elements of Az

    def extend(self, products: int) -> None:
        for probes, found in self.probing.pieces(products):
            terms, weights = probes * found, probes.square()
            self.numerator = self.numerator + terms.sum(0)
            self.weights = self.weights + weights.sum(0)
            with torch.no_grad():
                if self.origin is None:
                    self.origin = self.numerator.detach() / self.weights
                rest = terms.detach() - self.origin * weights
                self.first = self.first + rest.sum(0)
                self.second = self.second + rest.square().sum(0)
                self.crossed = self.crossed + (rest * weights).sum(0)
                self.fourth = self.fourth + weights.square().sum(0)
                self.squares = self.squares + found.detach().square().sum()

    def estimate(self) -> Estimate:
        count = self.probing.matvecs
        value = self.numerator / self.weights
        return Estimate(value, self._error(count), count, count, self.name, quantity="diagonal")

    def _error(self, count: int) -> Tensor:
        if count < 2:
            return torch.full_like(self.weights, math.inf)
        change = self.first / self.weights
        squares = self.second - 2 * change * self.crossed + change.square() * self.fourth
        spread = (squares.clamp_min(0) * (count / (count - 1))).sqrt() / self.weights
        norm = (self.squares / count).sqrt()
        return spread.hypot(self.probing.rounding(norm) / self.probing.n)
