"""Which gradients are means over processes, the share of this process in them, and other means by such shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from metagrad.distributed.sums import sums

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SHARES = WeakTensorKeyDictionary()


def note_average(gradient: Tensor, share: float) -> None:
    """Note that a gradient is a mean over processes.

    Args:
        gradient: As it stands in ``.grad``.
        share: The weight of this process over the sum of all.
    """
    _SHARES[gradient] = share


def share_in(gradient: Tensor | None) -> float | None:
    """Return the share of this process in a gradient; None where it is no mean over processes."""
    return None if gradient is None else _SHARES.get(gradient)


@dataclass(frozen=True)
class Mean:
    """The mean over processes of what each computes from data of its own.

    Args:
        share: The weight of this process over the sum of all.
        group: The processes; None is this one alone.
    """

    share: float = 1.0
    group: ProcessGroup | None = None

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Average tensors, which have the same shapes in all processes; a share of 0 leaves those of this one out."""
        if self.group is None:
            return list(tensors)
        share = self.share
        return sums([share * tensor if share else torch.zeros_like(tensor) for tensor in tensors], self.group)
