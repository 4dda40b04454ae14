"""Pairs of a direction and its product, a fixed number of them, spread evenly over the steps of a solve."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.curvature.solvers.iteration import dot


class Pairs(NamedTuple):
    """Directions and their products, oldest first; places that nothing has come to are zero, and come before."""

    moves: tuple[Tensor, ...]  # directions p, [tasks, n] each
    changes: tuple[Tensor, ...]  # A p

    def with_pair(self, step: int, move: Tensor, change: Tensor, where: Tensor) -> Pairs:
        """Add the pair of a step to the rows ``where`` there is one, in the place of another, if it is to be kept."""
        place = place_given_up(step, len(self.moves)) if self.moves else None
        if place is None or not bool(where.any()):
            return self
        return Pairs(
            *(_exchanged(old, place, new, where) for old, new in zip(self, (move, change), strict=True))
        )


class PairSampler:
    """Collects the pairs of a solve with right-hand sides ``b``, ``[tasks, n]``, so many of each row.

    None is of a direction whose residual is below the cube root of the precision, relative to ``b``: so late,
    directions have lost conjugacy to rounding.
    """

    def __init__(self, b: Tensor, length: int) -> None:
        self.pairs = no_pairs(b, length)
        self._least = torch.finfo(b.dtype).eps ** (2 / 3) * dot(b, b).detach()

    def __call__(self, step: int, r: Tensor, p: Tensor, q: Tensor, where: Tensor) -> None:
        """Take the pair of a step where it is to be kept."""
        self.pairs = self.pairs.with_pair(step, p, q, where & (dot(r, r) > self._least))


def no_pairs(like: Tensor, length: int) -> Pairs:
    """Return so many empty places for rows ``like``, ``[tasks, n]``."""
    zeros = torch.zeros_like(like)
    return Pairs((zeros,) * length, (zeros,) * length)


def place_given_up(step: int, length: int) -> int | None:
    """Say which of the places of steps 0, ..., ``step`` - 1 is given up for this one; None keeps them all.

    As long as there are empty ones, the first place is. Of a full history, whose steps are multiples of a stride,
    every second is then replaced in turn by the next multiple of twice the stride; so a solve of any length leaves
    steps that are evenly spread, the first among them, and nobody needs to know the length before.

    References:
        Morales, Nocedal, "Automatic preconditioning by limited memory quasi-Newton updating", SIAM J. Optim. 10(4),
        2000, section 2.1.

    Example:
        >>> from metagrad.optim.newton.sampled_pairs import place_given_up
        >>> kept = [None] * 4
        >>> for step in range(13):
        ...     place = place_given_up(step, 4)
        ...     kept = kept if place is None else [*kept[:place], *kept[place + 1 :], step]
        >>> kept
        [0, 4, 8, 12]
    """
    if step < length:
        return 0
    stride = 1
    while step >= length * stride:
        stride *= 2
    number, rest = divmod(step, stride)
    return None if rest else number - (length + 1) // 2 + 1


def _exchanged(old: tuple[Tensor, ...], place: int, new: Tensor, where: Tensor) -> tuple[Tensor, ...]:
    exchanged = (*old[:place], *old[place + 1 :], new)
    if bool(where.all()):
        return exchanged
    return tuple(torch.where(where[:, None], a, b) for a, b in zip(exchanged, old, strict=True))
