"""Which gradients are means over processes."""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_AVERAGED = WeakTensorKeyDictionary()


def note_average(gradient: Tensor) -> None:
    """Note that a gradient, as it stands in ``.grad``, is a mean over processes."""
    _AVERAGED[gradient] = True


def is_average(gradient: Tensor | None) -> bool:
    """Return whether a gradient is a mean over processes."""
    return gradient is not None and gradient in _AVERAGED
