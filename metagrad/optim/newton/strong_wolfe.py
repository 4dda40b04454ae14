"""A line search for the strong Wolfe conditions, of many rows at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

_DECREASE, _CURVATURE = 1e-4, 0.9
_CLOSEST, _FARTHEST = 0.01, 10.0
"""An extrapolation goes beyond the last interval by this part of it or more, and to so many times its end or less."""
_MARGIN = 0.1
"""An interpolation that repeatedly comes this close to an end of its interval, as a part of it, is moved away."""

Number: TypeAlias = Any
"""A float, or a 0-d float64 tensor where lengths are differentiated: the arithmetic is the same."""


class Point(NamedTuple):
    """A length with the value and the slope there."""

    length: Number
    value: Number
    slope: Number
    evaluation: int = 0  # the number of the evaluation that it comes from; 0 is the start

    @property
    def is_finite(self) -> bool:
        """Say whether value and slope are numbers."""
        return _is_finite(self.value) and _is_finite(self.slope)


class Searched(NamedTuple):
    """What a line search has found, for each row."""

    length: Tensor  # [rows]; 0 where there is none
    evaluations: int  # of all rows together


Search: TypeAlias = Generator[Number, Point, Point]
"""Yields lengths to be tried, is sent what is there, and returns where it ends."""


def strong_wolfe(
    along: Callable[[Tensor], tuple[Tensor, Tensor]],
    value: Tensor,
    slope: Tensor,
    *,
    slack: Tensor,
    shortest: Tensor | None = None,
    max_eval: int = 25,
) -> Searched:
    r"""Find lengths that satisfy the strong Wolfe conditions.

    .. math:: \phi(\alpha) \le \phi(0) + c_1 \alpha \phi'(0), \qquad |\phi'(\alpha)| \le c_2 |\phi'(0)|, \qquad
              c_1 = 10^{-4}, \; c_2 = 0.9

    From 1, lengths are extrapolated until an interval has points that satisfy them, which is then narrowed; both by
    the minimum of the cubic with the values and slopes at two lengths. A value that is not finite bounds an interval.
    Rows are searched side by side, each as if alone. Where values and slopes are on the tape, lengths are: functions
    of them that are smooth but where the search would go another way.

    Args:
        along: Lengths ``[rows]`` to values and slopes ``[rows]``.
        value: The values at 0.
        slope: The slopes at 0; rows where it is not negative have the length 0.
        slack: How much of the values may be rounding.
        shortest: A row whose interval is shorter ends.
        max_eval: How often ``along`` is called at most.

    Returns:
        Where the conditions were not met: the length of the least value that was found, or 0.

    Example:
        >>> from metagrad.optim.newton.strong_wolfe import strong_wolfe
        >>> start, slope = torch.tensor([9.0]), torch.tensor([-6.0])
        >>> strong_wolfe(lambda a: ((a - 3) ** 2, 2 * (a - 3)), start, slope, slack=torch.zeros(1))
        Searched(length=tensor([1.]), evaluations=1)

    References:
        Nocedal, Wright, "Numerical optimization", 2006, algorithms 3.5 and 3.6, and equation 3.59.
    """
    least, rounding = [0.0] * len(value) if shortest is None else shortest.tolist(), slack.tolist()
    ends = [Point(0.0, *at) for at in zip(_numbers(value), _numbers(slope), strict=True)]
    searches: dict[int, Search] = {}
    trial: list[Number] = [0.0] * len(ends)
    for row, start in enumerate(ends):
        if start.is_finite and start.slope < 0 and max_eval:
            searches[row] = _search(start, rounding[row], least[row], max_eval)
            trial[row] = next(searches[row])
    count = 0
    while searches:
        count += 1
        values, slopes = along(_tensor(trial, value))
        found = list(zip(_numbers(values), _numbers(slopes), strict=True))
        for row in list(searches):
            trial[row], end = _sent(searches[row], Point(trial[row], *found[row], count))
            if end is not None:
                ends[row] = end
                del searches[row]
    return Searched(_tensor([end.length for end in ends], value), count)


def search_row(
    along: Callable[[float], tuple[float, float]],
    start: Point,
    *,
    slack: float,
    shortest: float,
    max_eval: int,
) -> Point:
    """Do as :func:`strong_wolfe` for one row in plain numbers, and return where it ends; ``start`` descends."""
    search = _search(start, slack, shortest, max_eval)
    length, end, count = next(search), None, 0
    while end is None:
        count += 1
        length, end = _sent(search, Point(length, *along(length), count))
    return end


def _sent(search: Search, point: Point) -> tuple[Number, Point | None]:
    """Return the next length to be tried; or the last, and where the search ends."""
    try:
        return search.send(point), None
    except StopIteration as stop:
        return stop.value.length, stop.value


def _search(start: Point, slack: float, shortest: float, max_eval: int) -> Search:
    """Extrapolate until there is an interval: algorithm 3.5."""
    before, length = start, 1.0
    for count in range(1, max_eval + 1):
        point = yield length
        if _is_too_high(point, start, slack) or (count > 1 and point.value >= before.value):
            return (yield from _zoom(start, before, point, slack, shortest, max_eval - count))
        if _is_flat(point, start):
            return point
        if point.slope >= 0:
            return (yield from _zoom(start, point, before, slack, shortest, max_eval - count))
        nearest = point.length + _CLOSEST * (point.length - before.length)
        length = _cubic_minimum(before, point, nearest, _FARTHEST * point.length)
        before = point
    return before


def _zoom(start: Point, low: Point, high: Point, slack: float, shortest: float, max_eval: int) -> Search:
    """Narrow an interval whose end ``low`` has the lesser value: algorithm 3.6."""
    was_near = False
    for _ in range(max_eval):
        ends = sorted((low.length, high.length))
        if not ends[1] - ends[0] > shortest:
            break
        length, was_near = _kept_apart(_cubic_minimum(low, high, *ends), ends, was_near)
        point = yield length
        if _is_too_high(point, start, slack) or point.value >= low.value:
            high = point
            continue
        if _is_flat(point, start):
            return point
        if point.slope * (high.length - low.length) >= 0:
            high = low
        low = point
    return low


def _is_too_high(point: Point, start: Point, slack: float) -> bool:
    most = start.value + _DECREASE * point.length * start.slope + slack
    return not (point.is_finite and bool(point.value <= most))


def _is_flat(point: Point, start: Point) -> bool:
    return bool(abs(point.slope) <= -_CURVATURE * start.slope)


def _cubic_minimum(a: Point, b: Point, least: Number, most: Number) -> Number:
    """Return where the cubic through two points is least, between two bounds; their middle if it has no minimum."""
    if a.length > b.length:
        a, b = b, a
    width = b.length - a.length
    first = a.slope + b.slope - 3 * (b.value - a.value) / width
    squared = first * first - a.slope * b.slope
    if not (a.is_finite and b.is_finite and squared >= 0):
        return (least + most) / 2
    second = _root(squared)
    curved = b.slope - a.slope + 2 * second
    length = b.length - width * ((b.slope + second - first) / curved) if curved != 0 else math.nan
    return min(max(length, least), most) if _is_finite(length) else (least + most) / 2


def _kept_apart(length: Number, ends: Sequence[Number], was_near: bool) -> tuple[Number, bool]:
    """Move a length away from an end of its interval that it is near for the second time, or at."""
    least, most = ends
    margin = _MARGIN * (most - least)
    if min(most - length, length - least) >= margin:
        return length, False
    if not was_near and least < length < most:
        return length, True
    return (most - margin if most - length < length - least else least + margin), False


def _is_finite(x: Number) -> bool:
    return bool(abs(x) < math.inf)


def _root(x: Number) -> Number:
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def _numbers(values: Tensor) -> Sequence[Number]:
    return values.double().unbind() if values.requires_grad else values.tolist()


def _tensor(numbers: Sequence[Number], like: Tensor) -> Tensor:
    if any(isinstance(number, Tensor) for number in numbers):
        columns = [torch.as_tensor(n, dtype=torch.float64, device=like.device) for n in numbers]
        return torch.stack(columns).to(like.dtype)
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)
