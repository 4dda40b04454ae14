"""The modules that a function calls, as they are when it is called: flags, numbers, and which tensor a buffer is.

Modules change while a loss is computed and afterwards: by ``eval()``, another ``p`` of dropout, a counter in
``forward``, ``self.mean = 0.9 * self.mean + ...``. A second run is to find them as the first one did, and to leave no
trace.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.core._torch import FakeTensor, is_functorch_wrapped, named_modules, without_torch_function
from metagrad.core.tree import ATOMS

_MOST = 1000  # objects to look at
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_INTERNAL = {name for name in vars(nn.Module()) if name.startswith("_")}
_CONTAINERS = {dict, OrderedDict, list, set}
_LARGE = 2**14  # numbers of a constant, beyond which no copy of it is kept
_TABLES = [
    name
    for name, table in vars(nn.Module()).items()
    if isinstance(table, dict) and name != "_parameters" and "state_dict" not in name
]
"""The dicts of a module that say what a call of it does: buffers, submodules and hooks. Parameters are operands."""


def check_substitutable(call: str, modules: Iterable[nn.Module]) -> None:
    """Refuse modules in whose calls other parameters cannot be substituted for their own.

    Raises:
        TypeError: There is one that TorchScript has compiled.
        ValueError: A parameter is sharded.
    """
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{call}: TorchScript keeps the parameters of its modules to itself, and others cannot be "
                "substituted for them. Pass the model as it was before torch.jit.script or torch.jit.trace."
            )
        if any(map(is_sharded, module._parameters.values())):
            kind = type(module).__name__
            refuse_sharded(call, {f"{kind}.{name}": param for name, param in module._parameters.items()})


def refuse_sharded(call: str, params: Mapping[str, Any]) -> None:
    """Refuse DTensors, of which the process has a part.

    Raises:
        ValueError: A parameter is one.
    """
    for name, param in params.items():
        if is_sharded(param):
            raise ValueError(
                f"{call}: the parameter {name!r} is a DTensor, as fully_shard makes them, of which this process has "
                f"a part. {_UNSHARDED}"
            )


def refuse_freed(call: str, params: Mapping[str, Any]) -> None:
    """Refuse parameters whose memory was given back, as fully_shard does once their gradients are there.

    Raises:
        ValueError: A parameter is one.
    """
    for name, param in params.items():
        if is_freed(param):
            raise ValueError(
                f"{call}: the memory of the parameter {name!r} is freed, as fully_shard does in a backward pass, and "
                f"second derivatives read it again. {_UNSHARDED}"
            )


_UNSHARDED = (
    "Pass the model as it was before fully_shard, give each process a share of the data, and average the gradients "
    "by metagrad.distributed.average_gradients, and the products of curvature operators by curvature.Averaged."
)


def is_freed(tensor: Tensor) -> bool:
    """Say whether a tensor has elements, and its storage has none."""
    if torch.compiler.is_compiling():
        return False
    with without_torch_function():  # who records a call would expect writes to the storage
        return has_memory(tensor) and tensor.numel() > 0 and not tensor.untyped_storage().size()


def has_memory(tensor: Tensor) -> bool:
    """Say whether a tensor has memory of its own, as those of transforms, traces and sparse layouts have not."""
    return not (
        torch.compiler.is_compiling()
        or tensor.is_inference()
        or tensor.layout != torch.strided
        or is_functorch_wrapped(tensor)
        or isinstance(tensor, FakeTensor)
    )


def is_sharded(tensor: object) -> bool:
    """Say whether a tensor is a DTensor, without an import of them."""
    return hasattr(tensor, "device_mesh")


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """Find the modules that a function can reach: itself, its ``__self__``, its closure and the globals it names."""
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


def captured_values(function: types.FunctionType) -> Iterator[object]:
    """Yield what a function has closed over, and its defaults."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from function.__defaults__ or ()


def _names_in(function: types.FunctionType) -> Iterator[object]:
    yield from captured_values(function)
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


