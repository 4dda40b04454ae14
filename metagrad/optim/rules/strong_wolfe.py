"""A line search for the strong Wolfe conditions, of many rows at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_DECREASE, _CURVATURE = 1e-4, 0.9


def strong_wolfe(
    along: Callable[[Tensor], tuple[Tensor, Tensor]],
    value: Tensor,
    slope: Tensor,
    *,
    slack: Tensor,
    max_evaluations: int = 25,
) -> tuple[Tensor, int]:
    r"""Find lengths that satisfy the strong Wolfe conditions.

    .. math:: \phi(\alpha) \le \phi(0) + c_1 \alpha \phi'(0), \qquad |\phi'(\alpha)| \le c_2 |\phi'(0)|, \qquad
              c_1 = 10^{-4}, \; c_2 = 0.9

    Lengths double from 1 until an interval has a point that satisfies them, and halve it from then on. So they are
    sums of powers of 2, and locally constant in everything: that is what makes a step that uses them differentiable.

    Args:
        along: Lengths ``[rows]`` to values and slopes ``[rows]``.
        value: The values at 0.
        slope: The slopes at 0; rows where it is not negative have the length 0.
        slack: How much of the values may be rounding.
        max_evaluations: How often ``along`` is called at most.

    Returns:
        The lengths, and how often ``along`` was called. Where the conditions were not met: the longest that is known
        to descend by enough, or 0.

    Example:
        >>> from metagrad.optim.rules.strong_wolfe import strong_wolfe
        >>> start, slope = torch.tensor([9.0]), torch.tensor([-6.0])
        >>> strong_wolfe(lambda a: ((a - 3) ** 2, 2 * (a - 3)), start, slope, slack=torch.zeros(1))
        (tensor([1.]), 1)

    References:
        Nocedal, Wright, "Numerical optimization", 2006, section 3.5; bisection in place of interpolation.
    """
    low, high = torch.zeros_like(value), torch.full_like(value, torch.inf)
    length, done = torch.ones_like(value), slope >= 0
    found = torch.zeros_like(value)
    for count in range(max_evaluations):
        if bool(done.all()):
            return found, count
        new, steep = along(torch.where(done, found, length))
        descends = new <= value + _DECREASE * length * slope + slack
        is_flat = steep.abs() <= -_CURVATURE * slope
        meets = ~done & descends & is_flat
        found, done = torch.where(meets, length, found), done | meets
        is_short = descends & (steep < 0)
        low, high = torch.where(is_short, length, low), torch.where(is_short, high, length)
        length = torch.where(high.isinf(), 2 * length, (low + high) / 2)
    return torch.where(done, found, low), max_evaluations
