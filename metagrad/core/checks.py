"""Checks of arguments, made once, where users pass them; and warnings.

Every check takes how errors name the call and its argument, the value, and what is allowed. It returns the value, or
raises an error of one form: ``MAML(..., steps): expected an int of 1 or more, got 0.``

=================================================== ============================================================
check                                               accepts
=================================================== ============================================================
``check_count("f(..., n)", n, least=1)``            an int of at least so much
``check_number("f(..., x)", x, least=0, below=1)``  a number in ``[least, below)``
``check_positive("f(..., x)", x)``                  a finite number above 0
``check_choice("f(..., mode)", mode, choices)``     one of the choices, a sequence or a ``Literal``
``check_type("f(..., x)", x, Tensor)``              an instance of one of the types
``check_function("f(fn)", "fn", fn)``               something that can be called, and is no class of a module
=================================================== ============================================================

``optional=True`` accepts None as well. ``refuse(call, expected, got)`` raises such an error for any other condition.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeGuard, TypeVar, get_args

import torch

T = TypeVar("T")

_INSIDE = (
    str(Path(__file__).parents[1]) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
    contextlib.__file__,
)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float, which True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_a(value: object, *kinds: type[T]) -> TypeGuard[T]:
    """Return whether a value is of one of some types, also where its declared type says so."""
    return isinstance(value, kinds)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a sequence."""
    return isinstance(value, Sequence)


def is_list_or_tuple(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a list or a tuple."""
    return isinstance(value, (list, tuple))


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Return whether a value is a mapping."""
    return isinstance(value, Mapping)


def refuse(call: str, expected: str, got: object, error: type[Exception] = ValueError) -> NoReturn:
    """Raise an error that names the call, what it expects and what it got."""
    raise error(f"{call}: expected {expected}, got {got!r}.")


def check_count(call: str, value: Any, least: int = 1, *, optional: bool = False) -> Any:
    """Raise ``ValueError`` unless a value is an int of at least so much."""
    if not (optional and value is None) and (not is_integer(value) or value < least):
        refuse(call, f"{'None or ' * optional}an int of {least} or more", value)
    return value


def check_number(
    call: str, value: Any, least: float = -math.inf, below: float = math.inf, *, optional: bool = False
) -> Any:
    """Raise ``ValueError`` unless a value is an int or a float from ``least`` to ``below``, which is excluded."""
    if (optional and value is None) or (is_number(value) and least <= value < below):
        return value
    bounds = [f" of {least:g} or more"] * (least > -math.inf) + [f" below {below:g}"] * (below < math.inf)
    return refuse(call, f"{'None or ' * optional}a number{' and'.join(bounds)}", value)


def check_positive(call: str, value: Any, *, optional: bool = False) -> Any:
    """Raise ``ValueError`` unless a value is a finite number above 0."""
    if not (optional and value is None) and not (is_number(value) and 0 < value < math.inf):
        refuse(call, f"{'None or ' * optional}a number above 0", value)
    return value


def check_choice(call: str, value: T, choices: Any) -> T:
    """Raise ``ValueError`` unless a value is one of a sequence or of the values of a ``Literal``."""
    known = tuple(get_args(choices) or choices)
    if value not in known:
        refuse(call, f"one of {', '.join(map(repr, known))}", value)
    return value


def check_type(call: str, value: Any, *kinds: type[Any], optional: bool = False) -> Any:
    """Raise ``TypeError`` unless a value is of one of some types."""
    if not (optional and value is None) and not isinstance(value, kinds):
        names = " or ".join([*["None"] * optional, *(kind.__name__ for kind in kinds)])
        raise TypeError(f"{call}: expected {names}, got {type(value).__name__}.")
    return value


def check_function(call: str, name: str, function: Any) -> Any:
    """Raise ``TypeError`` for what cannot be called, and for the class of a module in place of one."""
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        raise TypeError(
            f"{call}: {name} must be a function or a module, got the class {function.__name__}. Make one of it: "
            f"{function.__name__}()."
        )
    if not callable(function):
        raise TypeError(
            f"{call}: {name} must be a function, not what it returns, got {type(function).__name__}."
        )
    return function


def warn(message: str) -> None:
    """Issue a ``UserWarning`` for the innermost line that is neither the library's nor torch's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
