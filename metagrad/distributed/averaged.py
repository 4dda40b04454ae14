"""Which gradients are means over processes, and the share of this process in them."""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

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
