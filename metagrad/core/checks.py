"""Argument checks for public functions, warnings and progress bars.

Every check takes the name of the call and its argument, the value, and the allowed values. It returns the value, or
raises an error such as ``MAML(..., steps): expected an int of 1 or more, got 0.``

- ``check_count("f(..., n)", n, least=1)`` accepts an int of at least ``least``.
- ``check_number("f(..., x)", x, least=0, below=1)`` accepts a number in ``[least, below)``.
- ``check_positive("f(..., x)", x)`` accepts a finite number above 0.
- ``check_scalar("f(..., x)", x, least=0)`` accepts a number of at least ``least``, or a tensor with one such element.
- ``check_choice("f(..., mode)", mode, choices)`` accepts an element of a sequence or a value of a ``Literal``.
- ``check_type("f(..., x)", x, Tensor)`` accepts an instance of one of the types.
- ``check_function("f(fn)", "fn", fn)`` accepts a callable that is not a module class.

``optional=True`` also accepts None. ``refuse(call, expected, got)`` raises such an error for other conditions.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import sys
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeGuard, TypeVar, get_args

import torch

from metagrad.core.tree import tensors_in

T = TypeVar("T")

_BAR_AFTER = 5.0
"""Seconds after which a progress bar appears."""
_INSIDE = (
    str(Path(__file__).parents[1]) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
    contextlib.__file__,
)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an int but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_a(value: object, *kinds: type[T]) -> TypeGuard[T]:
    """Return whether a value has one of the types. Type checkers accept this call for every declared type."""
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
    """Raise an error with the call, the expected value and the actual value."""
    raise error(f"{call}: expected {expected}, got {got!r}.")


def check_count(call: str, value: Any, least: int = 1, *, optional: bool = False) -> Any:
    """Raise ``ValueError`` unless a value is an int of at least ``least``."""
    if not (optional and value is None) and (not is_integer(value) or value < least):
        refuse(call, f"{'None or ' * optional}an int of {least} or more", value)
    return value


def check_number(
    call: str, value: Any, least: float = -math.inf, below: float = math.inf, *, optional: bool = False
) -> Any:
    """Raise ``ValueError`` unless a value is an int or a float in ``[least, below)``."""
    if (optional and value is None) or (is_number(value) and least <= value < below):
        return value
    bounds = [f" of {least:g} or more"] * (least > -math.inf) + [f" below {below:g}"] * (below < math.inf)
    return refuse(call, f"{'None or ' * optional}a number{' and'.join(bounds)}", value)


def check_positive(call: str, value: Any, *, optional: bool = False) -> Any:
    """Raise ``ValueError`` unless a value is a finite number above 0."""
    if not (optional and value is None) and not (is_number(value) and 0 < value < math.inf):
        refuse(call, f"{'None or ' * optional}a number above 0", value)
    return value


def check_scalar(call: str, value: Any, least: float = -math.inf) -> Any:
    """Raise an error unless a value is a number of at least ``least``, or a tensor with one such element.

    Return the number, or a tensor without dimensions.
    """
    if not isinstance(value, (numbers.Real, torch.Tensor)):
        refuse(call, "a number or a tensor", type(value).__name__, TypeError)
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        refuse(call, "a number or a tensor with one element", tuple(value.shape))
    if least > -math.inf:  # inside of a transform, the value of a tensor cannot be read
        check_number(call, float(value.detach() if isinstance(value, torch.Tensor) else value), least)
    return value.reshape(()) if isinstance(value, torch.Tensor) else value


def check_choice(call: str, value: T, choices: Any) -> T:
    """Raise ``ValueError`` unless a value is an element of a sequence or a value of a ``Literal``."""
    known = tuple(get_args(choices) or choices)
    if value not in known:
        refuse(call, f"one of {', '.join(map(repr, known))}", value)
    return value


def check_type(call: str, value: Any, *kinds: type[Any], optional: bool = False) -> Any:
    """Raise ``TypeError`` unless a value has one of the types."""
    if not (optional and value is None) and not isinstance(value, kinds):
        names = " or ".join([*["None"] * optional, *(kind.__name__ for kind in kinds)])
        raise TypeError(f"{call}: expected {names}, got {type(value).__name__}.")
    return value


def check_function(call: str, name: str, function: Any) -> Any:
    """Raise ``TypeError`` if the argument is not callable, or if it is a module class instead of a module."""
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


@contextlib.contextmanager
def dtypes_explained(call: str, params: Iterable[torch.Tensor], data: object) -> Generator[None]:
    """Raise ``ValueError`` for an error of a model whose inputs have another dtype than its parameters."""
    try:
        yield
    except RuntimeError as error:
        dtype = next((p.dtype for p in params), None)
        others = {leaf.dtype for leaf in tensors_in(data) if leaf.is_floating_point()} - {dtype}
        if dtype is None or not others:
            raise
        raise ValueError(
            f"{call}: the model raised an error. The parameters are {dtype} and an input is {others.pop()}. "
            f"Bring them to one dtype, such as x.to({dtype}). The error was: {error}"
        ) from error


def caller() -> tuple[str, int]:
    """Return the innermost line outside of metagrad and torch, and its ``stacklevel`` for a warning of the caller.

    A thread without such a line runs the backward pass of an accelerator.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    name = frame.f_code.co_filename
    return "a backward pass" if name.startswith(_INSIDE) else f"{name}:{frame.f_lineno}", level


def warn(message: str) -> None:
    """Issue a ``UserWarning`` for the innermost line outside of metagrad and torch."""
    warnings.warn(message, stacklevel=caller()[1])


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """Return the items with a bar on standard error, which shows how many are done and the time left.

    The bar appears only in a terminal, after a few seconds, if tqdm is installed. ``TQDM_DISABLE=1`` hides it.
    """
    if not getattr(sys.stderr, "isatty", bool)():  # standard error may be None, or replaced
        return items
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=what, total=total, delay=_BAR_AFTER, leave=False, dynamic_ncols=True)
