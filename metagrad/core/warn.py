"""Warnings that name the line of the caller, however deep in the library something is noticed."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

import torch

_INSIDE = (
    str(Path(__file__).parents[1]) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
    contextlib.__file__,
)


def warn(message: str) -> None:
    """Warn, as a ``UserWarning``, of the innermost line that is neither the library's nor torch's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
