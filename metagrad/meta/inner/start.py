"""Task-specific starts: values that parameters start from in each task, instead of the meta-parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from metagrad.core.structured import restored
from metagrad.core.tree import as_variable
from metagrad.meta.objective.tasks import Tasks
from metagrad.meta.objective.vmap import substituted, values_for, vmapped
from metagrad.meta.selection import parameters_of
from metagrad.optim.rules import Params
from metagrad.sparse.tables.embedding import embedding

StartFn: TypeAlias = "Callable[[Any, Any, Any], Tensor | Mapping[str, Tensor]]"
"""The model at the meta-parameters, support inputs and targets of one task to values of parameters."""

Start: TypeAlias = "StartFn | Mapping[str, str | StartFn]"
"""A function that returns values by name, or "zeros" or a function for each name or pattern."""

_CALL = "MAML(..., start)"


@dataclass(frozen=True)
class OwnStart:
    """The task-specific starts of some parameters: zeros, or functions of the support examples.

    Attributes:
        zeros: The names of those that start at zero.
        functions: Functions that compute starts, each with the names of its parameters, or None if it returns names.
        sparse: The names of tables of which tasks have rows, to adapt them or to share them.
    """

    zeros: tuple[str, ...]
    functions: tuple[tuple[tuple[str, ...] | None, StartFn], ...]
    sparse: tuple[str, ...]

    @property
    def modules(self) -> list[nn.Module]:
        """The functions that are modules, whose parameters are learned."""
        return [function for _, function in self.functions if isinstance(function, nn.Module)]

    def check(self, model: nn.Module, tasks: Tasks) -> None:
        """Let functions check all tasks, which they cannot do inside a vmap."""
        for _, function in self.functions:
            if (check := getattr(function, "check", None)) is not None:
                check(model, restored(tasks.support_x), restored(tasks.support_y))

    def values(self, model: nn.Module, params: Params, tasks: Tasks, *, stacked: bool) -> Params:
        """Return what parameters start from, to be differentiated with respect to in any grad mode.

        Args:
            model: The model.
            params: The meta-parameters that are adapted.
            tasks: Tasks, or one without an axis of its own.
            stacked: Whether there is that axis, in front.
        """
        shape = (tasks.count,) if stacked else ()
        found = {name: params[name].new_zeros((*shape, *params[name].shape)) for name in self.zeros}
        if self.functions:
            tables = {name: embedding(rows, params[name]) for name, rows in tasks.rows.items()}
            compute = functools.partial(self._computed, model, params)
            compute = vmapped(compute) if stacked else compute
            found |= compute(tasks.rows, tables, tasks.support_x, tasks.support_y)
        return {name: to_differentiate(value, params[name]) for name, value in found.items()}

    def _computed(
        self, model: nn.Module, params: Params, rows: Params, tables: Params, x: Any, y: Any
    ) -> Params:
        """Call the functions for one task."""
        found: Params = {}
        with substituted(model, values_for(model, {**params, **tables}, rows, self.sparse)):
            for names, function in self.functions:
                values = _by_name(function(model, restored(x), restored(y)), names)
                _check_names(values, found, self, params)
                found |= {name: _fitting(name, value, params[name]) for name, value in values.items()}
        return found


def own_start(
    start: Start | None, model: nn.Module, params: Params, sparse: Iterable[str]
) -> OwnStart | None:
    """Read ``start=``; refuse what fits none of the parameters that are adapted.

    Args:
        start: The argument.
        model: The model.
        params: The parameters that are adapted, by name.
        sparse: The names of tables of which tasks have rows.
    """
    if start is None:
        return None
    if not isinstance(start, Mapping):
        if not callable(start):
            raise TypeError(
                f'{_CALL}: expected a function (model, x, y), or a mapping of names to "zeros" or functions, got '
                f"{start!r}."
            )
        return OwnStart((), ((None, start),), tuple(sparse))
    if any(isinstance(value, nn.Module) for value in start.values()):
        raise TypeError(
            f"{_CALL}: a module among the values of a mapping would not be a part of MAML. Pass the module as start= "
            "itself, and let it return values by name."
        )
    zeros: list[str] = []
    functions: list[tuple[tuple[str, ...], StartFn]] = []
    for pattern, value in start.items():
        if value != "zeros" and not callable(value):
            raise TypeError(
                f'{_CALL}: expected "zeros" or a function (model, x, y) for {pattern!r}, got {value!r}.'
            )
        found = parameters_of(_CALL, model, pattern, list(params), "adapt")
        names = tuple(name for name in params if name in found)
        _refuse_twice(names, [*zeros, *(name for own, _ in functions for name in own)])
        _refuse_tables(names, sparse)
        if value == "zeros":
            zeros += names
        else:
            functions.append((names, value))  # type: ignore[reportArgumentType]
    return OwnStart(tuple(zeros), tuple(functions), tuple(sparse))


def _refuse_twice(names: Iterable[str], taken: Iterable[str]) -> None:
    if twice := set(names) & set(taken):
        raise ValueError(f"{_CALL}: {min(twice)!r} has two starts; give it one.")


def _refuse_tables(names: Iterable[str], sparse: Iterable[str]) -> None:
    if tables := set(names) & set(sparse):
        raise ValueError(
            f"{_CALL}: {min(tables)!r} is in sparse=, and tasks adapt rows of it, which start from the table. Leave "
            "it out of one of the two."
        )


def _by_name(values: object, names: tuple[str, ...] | None) -> Params:
    """Return what a function gave by the names of parameters."""
    if isinstance(values, Tensor) and names is not None and len(names) == 1:
        return {names[0]: values}
    if not isinstance(values, Mapping) or not all(isinstance(value, Tensor) for value in values.values()):
        wanted = (
            "a mapping of names to tensors" if names is None else f"tensors for {', '.join(names)} by name"
        )
        raise TypeError(f"{_CALL}: the function must return {wanted}, got a {type(values).__name__}.")
    if names is not None and set(values) != set(names):
        raise ValueError(
            f"{_CALL}: the function must return values for {', '.join(names)}, got them for "
            f"{', '.join(map(str, values))}."
        )
    return dict(values)


def _check_names(values: Params, found: Params, start: OwnStart, params: Params) -> None:
    for name in values:
        if name not in params:
            raise ValueError(
                f"{_CALL}: the function returns a value for {name!r}, which is none of the parameters that are "
                f"adapted: {', '.join(params)}."
            )
    _refuse_twice(values, [*found, *start.zeros])
    _refuse_tables(values, start.sparse)


def _fitting(name: str, value: Tensor, param: Tensor) -> Tensor:
    """Return a value in the dtype of its parameter, from which autocast deviates; refuse one of another form."""
    if value.shape != param.shape:
        raise ValueError(
            f"{_CALL}: {name!r} is {tuple(param.shape)}, but the function returns {tuple(value.shape)} for a task."
        )
    if torch.is_autocast_enabled(param.device.type):
        value = value.to(param.dtype)
    if value.dtype != param.dtype or value.device != param.device:
        raise ValueError(
            f"{_CALL}: {name!r} is {param.dtype} on {param.device}, but the function returns {value.dtype} on "
            f"{value.device}."
        )
    return value


def to_differentiate(value: Tensor, param: Tensor) -> Tensor:
    """Return a value ``[..., *param.shape]`` as a variable of its own, apart from what it was computed of."""
    if torch.compiler.is_compiling():
        return value
    if value.requires_grad and torch.is_grad_enabled():
        return value.view_as(value)
    return as_variable(value, param)
