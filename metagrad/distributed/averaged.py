"""Which gradients are means over processes."""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_AVERAGED = WeakTensorKeyDictionary()


def note_average(param: Tensor) -> None:
    """Note that the gradient of a parameter, if it has one, is a mean over processes."""
    if param.grad is not None:
        _AVERAGED[param.grad] = True


def is_average(gradient: Tensor | None) -> bool:
    """Return whether a gradient is a mean over processes."""
    return gradient is not None and gradient in _AVERAGED
