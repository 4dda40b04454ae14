"""The torch functions that a function calls while it runs, so that a second run can be compared with the first.

An entry has the torch function, whether grad mode was on, and all arguments that are not tensors. A second run that
draws another number, has counted on, or finds another flag, differs in an entry before it differs in a value, and
often where no value differs: a rate that only scales gradients, a branch that detaches.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from metagrad.autograd.recompute.fingerprint import RELATIVE_ERROR, is_deterministic
from metagrad.core.modules import captured_values
from metagrad.core.tree import ATOMS

Entry: TypeAlias = "tuple[Any, ...]"
"""(grad mode, torch function, constants of its arguments ...)."""

_LONG = 256  # entries of a list of numbers beyond which their hash is kept


def take_apart(value: Any, tensors: list[Tensor], constants: list[Any]) -> None:
    """Append the tensors of nested arguments to one list, and to the other what else they hold, in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        constants.append(Tensor)
    elif type(value) in ATOMS:
        constants.append(value)
    elif isinstance(value, (list, tuple)):
        if len(value) > _LONG and all(type(item) in ATOMS for item in value):
            constants.append(hash(tuple(value)))
            return
        constants.append(len(value))
        for item in value:
            take_apart(item, tensors, constants)
    elif isinstance(value, dict):
        for key, item in value.items():
            constants.append(key)
            take_apart(item, tensors, constants)
    else:
        constants.extend(_constants_of(value))


def _constants_of(value: Any) -> Iterator[Any]:
    """Yield what identifies an argument that is neither a tensor, a plain value nor a container."""
    if isinstance(value, slice):
        yield from (
            item if type(item) in ATOMS else type(item) for item in (value.start, value.stop, value.step)
        )
    elif isinstance(value, (np.ndarray, np.generic)):
        yield (value.shape, value.dtype)
        yield None if value.dtype == object else hash(value.tobytes())
    elif isinstance(value, functools.partial):
        yield from _constants_of(value.func)
        yield from (item for item in (*value.args, *value.keywords.values()) if type(item) in ATOMS)
    elif isinstance(value, types.FunctionType):
        yield value.__code__
        yield from (item for item in captured_values(value) if type(item) in ATOMS)
    else:
        yield type(value)


class Journal:
    """The torch functions that a call went through.

    Attributes:
        entries: One for each.
        with_grad: Whether what it returned requires grad.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.with_grad: list[bool] = []

    def append(self, entry: Entry) -> int:
        """Note one torch function, and return its number."""
        self.entries.append(entry)
        self.with_grad.append(False)
        return len(self.entries) - 1

    def extend(self, other: Journal) -> None:
        """Note all that another journal holds."""
        self.entries += other.entries
        self.with_grad += other.with_grad

    def find(self, number: int, entry: Entry) -> int | None:
        """Return the number of ``entry`` in the first run, for a second run that has come to ``number``.

        Entries whose results do not require grad may be missing from the second run: a mask or a sparsity pattern is
        computed once and kept. None says that the second run deviates.
        """
        for place in range(number, len(self.entries)):
            if self.entries[place] == entry or _is_same(self.entries[place], entry):
                return place
            if self.with_grad[place]:
                return None
        return None

    def is_complete(self, number: int) -> bool:
        """Say whether a run may end that has come to ``number``."""
        return not any(self.with_grad[number:])

    def difference(self, number: int, entry: Entry) -> str:
        """Say how an entry differs from the one of the first run."""
        if number >= len(self.entries):
            return f"after {number} torch functions it went on with {describe(entry)}"
        return f"torch function {number} was {describe(self.entries[number])} and became {describe(entry)}"


def _is_same(first: Entry, second: Entry) -> bool:
    """Compare entries, to rounding where operations round differently every time."""
    if second[0] is None:  # a run for the values alone
        first, second = first[1:], second[1:]
    return len(first) == len(second) and all(map(_is_same_value, first, second))


def _is_same_value(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if type(first) is not float or first == second:
        return bool(first == second)
    both_nan = first != first and second != second
    return both_nan or (not is_deterministic() and math.isclose(first, second, rel_tol=RELATIVE_ERROR))


def describe(entry: Entry) -> str:
    """Write an entry as a call."""
    grad_mode, function, *constants = entry
    name = getattr(function, "__name__", None) or str(function)
    if name in ("__get__", "__set__"):
        name = f"{name} of {getattr(function.__self__, '__name__', 'an attribute')}"
    shown = [
        "..." if value is Tensor else getattr(value, "__name__", None) or repr(value) for value in constants
    ]
    return f"{name}({', '.join(shown)}){' without grad mode' if grad_mode is False else ''}"
