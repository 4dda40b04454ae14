"""Checks of what users pass, and warnings."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import torch

T = TypeVar("T")

_INSIDE = (
    str(Path(__file__).parents[1]) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
    contextlib.__file__,
)


def is_integer(value: object) -> TypeGuard[int]:
    """Say whether a value is an integer, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_a(value: object, *kinds: type[T]) -> TypeGuard[T]:
    """Say whether a value is of one of some types, also where its declared type says so."""
    return isinstance(value, kinds)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Say whether a value is a sequence, of whatever."""
    return isinstance(value, Sequence)


def is_list_or_tuple(value: object) -> TypeGuard[Sequence[Any]]:
    """Say whether a value is a list or a tuple, of whatever."""
    return isinstance(value, (list, tuple))


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Say whether a value is a mapping, of whatever."""
    return isinstance(value, Mapping)


def is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    """Say whether a value is a dict, of whatever."""
    return isinstance(value, dict)


def check_count(call: str, value: object, least: int = 1) -> None:
    """Refuse what is not an int of at least so much."""
    if not is_integer(value) or value < least:
        raise ValueError(f"{call}: expected an int of {least} or more, got {value!r}.")


def checked_positive(call: str, value: float) -> float:
    """Return a number; refuse what is not above 0 and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{call}: expected a number above 0, got {value!r}.")
    return value


def check_function(call: str, name: str, function: object) -> None:
    """Refuse what cannot be called: a result, a name, or the class of a module in place of one."""
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        raise TypeError(
            f"{call}: {name} must be a function or a module, got the class {function.__name__}. Make one of it: "
            f"{function.__name__}()."
        )
    if not callable(function):
        raise TypeError(
            f"{call}: {name} must be a function, not what it returns, got {type(function).__name__}."
        )


def warn(message: str) -> None:
    """Warn, as a ``UserWarning``, of the innermost line that is neither the library's nor torch's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
