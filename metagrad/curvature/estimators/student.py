"""Quantiles of Student's t distribution, in plain floating point."""

from __future__ import annotations

import math
from statistics import NormalDist

_SERIES_UP_TO = 200  # degrees of freedom; beyond, the expansion is as good as float64 is

# Coefficients of Student's quantile in powers of 1 / nu, as polynomials in the normal quantile x: (divisor,
# coefficients of x, x^3, x^5, ...). Abramowitz and Stegun, 26.7.5.
_EXPANSION = (
    (4, (1, 1)),
    (96, (3, 16, 5)),
    (384, (-15, 17, 19, 3)),
    (92160, (-945, -1920, 1482, 776, 79)),
)


def student_t(level: float, degrees: int) -> float:
    r"""Return the half-width that holds a share ``level`` of Student's t distribution.

    .. math:: P(|T| \le t) = \mathrm{level}

    Up to 200 degrees of freedom, the finite trigonometric series of the distribution is inverted by bisection;
    beyond, the normal quantile is corrected by an expansion in inverse degrees of freedom. The relative error is
    below 1e-9 for levels up to 0.9999.

    Args:
        level: The share, between 0 and 1.
        degrees: Degrees of freedom. With none, the half-width is infinite.

    Raises:
        ValueError: ``level`` is not between 0 and 1.

    Example:
        With one degree of freedom, Cauchy's distribution, :math:`t = \tan(\pi \, \mathrm{level} / 2)`:

        >>> from metagrad.curvature.estimators.student import student_t
        >>> round(student_t(0.5, 1), 12), round(student_t(0.95, 10), 6)
        (1.0, 2.228139)

    References:
        Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 to 26.7.5.
    """
    if not 0 < level < 1:
        raise ValueError(f"interval(level): level must be between 0 and 1, such as 0.95, got {level}.")
    if degrees < 1:
        return math.inf
    return _bisected(level, degrees) if degrees <= _SERIES_UP_TO else _expanded(level, degrees)


def _bisected(level: float, degrees: int) -> float:
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _share(middle, degrees) > level else (middle, high)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _share(angle: float, degrees: int) -> float:
    """P(|T| <= t) for t = sqrt(degrees) tan(angle)."""
    odd = degrees % 2
    square = math.cos(angle) ** 2
    term = total = math.cos(angle) if odd else 1.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= square * (k - 1) / k
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))


def _expanded(level: float, degrees: int) -> float:
    x = NormalDist().inv_cdf((1 + level) / 2)
    result = x
    for power, (divisor, coefficients) in enumerate(_EXPANSION, 1):
        polynomial = sum(c * x ** (2 * k + 1) for k, c in enumerate(coefficients))
        result += polynomial / divisor / degrees**power
    return result
