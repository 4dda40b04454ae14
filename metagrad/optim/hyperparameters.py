"""The forms of a hyperparameter, and its value at one step for one parameter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from metagrad.core.checks import check_type
from metagrad.core.tree import Params
from metagrad.optim.rule import Hyperparameter


def check_hyperparameter(call: str, name: str, value: Hyperparameter, *, below: float = math.inf) -> None:
    """Raise an error for an unsupported type, or a number outside of [0, below).

    Values of tensors are not checked.
    """
    if isinstance(value, Tensor):
        if value.ndim > 1:
            raise ValueError(
                f"{call}: {name} must be a scalar, or 1-d with a value for each step, got shape "
                f"{tuple(value.shape)}. Values for each parameter are a dict by parameter name."
            )
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_type(f"{call}: {name}[{key!r}]", item, int, float, Tensor)
            if not isinstance(item, Tensor):
                check_hyperparameter(call, f"{name}[{key!r}]", item, below=below)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            check_hyperparameter(call, name, item, below=below)
    elif not isinstance(value, (int, float)):
        raise TypeError(
            f"{call}: {name} must be a number, a tensor, a sequence with one value for each step, or a dict by "
            f"parameter name, got {type(value).__name__}. Use float() for a NumPy number, and rules.schedule for a "
            "function of the step."
        )
    elif not value >= 0:
        raise ValueError(f"{call}: {name} must be at least 0, got {value}.")
    elif not value < below:
        raise ValueError(f"{call}: {name} must be below {below:g}, got {value}.")


def at_step(
    name: str, value: Hyperparameter, step: int | Tensor
) -> float | Tensor | Mapping[str, float | Tensor]:
    """Return the value at one step. In a compiled loop the number of the step is a tensor."""
    per_step = value.ndim == 1 if isinstance(value, Tensor) else isinstance(value, Sequence)
    if not per_step:
        return value  # type: ignore[return-value]
    if isinstance(step, Tensor):
        return _selected(value, step)  # type: ignore[arg-type]
    if step >= len(value):  # type: ignore[arg-type]
        raise ValueError(
            f"rule.update: {name} has one value for each of {len(value)} steps, but this is "  # type: ignore[arg-type]
            f"step {step} (the first is 0). Give more values, or take fewer steps."
        )
    return value[step]  # type: ignore[index]


def _selected(values: Tensor | Sequence[Any], step: Tensor) -> Tensor | Mapping[str, Tensor]:
    """Return the value at a step that is a tensor, by indexing. Beyond the last value it is NaN."""
    if not isinstance(values, Tensor):
        if isinstance(values[0], Mapping):
            return {key: _selected([value[key] for value in values], step) for key in values[0]}  # type: ignore[misc]
        values = torch.stack([torch.as_tensor(value, device=step.device) for value in values])
    chosen = values.index_select(0, step.clamp(max=len(values) - 1).reshape(1)).squeeze(0)
    return torch.where(step < len(values), chosen, torch.nan)


def values_at(name: str, value: Hyperparameter, step: int | Tensor, params: Params) -> list[float | Tensor]:
    """Return the value of each parameter at one step, in the order of ``params``."""
    chosen = at_step(name, value, step)
    if not isinstance(chosen, Mapping):
        return [chosen] * len(params)
    if chosen.keys() != params.keys():
        unknown, missing = sorted(chosen.keys() - params.keys()), sorted(params.keys() - chosen.keys())
        raise ValueError(
            f"rule.update: {name} must have one entry for each parameter by name; "
            f"unknown: {unknown}, missing: {missing}. The parameters are {sorted(params)}."
        )
    return [_fitting(name, key, chosen[key], param) for key, param in params.items()]


def is_used(value: Hyperparameter) -> bool:
    """Return whether a hyperparameter is not the number 0."""
    return not (isinstance(value, (int, float)) and value == 0)


def count(step: int | Tensor, dtype: torch.dtype) -> float | Tensor:
    """Return a number of steps for arithmetic.

    A compiled number of steps is converted, because its powers would be float32.
    """
    if not isinstance(step, Tensor):
        return step
    return step.to(torch.float64 if dtype == torch.float64 else torch.float32)


def _fitting(name: str, key: str, value: float | Tensor, param: Tensor) -> float | Tensor:
    if isinstance(value, Tensor) and value.ndim:
        trailing = param.shape[max(param.ndim - value.ndim, 0) :]
        if value.shape != trailing:
            raise ValueError(
                f"rule.update: {name}[{key!r}] must be a scalar or have the parameter's shape "
                f"{tuple(trailing)}, got {tuple(value.shape)}."
            )
    return value


T = TypeVar("T")

_PLAIN = (float, int, str, type(None))
"""Types of fields that hold no tensor."""


def hyperparameters_in(rule: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the fields of a rule with their paths, such as ``lr.head.weight``."""
    return ((path, value) for path, value in values_in(rule) if isinstance(value, Tensor))


def values_in(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a rule, its fields, and the entries and items in them, with their paths."""
    yield path, value
    if not isinstance(value, (*_PLAIN, Tensor)):
        for key, item in _items(value):
            yield from values_in(item, f"{path}.{key}" if path else str(key))


def with_hyperparameters(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """Return a rule in which ``change`` is applied to every tensor."""
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