class ModuleSnapshot:
    """What modules are: attributes, flags, counters, containers among them, hooks, buffers and their values.

    Parameters are not part of it: a computation takes them as operands.

    Args:
        modules: The modules, each once.
        kept: Copies of buffers by their ids, shared by the snapshots of a loop; None copies no values.
    """

    def __init__(self, modules: Iterable[nn.Module], kept: dict[int, Tensor] | None = None) -> None:
        self.modules = list(modules)
        self._held: list[tuple[Any, Any]] = []
        for module in self.modules:
            namespace = module.__dict__
            self._held.append((namespace, namespace.copy()))
            for name, value in namespace.items():
                if type(value) in _CONTAINERS and name != "_parameters" and (value or name not in _INTERNAL):
                    self._held.append((value, value.copy()))
        self._buffers: list[tuple[dict[str, Any], str, Tensor, Tensor | int | None]] = []
        if kept is not None:
            self._buffers = [
                (module._buffers, name, buffer, content_of(buffer, kept))
                for module in self.modules
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]

    def put_back(self) -> None:
        """Set the modules back to what they were, but for the values of buffers."""
        for container, content in self._held:
            _refill(container, content)

    @contextlib.contextmanager
    def restored(self, call: str = "") -> Generator[None]:
        """Set the modules back, with copies of their buffers, within a ``with`` block; undo what happens in it.

        Raises:
            RuntimeError: A large buffer, of which no copy is kept, was written into since.
        """
        now = ModuleSnapshot(self.modules)
        try:
            self.put_back()
            for table, name, buffer, value in self._buffers:
                if isinstance(value, int) and buffer._version != value:
                    raise RuntimeError(
                        f"{call}: the buffer {name!r} of shape {tuple(buffer.shape)} was modified in place between "
                        "the forward pass and its recomputation. Modify a copy."
                    )
                table[name] = value.clone() if isinstance(value, Tensor) else buffer
            yield
        finally:
            now.put_back()


def content_of(tensor: Tensor, kept: dict[int, Tensor]) -> Tensor | int | None:
    """Return a copy of a constant, the one that is kept if the constant is as it was; of others their version.

    Others are large tensors, and those that require grad. Inference tensors have no version.
    """
    if tensor.is_inference() or tensor.layout != torch.strided:
        return None
    if tensor.requires_grad or tensor.numel() > _LARGE:
        return tensor._version
    copy = kept.get(id(tensor))
    if copy is None or not torch.equal(copy, tensor):
        kept[id(tensor)] = copy = tensor.detach().clone()
    return copy


def is_as_it_was(tensor: Tensor, content: Tensor | int | None) -> bool:
    """Return whether a tensor still has a content that :func:`content_of` returned."""
    if isinstance(content, Tensor):
        return torch.equal(content, tensor)
    return content is None or tensor._version == content


class ModuleState:
    """The flags, numbers and buffers of modules, and constant tensors, as they were when the modules were called."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.states = [(module, _constants(module), dict(module._buffers)) for module in modules]
        self.tables: list[dict[str, dict[str, Any]]] = []

    def settle(self) -> None:
        """Note submodules and hooks too; after a call, since the first one may prepare the others."""
        self.tables = [_tables(module) for module, *_ in self.states]

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
        """Say whether all that was noted is as it was."""
        modules = [module for module, *_ in self.states]
        return (
            self.rebound_buffer() is None
            and all(_hold_same(constants, _constants(module)) for module, constants, _ in self.states)
            and all(map(_have_same, self.tables, map(_tables, modules)))
        )

    def put_back(self) -> None:
        """Set the modules back to what they were."""
        for (module, *_), tables in zip(self.states, self.tables, strict=False):
            _refill_tables(module, tables)
        for module, constants, buffers in self.states:  # as before a call, which may bind others
            module.__dict__.update(constants)
            if buffers:
                module._buffers.update(buffers)

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Set the modules back within a ``with`` block; afterwards they are again as they are now."""
        now = ModuleContents((module for module, *_ in self.states), kinds=(list,))
        try:
            self.put_back()
            yield
        finally:
            now.put_back()


class ModuleContents:
    """What modules hold: their attributes, their ``_TABLES``, and the entries of containers of some kinds."""

    def __init__(self, modules: Iterable[nn.Module], kinds: tuple[type, ...] = (list, dict, set)) -> None:
        self.held = [
            (module, module.__dict__.copy(), _tables(module), _entries(module, kinds)) for module in modules
        ]

    def put_back(self) -> None:
        """Set the modules back to these contents."""
        for module, attributes, tables, entries in self.held:
            _put_back(module.__dict__, attributes)
            _refill_tables(module, tables)
            for name, content in entries.items():
                _refill_values(attributes[name], content)


