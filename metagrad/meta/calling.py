"""Calling a module with other values for its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeAlias

from torch import Tensor, nn

from metagrad.optim.rules import Params

Values: TypeAlias = dict[int, Tensor]
"""Values by the id of the parameter they stand for, so that tied weights stay tied."""


def values_for(model: nn.Module, params: Params) -> Values:
    """Find the parameters that are named, and key their values by identity."""
    return {id(p): params[name] for name, p in model.named_parameters() if name in params}


def call_with(model: nn.Module, values: Values, x: Tensor) -> Tensor:
    """Return ``model(x)`` with other values for some of its parameters.

    :func:`torch.func.functional_call` would do, but where a module occurs twice in a model it leaves the values
    behind in place of the parameters (torch 2.13).
    """
    with _replaced(model, values):
        return model(x)


@contextlib.contextmanager
def _replaced(model: nn.Module, values: Values) -> Iterator[None]:
    replaced = [
        (module._parameters, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if id(param) in values
    ]
    try:
        for slots, name, param in replaced:
            slots[name] = values[id(param)]  # type: ignore[assignment]
        yield
    finally:
        for slots, name, param in replaced:
            slots[name] = param
