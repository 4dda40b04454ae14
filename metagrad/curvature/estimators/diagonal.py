"""The diagonal of a linear map, from products with random probes."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.checks import check_choice
from metagrad.curvature.estimators.basis import ProbedBasis, inflation, left_out
from metagrad.curvature.estimators.estimate import Estimate, from_samples
from metagrad.curvature.estimators.probes import Distribution
from metagrad.curvature.estimators.probing import Estimator, ProbeSampler, checked_budget, spend
from metagrad.curvature.linear_map import LinearMap, refuse_half


class XDiag(ProbedBasis):
    r"""Estimate the diagonal by the mean over i of :math:`\mathrm{diag}(P_i A) + z_i \odot (I - P_i) A z_i`.

    :math:`P_i` projects on the span of the products of all probes except the i-th. Outside of that span, the i-th
    product is a multiple of one direction, so everything comes from one basis.

    References:
        Epperly, Tropp, Webber, "XTrace: making the most of every sample in stochastic trace estimation", SIAM J.
        Matrix Anal. Appl. 45(1), 2024, section 2.4.
    """

    name = "xdiag"
    most = 2.0  # bound for k Cov / s^2, as for XTrace

    def estimate(self) -> Estimate:
        """Estimate from all products so far."""
        probing, basis = self.probing, self.basis.rows
        on_basis = (basis * self.products_of_basis).sum(0)
        if self.is_complete:
            return self.exact(on_basis, "diagonal")
        lost = left_out(self.basis.lower)
        alone = (lost * self.basis.lower).sum(
            1, keepdim=True
        )  # part of each product outside the span of all other products
        directions, products = lost @ basis, lost @ self.products_of_basis
        samples = directions * (self.probes * alone - products)
        with torch.no_grad():
            covariance = self._covariance(lost, alone, directions, products)
        norm = linalg.matrix_norm(self.basis.lower) / len(lost) ** 0.5
        floor = probing.rounding(norm) / probing.n
        return from_samples(
            samples,
            floor.expand(probing.n),
            matvecs=probing.matvecs,
            method=self.name,
            quantity="diagonal",
            shift=on_basis,
            inflation=inflation(samples, covariance, self.most),
        )

    def _covariance(self, lost: Tensor, alone: Tensor, directions: Tensor, products: Tensor) -> Tensor:
        """Estimate the covariance of the leave-one-out estimates, summed over the elements.

        If the j-th probe is also left out, the i-th estimate loses the unit vector v: s_j made orthogonal to s_i. The
        i-th product has a component along v only through s_i, because it is orthogonal to s_j.
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


Method = Literal["hutchinson", "xdiag"]


def diagonal(
    operator: LinearMap,
    *,
    method: Method = "hutchinson",
    probes: int | None = None,
    rtol: float | None = None,
    distribution: Distribution = "rademacher",
    generator: torch.Generator | None = None,
    chunk: str | int | float = "64MiB",
) -> Estimate:
    r"""Estimate the diagonal of a symmetric linear map.

    .. math:: \mathrm{diag} A = \Big(\sum_k z_k \odot A z_k\Big) \Big/ \Big(\sum_k z_k \odot z_k\Big)

    ============ ================================================================================ =================
    method       estimate                                                                         stored n-vectors
    ============ ================================================================================ =================
    "hutchinson" the equation. The error of an element is the norm of its off-diagonal row over   a chunk, and six
                 sqrt(probes). Exact for diagonal maps.
    "xdiag"      the products of the probes span a subspace, treated exactly. Each probe is       3 times probes
                 left out of the subspace once, and estimates the part that the other probes miss.
                 Better if the spectrum decays, no better if it is flat.
    ============ ================================================================================ =================

    Args:
        operator: The map, n x n and symmetric.
        method: A row of the table.
        probes: Number of products with the operator, 64 by default: one for each of Hutchinson's probes, two for each
            of XDiag's. With ``rtol`` it is a maximum, 1024 by default.
        rtol: Stop if the vector of 95 % half-widths is at most ``rtol`` times the diagonal, by Euclidean norms.
            Products come in batches, as in :func:`trace`.
        distribution: "rademacher", "normal" or "sphere", see :func:`sample_probes`. Signs have the least variance.
        generator: Draws the probes. The same state gives bitwise identical results.
        chunk: Hutchinson's probes are drawn and multiplied in pieces of this many bytes.

    Returns:
        The diagonal, shape [n], with a standard error for each element. Differentiable if the products are. Its
        intervals hold for each element, not for all elements at once.

    Raises:
        ValueError: A product has NaN or Inf, or an argument is out of range. Also if products that require grad are
            linearly dependent, so that no derivative exists (low rank with "xdiag").
        TypeError: An argument has the wrong type.

    Example:
        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.estimators.diagonal import diagonal
        >>> A = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
        >>> H = SimpleNamespace(shape=A.shape, dtype=A.dtype, device=A.device, multiply=lambda v: v @ A)
        >>> diagonal(H, probes=4).value
        tensor([1., 2., 3.])

    References:
        Bekas, Kokiopoulou, Saad, "An estimator for the diagonal of a matrix", Appl. Numer. Math. 57, 2007; Epperly,
        Tropp, Webber, "XTrace", SIAM J. Matrix Anal. Appl. 45(1), 2024, section 2.4.
    """
    call = "diagonal(operator, ...)"
    check_choice(f"{call}: method", method, Method)
    least = 2 if method == "xdiag" else 1
    budget = checked_budget(f'{call[:-1]}, method="{method}")', probes, rtol, least)
    probing = ProbeSampler(call, operator, distribution, generator, chunk)
    if method == "xdiag":
        refuse_half(f'{call[:-1]}, method="xdiag")', operator.dtype, other="hutchinson")
    return spend((XDiag if method == "xdiag" else _Ratio)(probing), budget, rtol, least)


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
