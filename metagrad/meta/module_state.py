"""What modules and random generators carry from call to call: noticed, and set back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from metagrad.core.capture import RandomState

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_INTERNAL = {name for name in vars(nn.Module()) if name.startswith("_")}


class ModuleState:
    """Buffers and attributes of modules as they were, and which of them have changed since.

    Args:
        roots: Modules; other objects are passed over.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self.modules = _named_modules(roots)
        self.buffers = [
            (module, where, name, buffer, buffer.detach().clone(), buffer._version)
            for where, module in self.modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.attributes = self._attributes()
        self.noted = self.attributes

    def _attributes(self) -> list[dict[str, tuple[Any, Any]]]:
        return [
            {name: (value, _content(value)) for name, value in vars(module).items() if name not in _INTERNAL}
            for _, module in self.modules
        ]

    def note_attributes(self) -> None:
        """Count changes of attributes from here on: the first call of a module may prepare the others."""
        self.noted = self._attributes()

    def changed(self) -> str | None:
        """Say in a sentence which buffer or attribute has changed."""
        for module, where, name, buffer, before, version in self.buffers:
            # Not by version alone: batch normalisation writes its running statistics without a new one.
            if module._buffers.get(name) is not buffer or _is_written(buffer, before, version):
                return f"{_kind(module, where)} writes its buffer {name!r}, which all tasks share"
        for (where, module), before, after in zip(self.modules, self.noted, self._attributes(), strict=True):
            for name in before.keys() | after.keys():
                if name not in before or name not in after or not _is_same(before[name], after[name]):
                    return f"{_kind(module, where)} changes its attribute {name!r}, which all tasks share"
        return None

    @torch.no_grad()
    def restore(self) -> None:
        """Set buffers and attributes back."""
        for module, _, name, buffer, before, version in self.buffers:
            module._buffers[name] = buffer
            if _is_written(buffer, before, version):
                buffer.copy_(before)
        for (_, module), before in zip(self.modules, self.attributes, strict=True):
            here = vars(module)
            for name in [name for name in here if name not in _INTERNAL and name not in before]:
                del here[name]
            for name, (value, content) in before.items():
                here[name] = value
                _refill(value, content)


def buffer_versions(model: nn.Module) -> list[tuple[int, int]]:
    """Return what changes when a buffer is replaced or written into."""
    return [(id(buffer), buffer._version) for buffer in model.buffers()]


class GeneratorStates:
    """The random generators of torch, Python and NumPy, and those handed to torch by name."""

    def __init__(self) -> None:
        self.all = RandomState()
        self.handed: dict[int, tuple[torch.Generator, Tensor]] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notice which generators are handed to torch functions."""
        with _Handed(self.handed):
            yield

    def torch_has_drawn(self) -> bool:
        """Say whether torch has drawn a random number."""
        return bool(self.handed) or "torch" in self.all.moved()

    def drawn_elsewhere(self) -> str | None:
        """Say in a sentence if Python or NumPy has drawn a random number."""
        for name in sorted(self.all.moved() - {"torch"}):
            return f"the model draws from {name}, which stacked tasks would do once for all of them"
        return None

    def restore(self) -> None:
        """Set all of them back."""
        self.all.restore()
        for generator, state in self.handed.values():
            generator.set_state(state)


class _Handed(TorchFunctionMode):
    def __init__(self, handed: dict[int, tuple[torch.Generator, Tensor]]) -> None:
        super().__init__()
        self.handed = handed

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator) and id(generator) not in self.handed:
            self.handed[id(generator)] = generator, generator.get_state()
        return func(*args, **kwargs)


def _named_modules(roots: Iterable[object]) -> list[tuple[str, nn.Module]]:
    found: dict[int, tuple[str, nn.Module]] = {}
    for root in roots:
        if isinstance(root, nn.Module):
            for name, module in root.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    found.setdefault(id(module), (name, module))
    return list(found.values())


def _kind(module: nn.Module, where: str) -> str:
    return f"{type(module).__name__} ({where or 'the module itself'})"


def _is_written(buffer: Tensor, before: Tensor, version: int) -> bool:
    return buffer._version != version or not torch.equal(buffer, before)


def _content(value: object) -> list | None:
    """Return what a container holds, to be compared by identity."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, (list, set)) else None


def _refill(value: object, content: list | None) -> None:
    """Give a container what it held."""
    if content is None or _are_same(_content(value), content):
        return
    if isinstance(value, dict):
        half = len(content) // 2
        value.clear()
        value.update(zip(content[:half], content[half:], strict=True))
    elif isinstance(value, set):
        value.clear()
        value.update(content)
    elif isinstance(value, list):
        value[:] = content


def _is_same(before: tuple[Any, list | None], after: tuple[Any, list | None]) -> bool:
    if before[0] is after[0]:
        return _are_same(before[1], after[1])
    return _is_equal(before[0], after[0])


def _are_same(before: list | None, after: list | None) -> bool:
    if before is None or after is None:
        return before is after
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
