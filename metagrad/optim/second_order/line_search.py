"""A line search for the strong Wolfe conditions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

_DECREASE, _CURVATURE = 1e-4, 0.9
_CLOSEST, _FARTHEST = 0.01, 10.0
"""Bounds of an extrapolation: this part of the last interval beyond its end, and this multiple of its end."""
_MARGIN = 0.1
"""An interpolation that repeatedly comes this close to an end of its interval, as a part of it, is moved away."""


class Point(NamedTuple):
    """A length with the value and the slope there."""

    length: float
    value: float
    slope: float

    @property
    def is_finite(self) -> bool:
        """Whether value and slope are numbers."""
        return math.isfinite(self.value) and math.isfinite(self.slope)


def strong_wolfe(
    along: Callable[[float], Point],
    start: Point,
    *,
    slack: float = 0.0,
    shortest: float = 0.0,
    max_eval: int = 25,
) -> Point:
    r"""Find a length that satisfies the strong Wolfe conditions.

    .. math:: \phi(\alpha) \le \phi(0) + c_1 \alpha \phi'(0), \qquad |\phi'(\alpha)| \le c_2 |\phi'(0)|, \qquad
              c_1 = 10^{-4}, \; c_2 = 0.9

    From 1, the length is extrapolated until an interval has points that satisfy them. The interval is then narrowed.
    Both use the minimum of the cubic with the values and slopes at two lengths. A value that is not finite bounds an
    interval.

    Args:
        along: A length to the point there.
        start: The point at 0, whose slope is negative.
        slack: How much of a value may be rounding.
        shortest: A shorter interval ends the search.
        max_eval: How often ``along`` is called at most.

    Returns:
        The point. If the conditions were not met, the point with the least value found, or ``start``.

    Example:
        >>> from metagrad.optim.second_order.line_search import Point, strong_wolfe
        >>> strong_wolfe(lambda a: Point(a, (a - 3) ** 2, 2 * (a - 3)), Point(0.0, 9.0, -6.0))
        Point(length=1.0, value=4.0, slope=-4.0)

    References:
        Nocedal, Wright, "Numerical optimization", 2006, algorithms 3.5 and 3.6, and equation 3.59.
    """

    def is_too_high(point: Point) -> bool:
        most = start.value + _DECREASE * point.length * start.slope + slack
        return not (point.is_finite and point.value <= most)

    def is_flat(point: Point) -> bool:
        return abs(point.slope) <= -_CURVATURE * start.slope

    before, length, low, high = start, 1.0, start, None
    for count in range(1, max_eval + 1):
        point = along(length)
        if high is None:  # extrapolate until there is an interval: algorithm 3.5
            if is_too_high(point) or (count > 1 and point.value >= before.value):
                low, high, was_near = before, point, False
            elif is_flat(point):
                return point
            elif point.slope >= 0:
                low, high, was_near = point, before, False
            else:
                nearest = point.length + _CLOSEST * (point.length - before.length)
                length = _cubic_minimum(before, point, nearest, _FARTHEST * point.length)
                low = before = point
                continue
        elif is_too_high(point) or point.value >= low.value:  # narrow it: algorithm 3.6
            high = point
        elif is_flat(point):
            return point
        else:
            high = low if point.slope * (high.length - low.length) >= 0 else high
            low = point
        least, most = sorted((low.length, high.length))
        if not most - least > shortest:
            break
        length, was_near = _kept_apart(_cubic_minimum(low, high, least, most), least, most, was_near)
    return low


def _cubic_minimum(a: Point, b: Point, least: float, most: float) -> float:
    """Return where the cubic through two points is least, between two bounds; their middle if it has no minimum."""
    if a.length > b.length:
        a, b = b, a
    width, middle = b.length - a.length, (least + most) / 2
    first = a.slope + b.slope - 3 * (b.value - a.value) / width
    squared = first * first - a.slope * b.slope
    if not (a.is_finite and b.is_finite and squared >= 0):
        return middle
    second = math.sqrt(squared)
    curved = b.slope - a.slope + 2 * second
    length = b.length - width * ((b.slope + second - first) / curved) if curved else math.nan
    return min(max(length, least), most) if math.isfinite(length) else middle


def _kept_apart(length: float, least: float, most: float, was_near: bool) -> tuple[float, bool]:
    """Move a length away from an end of its interval that it is near for the second time, or at."""
    margin = _MARGIN * (most - least)
    if min(most - length, length - least) >= margin:
        return length, False
    if not was_near and least < length < most:
        return length, True
    return (most - margin if most - length < length - least else least + margin), False
