"""Other tensors in the places of a module's parameters, for the duration of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn


@contextlib.contextmanager
def replaced(model: nn.Module, values: Mapping[int, Tensor]) -> Iterator[None]:
    """Put tensors into the places of parameters, which are known by their ids: tied weights stay tied.

    :func:`torch.func.functional_call` would do, but where a module occurs twice in a model it leaves the values
    behind in place of the parameters (torch 2.13).
    """
    slots = [
        (module._parameters, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if id(param) in values
    ]
    try:
        for parameters, name, param in slots:
            parameters[name] = values[id(param)]  # type: ignore[assignment]
        yield
    finally:
        for parameters, name, param in slots:
            parameters[name] = param
