"""Objects that a function can reach: modules, random generators, and the places of tensors."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from metagrad.core.modules import INTERNAL

_MOST = 1000  # maximum number of visited objects, and of items per list
_HOLDERS = (list, tuple, dict, types.FunctionType, types.MethodType)


class Place(NamedTuple):
    """The location of a value in a container or object.

    Attributes:
        holder: The dict, list or object that holds the value. It is a tuple if there is a parent.
        key: Dict key, index or attribute name of the value.
        parent: The place of the tuple, or None if the holder is not a tuple.
    """

    holder: Any
    key: Any
    parent: Place | None = None

    def put(self, value: object) -> None:
        """Set the value at this place."""
        if self.parent is not None:
            items = list(self.parent.get())
            items[self.key] = value
            kind = type(self.holder)
            self.parent.put(kind(*items) if hasattr(kind, "_fields") else kind(items))
        elif isinstance(self.holder, (dict, list)):
            self.holder[self.key] = value
        elif isinstance(self.holder, functools.partial):
            part: Any = self.holder
            part.__setstate__((part.func, value, part.keywords, part.__dict__))
        else:
            setattr(self.holder, self.key, value)

    def get(self) -> Any:
        """Return the value at this place."""
        if self.parent is not None:
            return self.parent.get()[self.key]
        if isinstance(self.holder, dict):
            return dict.__getitem__(
                self.holder, self.key
            )  # bypass the method of a subclass, which may record the read
        if isinstance(self.holder, list):
            return self.holder[self.key]
        return getattr(self.holder, self.key)


class ReachableObjects:
    """Objects that a function can reach: through ``__self__``, closures, defaults and the globals that it names.

    Attributes:
        modules: Modules, without duplicates.
        generators: Torch generators.
        tensors: Tensors with their places.
        cells: Closure cells.
        libraries: Libraries whose random generators the calls of a loop have used, or None before the first call.
        contents: Copies of small constants by id, shared by the calls of a loop.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.modules: list[nn.Module] = []
        self.generators: list[torch.Generator] = []
        self.tensors: list[tuple[Place, Tensor]] = []
        self.cells: list[types.CellType] = []
        self.libraries: set[str] | None = None
        self.contents: dict[int, Tensor] = {}
        seen: set[int] = set()
        waiting: list[tuple[Place | None, object]] = [(None, function)]
        while waiting and len(seen) < _MOST:
            place, value = waiting.pop()
            if isinstance(value, Tensor):
                if place is not None:
                    self.tensors.append((place, value))
            elif id(value) not in seen:
                seen.add(id(value))
                waiting.extend(self._parts(place, value, seen))

    def _parts(self, place: Place | None, value: Any, seen: set[int]) -> Iterator[tuple[Place, object]]:
        if isinstance(value, nn.Module):
            for module in value.modules():
                if module is value or id(module) not in seen:
                    seen.add(id(module))
                    self.modules.append(module)
                    yield from _of_module(module)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, types.FunctionType):
            if not (value.__module__ or "").startswith("torch."):
                yield from self._of_function(value)
        elif isinstance(value, types.MethodType):
            yield Place(value, "__self__"), value.__self__
            yield Place(value, "__func__"), value.__func__
        elif isinstance(value, functools.partial):
            yield Place(value, "func"), value.func
            yield Place(value, "args"), value.args
            yield from _entries(value.keywords)
        elif isinstance(value, dict):
            yield from _entries(value)
        elif isinstance(value, list):
            yield from ((Place(value, i), item) for i, item in enumerate(value[:_MOST]) if _may_hold(item))
        elif isinstance(value, tuple):
            yield from ((Place(value, i, place), item) for i, item in enumerate(value) if _may_hold(item))
        elif isinstance(value, type):
            yield from ((Place(value, name), item) for name, item in vars(value).items() if _may_hold(item))
        else:
            yield from _entries(getattr(value, "__dict__", {}))

    def _of_function(self, function: types.FunctionType) -> Iterator[tuple[Place, object]]:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield Place(cell, "cell_contents"), cell.cell_contents
                self.cells.append(cell)
        if function.__defaults__:
            yield Place(function, "__defaults__"), function.__defaults__
        yield from _entries(function.__kwdefaults__ or {})
        for name in _global_names(function.__code__):
            value = function.__globals__.get(name)
            if _may_hold(value):
                yield Place(function.__globals__, name), value


def _of_module(module: nn.Module) -> Iterator[tuple[Place, object]]:
    yield from _entries(module._parameters)
    for name, value in module.__dict__.items():
        if name not in INTERNAL and _may_hold(value):
            yield Place(module.__dict__, name), value


def _entries(namespace: dict[Any, Any]) -> Iterator[tuple[Place, object]]:
    return ((Place(namespace, key), value) for key, value in namespace.items() if _may_hold(value))


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    inner = (_global_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def _may_hold(value: object) -> bool:
    """Return whether a value is or may contain a tensor, a module or a generator."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind in _HOLDERS
    if isinstance(value, (Tensor, nn.Module, torch.Generator, functools.partial)):
        return True
    return not kind.__module__.startswith(("torch.", "numpy")) and not isinstance(value, type)


@contextlib.contextmanager
def placed(values: Iterable[tuple[Place, object]]) -> Generator[None]:
    """Context manager that sets other values at some places. Places that no longer exist are skipped.

    Raises:
        RuntimeError: Another thread has claimed one of the places.
    """
    before: list[tuple[Place, object]] = []
    claims: list[_Claim] = []
    try:
        for place, value in values:
            with contextlib.suppress(LookupError, AttributeError, ValueError):
                now = place.get()
                if now is not value:
                    _claim(place, claims)
                    place.put(value)
                    before.append((place, now))
        yield
    finally:
        for place, value in reversed(before):
            place.put(value)
        _release(claims)


@contextlib.contextmanager
def claimed(places: Iterable[Place]) -> Generator[None]:
    """Context manager that prevents other threads from setting values at some places.

    Raises:
        RuntimeError: Another thread has claimed one of the places.
    """
    claims: list[_Claim] = []
    try:
        for place in places:
            _claim(place, claims)
        yield
    finally:
        _release(claims)


_Claim: TypeAlias = "tuple[int, Hashable]"
_owners: dict[_Claim, tuple[int, list[_Claim]]] = {}


def _claim(place: Place, claims: list[_Claim]) -> None:
    """Make this thread the owner of a place, and append a new claim to ``claims``.

    Backward threads of autograd, which run on an accelerator, may use places that another thread has claimed.
    """
    if torch.compiler.is_compiling():
        return
    claim, me = (id(place.holder), place.key), threading.get_ident()
    own = (me, claims)
    owner = _owners.setdefault(claim, own)  # atomic
    if owner is own:
        claims.append(claim)
    elif owner[0] != me and any(thread.ident == me for thread in threading.enumerate()):
        raise RuntimeError(
            "metagrad: another thread computes with this model, whose weights are replaced meanwhile. Give each "
            "thread a copy of the model, copy.deepcopy(model), or call it in one thread."
        )


def _release(claims: list[_Claim]) -> None:
    for claim in claims:
        _owners.pop(claim, None)


def on_the_stack(*functions: Callable[..., Any], within: types.FrameType | None = None) -> bool:
    """Return whether one of some Python functions is on the call stack of this thread, within the call of a frame."""
    codes = {getattr(function, "__code__", None) for function in functions}
    frame: types.FrameType | None = sys._getframe()
    while frame is not within and frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not within and frame is not None
