"""The hyper-parameters in a rule, wherever its fields hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")

_PLAIN = (float, int, str, type(None))
"""Most of what fields hold."""


def hyperparameters_in(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the fields of a rule with their paths, such as ``lr.head.weight``."""
    if isinstance(value, Tensor):
        yield path, value
    if isinstance(value, _PLAIN):
        return
    for key, item in _items(value):
        yield from hyperparameters_in(item, f"{path}.{key}" if path else str(key))


def with_hyperparameters(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """Return a rule whose tensors are what ``change`` makes of them."""
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[return-value]
    if isinstance(value, _PLAIN):
        return value
    if _is_rule(value):
        fields = {name: with_hyperparameters(item, change) for name, item in _items(value)}
        return dataclasses.replace(value, **fields)  # type: ignore[type-var]
    if isinstance(value, Mapping):
        return {key: with_hyperparameters(item, change) for key, item in value.items()}  # type: ignore[return-value]
    if isinstance(value, Sequence):
        return type(value)(with_hyperparameters(item, change) for item in value)  # type: ignore[call-arg]
    return value


def _items(value: object) -> Iterator[tuple[object, Any]]:
    if _is_rule(value):
        fields = (field.name for field in dataclasses.fields(value) if field.init)  # type: ignore[arg-type]
        return ((name, getattr(value, name)) for name in fields)
    if isinstance(value, Mapping):
        return iter(value.items())
    if isinstance(value, Sequence):
        return iter(enumerate(value))
    return iter(())


def _is_rule(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
