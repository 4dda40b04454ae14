"""Norms of a linear map, from products with random probes."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.curvature.estimators.estimate import Estimate, standard_error
from metagrad.curvature.estimators.probes import Distribution
from metagrad.curvature.estimators.probing import Probing
from metagrad.curvature.estimators.sequential import checked_budget, spend
from metagrad.curvature.linear_map import LinearMap


def frobenius_norm(
    operator: LinearMap,
    *,
    probes: int | None = None,
    rtol: float | None = None,
    distribution: Distribution = "rademacher",
    generator: torch.Generator | None = None,
    chunk: str | int | float = "64MiB",
) -> Estimate:
    r"""Estimate the Frobenius norm of a symmetric linear map.

    .. math:: \lVert A \rVert_F^2 = E \lVert A z \rVert^2, \qquad E[z z^T] = I

    The root of the mean over the probes; its standard error is that of the mean by the delta method, and its
    bias, of the order of 1 / probes, is below it.

    Args:
        operator: The map, n x n and symmetric.
        probes: How many products to spend, one for each probe; 64 by default. With ``rtol``, at most so many, 1024 by
            default.
        rtol: Stop when the 95 % interval's half-width is at most ``rtol`` times the norm, as :func:`trace` does.
        distribution: "rademacher", "normal" or "sphere", see :func:`draw`.
        generator: Draws the probes; the same state gives the same bits.
        chunk: Probes are drawn and multiplied in pieces of so many bytes.

    Returns:
        The norm, differentiable where the products are; except at zero, where a norm has no derivative.

    Raises:
        ValueError: A product has NaN or inf, or an argument is out of range.
        TypeError: An argument has the wrong type.

    Example:
        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.estimators.norms import frobenius_norm
        >>> A = torch.diag(torch.tensor([3.0, 4.0]))
        >>> H = SimpleNamespace(shape=A.shape, dtype=A.dtype, device=A.device, products=lambda v: v @ A)
        >>> frobenius_norm(H, probes=4).value
        tensor(5.)

    References:
        Martinsson, Tropp, "Randomized numerical linear algebra", Acta Numerica 29, 2020, section 4.8.
    """
    call = "frobenius_norm(operator, ...)"
    budget = checked_budget(call, probes, rtol)
    return spend(_SquaredNorms(Probing(call, operator, distribution, generator, chunk)), budget, rtol)


class _SquaredNorms:
    def __init__(self, probing: Probing) -> None:
        self.probing = probing
        self.samples = torch.empty(0, dtype=probing.operator.dtype, device=probing.operator.device)

    def extend(self, products: int) -> None:
        self.samples = torch.cat([self.samples, self.probing.reduced(products, _squared_norm)])

    def estimate(self) -> Estimate:
        probing, square = self.probing, self.samples.mean()
        value = square.sqrt()
        known = value.detach()
        error = standard_error(self.samples.detach(), torch.zeros_like(known))
        if len(self.samples) > 1:
            error = torch.where(known > 0, error / (2 * known), 0.0).hypot(probing.rounding(known))
        return Estimate(
            value, error, len(self.samples), probing.matvecs, "hutchinson", quantity="Frobenius norm"
        )


def _squared_norm(probes: Tensor, products: Tensor) -> Tensor:
    return products.square().sum(1)
