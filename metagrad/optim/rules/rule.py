"""What a rule is, and the forms its hyper-parameters take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
"""Parameters by name, as ``dict(model.named_parameters())`` gives them; stacked tasks come first in a shape."""

Hyperparameter: TypeAlias = "float | Tensor | Mapping[str, float | Tensor] | Sequence[Any]"
"""A number; a 0-d tensor; a 1-d tensor or a sequence with one value for each step; or a mapping with one value
for each parameter by name: a number, a 0-d tensor, or a tensor of the parameter's shape, for its elements."""


class Rule(Protocol):
    """An optimizer as two pure functions; its hyper-parameters are the fields of a frozen dataclass."""

    def init(self, params: Params) -> Any:
        """Return the state before the first step: a tree of tensors and constants."""
        ...

    def update(
        self, grads: Params, state: Any, params: Params, curvature: object | None = None
    ) -> tuple[Params, Any]:
        """Return new parameters and a new state, both differentiable; nothing is written in place."""
        ...


def check_hyperparameter(call: str, name: str, value: Hyperparameter, *, above: float = 0.0) -> None:
    """Refuse a value of an unknown form, or a number below a bound (tensors may be learned: they pass)."""
    if isinstance(value, Tensor):
        if value.ndim > 1:
            raise ValueError(
                f"{call}: {name} must be a scalar, or 1-d with a value for each step, got shape "
                f"{tuple(value.shape)}. Values for each parameter are a dict by parameter name."
            )
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(item, (int, float, Tensor)):
                raise TypeError(
                    f"{call}: {name}[{key!r}] must be a number or a tensor, got {type(item).__name__}."
                )
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            check_hyperparameter(call, name, item, above=above)
    elif not isinstance(value, (int, float)):
        raise TypeError(
            f"{call}: {name} must be a number, a tensor, a sequence with one value for each step, or a dict by "
            f"parameter name, got {type(value).__name__}."
        )
    elif not value >= above:
        raise ValueError(f"{call}: {name} must be at least {above:g}, got {value}.")


def at_step(name: str, value: Hyperparameter, step: int) -> float | Tensor | Mapping[str, float | Tensor]:
    """Choose the value of one step."""
    per_step = value.ndim == 1 if isinstance(value, Tensor) else isinstance(value, Sequence)
    if not per_step:
        return value  # type: ignore[return-value]
    if step >= len(value):  # type: ignore[arg-type]
        raise ValueError(
            f"rule.update: {name} has one value for each of {len(value)} steps, but this is "  # type: ignore[arg-type]
            f"step {step} (the first is 0). Give more values, or take fewer steps."
        )
    return value[step]  # type: ignore[index]


def by_parameter(
    name: str, value: float | Tensor | Mapping[str, float | Tensor], params: Params
) -> list[float | Tensor]:
    """Choose the value of each parameter, in the order of ``params``."""
    if not isinstance(value, Mapping):
        return [value] * len(params)
    if value.keys() != params.keys():
        unknown, missing = sorted(value.keys() - params.keys()), sorted(params.keys() - value.keys())
        raise ValueError(
            f"rule.update: {name} must have one entry for each parameter by name; "
            f"unknown: {unknown}, missing: {missing}. The parameters are {sorted(params)}."
        )
    return [_fitting(name, key, value[key], param) for key, param in params.items()]


def _fitting(name: str, key: str, value: float | Tensor, param: Tensor) -> float | Tensor:
    if isinstance(value, Tensor) and value.ndim:
        trailing = param.shape[max(param.ndim - value.ndim, 0) :]
        if value.shape != trailing:
            raise ValueError(
                f"rule.update: {name}[{key!r}] must be a scalar or have the parameter's shape "
                f"{tuple(trailing)}, got {tuple(value.shape)}."
            )
    return value
