"""A random estimate with its standard error."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@functools.lru_cache
def student_t(level: float, degrees: int) -> float:
    r"""Return the half-width of the central interval of Student's t distribution with probability ``level``.

    .. math:: P(|T| \le \sqrt{\nu} \tan \varphi) \propto \int_0^\varphi \cos^{\nu - 1} x \, dx = \mathrm{level}

    The integral is a Gauss rule, inverted by bisection. The relative error is below 1e-8 for levels up to 0.9999.

    Args:
        level: The probability, between 0 and 1.
        degrees: Degrees of freedom :math:`\nu`. The half-width is infinite if there are none.

    Raises:
        ValueError: ``level`` is not between 0 and 1.

    Example:
        With one degree of freedom, Cauchy's distribution, :math:`t = \tan(\pi \, \mathrm{level} / 2)`:

        >>> from metagrad.curvature.estimators.estimate import student_t
        >>> round(student_t(0.5, 1), 12), round(student_t(0.95, 10), 6)
        (1.0, 2.228139)

    References:
        Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.1.
    """
    if not 0 < level < 1:
        raise ValueError(f"interval(level): level must be between 0 and 1, such as 0.95, got {level}.")
    if degrees < 1:
        return math.inf
    nodes, weights = np.polynomial.legendre.leggauss(64)

    def integral(angle: float) -> float:
        return angle * float(weights @ np.cos(angle / 2 * (1 + nodes)) ** (degrees - 1))

    low, high = 0.0, min(math.pi / 2, 10 / math.sqrt(degrees))  # ten standard deviations are all
    goal = level * integral(high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if integral(middle) > goal else (middle, high)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


@dataclass(frozen=True, eq=False, repr=False)
class Estimate:
    r"""An estimate with its standard error.

    .. math:: \mathrm{value} \pm t_{\mathrm{level}, \, \mathrm{samples} - 1} \cdot \mathrm{stderr}

    The interval uses Student's t distribution. The interval reaches its level if there are many samples, or if they
    are approximately normal. With ten samples of a skewed quantity (few large eigenvalues), coverage is up to ten
    percent lower.

    Attributes:
        value: The estimate, a tensor of any shape. Differentiable if the products are.
        stderr: Standard error of the estimate, in the same shape, at least the size of rounding errors. It is a
            constant for derivatives, and infinite after a single sample.
        samples: Number of samples behind the standard error. If it is zero, the value is not random. ``stderr`` is
            then a bound on the error, and the interval is the same at every level.
        matvecs: Number of products with the operator.
        method: Name of the method. For ``"auto"``, the method that it chose.
        converged: False if ``rtol`` was given and not reached.
        quantity: Name of the quantity, for the ``repr``.

    Example:
        >>> from metagrad.curvature.estimators.estimate import Estimate
        >>> trace = Estimate(torch.tensor(12.34), torch.tensor(0.41), 64, 64, "hutchinson", quantity="trace")
        >>> trace
        trace = 12.34 +- 0.41 (hutchinson, 64 products)
        >>> low, high = trace.interval(0.95)
        >>> print(f"{low:.2f} to {high:.2f}")
        11.52 to 13.16
    """

    value: Tensor
    stderr: Tensor
    samples: int
    matvecs: int
    method: str
    converged: bool = True
    quantity: str = "estimate"

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the bounds of the interval that contains the true value with probability ``level``.

        Args:
            level: Between 0 and 1. Each element of a value has its own interval of this level.

        Returns:
            The lower and the upper end, each in the shape of ``value``.

        Raises:
            ValueError: ``level`` is not between 0 and 1.

        Example:
            >>> from metagrad.curvature.estimators.estimate import Estimate
            >>> Estimate(torch.tensor(3.0), torch.tensor(2.0), 2, 2, "hutchinson").interval(0.5)
            (tensor(1.), tensor(5.))
        """
        quantile = student_t(level, self.samples - 1)
        width = self.stderr * (quantile if self.samples else 1.0)
        return self.value - width, self.value + width

    def __float__(self) -> float:
        return float(self.value.item())

    def __repr__(self) -> str:
        status = "" if self.converged else ", not converged"
        return f"{self.quantity} = {self._numbers()} ({self.method}, {self.matvecs} products{status})"

    def _numbers(self) -> str:
        value, stderr = self.value.detach(), self.stderr
        if value.numel() == 1:
            return _with_error(value.item(), stderr.item())
        if not value.numel():
            return f"empty, of shape {tuple(value.shape)}"
        ends = f"from {value.min().item():.3g} to {value.max().item():.3g}"
        return f"{ends}, +- at most {stderr.max().item():.2g}, of shape {tuple(value.shape)}"


def from_samples(
    samples: Tensor,
    floor: Tensor,
    *,
    matvecs: int,
    method: str,
    quantity: str,
    shift: Tensor | None = None,
    inflation: Tensor | None = None,
) -> Estimate:
    """Estimate a mean from samples along the first dimension.

    Args:
        samples: [num_samples, ...].
        floor: Size of rounding errors, in the shape of the value.
        matvecs: Number of products.
        method: Name of the method.
        quantity: Name of the quantity.
        shift: The part that is known without sampling, added to the mean.
        inflation: Variance of the mean, divided by the variance that independent samples would have.
    """
    mean = samples.mean(0)
    value = mean if shift is None else shift + mean
    stderr = standard_error(samples.detach(), floor.detach(), inflation)
    return Estimate(value, stderr, samples.shape[0], matvecs, method, quantity=quantity)


def standard_error(samples: Tensor, floor: Tensor, inflation: Tensor | None = None) -> Tensor:
    """Return the standard error of the mean over the first dimension, including rounding errors."""
    count = samples.shape[0]
    if count < 2:
        return torch.full_like(floor, math.inf)
    spread = samples.std(0) / math.sqrt(count)
    return torch.hypot(spread if inflation is None else spread * inflation.sqrt(), floor)


def _with_error(value: float, stderr: float) -> str:
    """Format a value to the decimal place of the second significant digit of its error."""
    if not (math.isfinite(value) and math.isfinite(stderr) and value and stderr):
        return f"{value:.6g} +- {stderr:.2g}"
    decimals = 1 - math.floor(math.log10(stderr))
    if not 0 <= decimals <= 6 or abs(value) >= 1e6:
        digits = min(16, max(0, decimals + math.floor(math.log10(abs(value)))))
        return f"{value:.{digits}e} +- {stderr:.2g}"
    return f"{value:.{decimals}f} +- {stderr:.{decimals}f}"