class WatchedModules(ModuleContents):
    """What modules hold, down to the values of buffers: changes are found, and can be undone.

    Args:
        roots: Modules; other objects are passed over.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self.names = _names_of(roots)
        super().__init__(self.names)
        self.noted: ModuleContents = self
        self.values = [
            (module, name, buffer, buffer.detach().clone(), buffer._version)
            for module, _, tables, _ in self.held
            for name, buffer in tables.get("_buffers", {}).items()
            if buffer is not None
        ]

    def note_attributes(self) -> None:
        """Count changes of attributes from here on: the first call of a module may prepare the others."""
        self.noted = ModuleContents(self.names)

    def changed(self) -> str | None:
        """Say in a sentence which buffer or attribute has changed."""
        for module, name, buffer, before, version in self.values:
            # Not by version alone: batch normalisation writes its running statistics without a new one.
            if module._buffers.get(name) is not buffer or _is_written(buffer, before, version):
                return f"{self._kind(module)} writes its buffer {name!r}, which all tasks share"
        for before, after in zip(self.noted.held, ModuleContents(self.names).held, strict=True):
            if (name := _changed_attribute(before, after)) is not None:
                return f"{self._kind(before[0])} changes its attribute {name!r}, which all tasks share"
        return None

    def _kind(self, module: nn.Module) -> str:
        return f"{type(module).__name__} ({self.names[module] or 'the module itself'})"

    @torch.no_grad()
    def put_back(self) -> None:
        """Set the modules back to these contents, and the buffers to their values."""
        super().put_back()
        for _, _, buffer, before, version in self.values:
            if _is_written(buffer, before, version):
                buffer.copy_(before)


def buffer_versions(model: nn.Module) -> list[tuple[int, int]]:
    """Return the identities and versions of buffers: they change when one is replaced or written into."""
    return [(id(buffer), buffer._version) for buffer in model.buffers()]


def _constants(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are numbers, strings and the like, or tensors without a graph."""
    return {
        name: value
        for name, value in module.__dict__.items()
        if type(value) in ATOMS or (type(value) is Tensor and value.grad_fn is None)
    }


def _tables(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return copies of the ``_TABLES`` of a module that are not empty."""
    namespace = module.__dict__
    return {name: table.copy() for name in _TABLES if (table := namespace.get(name))}


def _refill_tables(module: nn.Module, tables: Mapping[str, dict[str, Any]]) -> None:
    for name in _TABLES:
        table: dict[str, Any] | None = module.__dict__.get(name)
        if table is not None and (table or name in tables):
            _put_back(table, tables.get(name, {}))


def _have_same(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> bool:
    return before.keys() == after.keys() and all(map(_hold_same, before.values(), after.values()))


def _hold_same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Say whether the entries are the same objects, or equal numbers, strings and the like."""
    return before.keys() == after.keys() and all(
        value is after[name] or _is_equal(value, after[name]) for name, value in before.items()
    )


def _put_back(namespace: dict[str, Any], values: dict[str, Any]) -> None:
    if list(namespace) != list(values):
        namespace.clear()
    namespace.update(values)


def _names_of(roots: Iterable[object]) -> dict[nn.Module, str]:
    found: dict[nn.Module, str] = {}
    for root in roots:
        for name, module in named_modules(root) if isinstance(root, nn.Module) else ():
            if not isinstance(module, torch.jit.ScriptModule):
                found.setdefault(module, name)
    return found


def _is_written(buffer: Tensor, before: Tensor, version: int) -> bool:
    return buffer._version != version or not torch.equal(buffer, before)


def _entries(module: nn.Module, kinds: tuple[type, ...]) -> dict[str, list[Any]]:
    """Return what the containers among a module's attributes hold, to be compared by identity."""
    return {
        name: _content(value)
        for name, value in module.__dict__.items()
        if isinstance(value, kinds) and name not in _INTERNAL
    }


def _content(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
        return
    if (isinstance(container, dict) and container.keys() != content.keys()) or isinstance(container, set):
        container.clear()
    container.update(content)


def _refill_values(value: Any, content: list) -> None:
    """Set a container back to what it held."""
    if _are_same(_content(value), content):
        return
    if isinstance(value, list):
        value[:] = content
        return
    half = len(content) // 2
    items = zip(content[:half], content[half:], strict=True) if isinstance(value, dict) else content
    value.clear()
    value.update(items)


def _changed_attribute(first: tuple[Any, ...], second: tuple[Any, ...]) -> str | None:
    """Return the name of an attribute of a module that has changed."""
    (_, before, _, entries), (_, after, _, others) = first, second
    for name in (before.keys() | after.keys()) - _INTERNAL:
        if name not in before or name not in after:
            return name
        same = before[name] is after[name]
        if not (
            _are_same(entries.get(name, []), others.get(name, []))
            if same
            else _is_equal(before[name], after[name])
        ):
            return name
    return None


def _are_same(before: list, after: list) -> bool:
    return len(before) == len(after) and all(
        a is b or _is_equal(a, b) for a, b in zip(before, after, strict=True)
    )


def _is_equal(a: object, b: object) -> bool:
    """Compare values that are plain, and tuples of such."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(map(_is_equal, a, b))  # type: ignore[arg-type]
    return isinstance(a, _PLAIN) and a == b
