"""The modules that a function calls, as they are when it is called: flags, numbers, and which tensor a buffer is.

Modules change while a loss is computed and afterwards: by ``eval()``, another ``p`` of dropout, a counter in
``forward``, ``self.mean = 0.9 * self.mean + ...``. A second run is to find them as the first one did, and to leave no
trace.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from metagrad.core.tree import plain_values

_MOST = 1000  # objects to look at


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """Find the modules that a function can reach: what it is, is bound to, closes over, or names globally."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    waiting: list[object] = [function]
    while waiting and len(seen) < _MOST:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.update((id(module), module) for module in value.modules())
        else:
            waiting.extend(_reached_from(value))
    return list(found.values())


def _reached_from(value: object) -> Iterator[object]:
    if isinstance(value, types.FunctionType):
        if not value.__module__ or not value.__module__.startswith("torch."):
            yield from _names_in(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (list, tuple)):
        yield from (item for item in value[:_MOST] if _may_hold(item))
    elif isinstance(value, dict):
        yield from (item for item in value.values() if _may_hold(item))
    elif _may_hold(value):
        yield from (item for item in getattr(value, "__dict__", {}).values() if _may_hold(item))


def _names_in(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (nn.Module, types.FunctionType, types.MethodType, functools.partial)):
            yield value


def _may_hold(value: object) -> bool:
    """Say whether a value may lead to a module: it is neither plain, nor a type, nor of torch."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind in (list, tuple, dict, types.FunctionType, types.MethodType)
    if kind is functools.partial or isinstance(value, nn.Module):
        return True
    return not kind.__module__.startswith(("torch.", "numpy")) and not isinstance(value, type)


class ModuleState:
    """What modules were when they were called."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.states = [(module, plain_values(module.__dict__), dict(module._buffers)) for module in modules]

    def rebound_buffer(self) -> str | None:
        """Return the name of a buffer that is another tensor than it was."""
        for module, _, buffers in self.states:
            for name, buffer in buffers.items():
                if module._buffers.get(name) is not buffer:
                    return name
        return None

    def buffers(self) -> list[Tensor]:
        """Return all buffers, as they were."""
        return [buffer for _, _, buffers in self.states for buffer in buffers.values() if buffer is not None]

    def is_as_now(self) -> bool:
        """Say whether flags, numbers and buffers are as they were."""
        return self.rebound_buffer() is None and all(
            plain_values(module.__dict__) == plain for module, plain, _ in self.states
        )

    def put_back(self) -> None:
        """Let the modules be as they were."""
        for module, plain, buffers in self.states:
            module.__dict__.update(plain)
            if buffers:
                module._buffers.update(buffers)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Let the modules be as they were, for a while, and then again as they are now."""
        now = [(module, *_held(module)) for module, *_ in self.states]
        try:
            self.put_back()
            yield
        finally:
            for module, attributes, buffers, lists in now:
                _put_back(module.__dict__, attributes)
                if buffers or module._buffers:
                    _put_back(module._buffers, buffers)
                for name, items in lists.items():
                    module.__dict__[name][:] = items


def _held(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, list]]:
    """Return what a module holds: its attributes, its buffers, and what its lists hold."""
    attributes = module.__dict__.copy()
    lists = {name: list(value) for name, value in attributes.items() if type(value) is list}
    return attributes, module._buffers.copy(), lists


def _put_back(namespace: dict[str, Any], values: dict[str, Any]) -> None:
    if list(namespace) != list(values):
        namespace.clear()
    namespace.update(values)
