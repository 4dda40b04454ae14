"""What a rule is, and the forms its hyper-parameters take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from metagrad.sparse.rows.row_sparse import RowSparse

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


def check_fraction(call: str, name: str, value: Hyperparameter) -> None:
    """Refuse a value of an unknown form, or a number outside of [0, 1)."""
    check_hyperparameter(call, name, value)
    if isinstance(value, (int, float)) and value >= 1:
        raise ValueError(f"{call}: {name} must be below 1, got {value}.")


def at_step(
    name: str, value: Hyperparameter, step: int | Tensor
) -> float | Tensor | Mapping[str, float | Tensor]:
    """Choose the value of one step; its number is a tensor where the step is compiled."""
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
    """Choose the value of a step without looking at its number; beyond the last it is NaN."""
    if not isinstance(values, Tensor):
        if isinstance(values[0], Mapping):
            return {key: _selected([value[key] for value in values], step) for key in values[0]}  # type: ignore[misc]
        values = torch.stack([torch.as_tensor(value, device=step.device) for value in values])
    chosen = values.index_select(0, step.clamp(max=len(values) - 1).reshape(1)).squeeze(0)
    return torch.where(step < len(values), chosen, torch.nan)


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


def values_at(name: str, value: Hyperparameter, step: int | Tensor, params: Params) -> list[float | Tensor]:
    """Choose the value of each parameter at one step, in the order of ``params``."""
    return by_parameter(name, at_step(name, value, step), params)


def is_used(value: Hyperparameter) -> bool:
    """Say whether a hyper-parameter is anything but the number 0."""
    return not (isinstance(value, (int, float)) and value == 0)


def plus_scaled(
    bases: list[Tensor], scales: list[float | Tensor], directions: list[Tensor], sign: int = 1
) -> list[Tensor]:
    """Compute ``base + sign * scale * direction`` for each parameter.

    Not by ``torch._foreach_add``, which keeps its operands for a backward that needs none of them.
    """
    return [
        _plus_scaled(base, scale, direction, sign)
        for base, scale, direction in zip(bases, scales, directions, strict=True)
    ]


def _plus_scaled(base: Tensor, scale: float | Tensor, direction: Tensor, sign: int) -> Tensor:
    if not isinstance(scale, Tensor):
        return torch.add(base, direction, alpha=sign * scale)
    if isinstance(base, RowSparse) or isinstance(direction, RowSparse):
        return torch.add(base, direction * scale, alpha=sign)
    return torch.addcmul(base, direction, scale, value=sign)


def average(old: Tensor, kept: float | Tensor, new: Tensor) -> Tensor:
    """Update a running average, of which the share ``kept`` stays."""
    return kept * old + (1 - kept) * new


def root(value: Tensor) -> Tensor:
    r"""Compute :math:`\sqrt{x}`, with all derivatives 0 at :math:`x = 0`.

    The derivative of the root is infinite there, and zero times infinity is NaN: a second moment that is zero,
    as in a row whose gradient is zero, would make every meta-gradient NaN.
    """
    zero = value == 0
    return torch.where(zero, 0, torch.where(zero, 1, value).sqrt())


def strided(call: str, grads: Params, params: Params) -> list[Tensor]:
    """Return the gradients in the order of ``params``; refuse sparse ones, whose update would be dense."""
    for key in params:
        if isinstance(grads[key], RowSparse):
            raise TypeError(
                f"{call}.update: the gradient of {key!r} is RowSparse, and this rule moves every row. Use "
                f"rowwise({call}) for its table, or make the gradient dense by .to_dense()."
            )
    return [grads[key] for key in params]


def _fitting(name: str, key: str, value: float | Tensor, param: Tensor) -> float | Tensor:
    if isinstance(value, Tensor) and value.ndim:
        trailing = param.shape[max(param.ndim - value.ndim, 0) :]
        if value.shape != trailing:
            raise ValueError(
                f"rule.update: {name}[{key!r}] must be a scalar or have the parameter's shape "
                f"{tuple(trailing)}, got {tuple(value.shape)}."
            )
    return value
