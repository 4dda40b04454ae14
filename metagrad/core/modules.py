"""Snapshots of the state of modules: flags, attributes, hooks and buffers.

Modules can change during and after a loss computation. Examples are ``eval()``, a new dropout probability, a counter
in ``forward``, and ``self.mean = 0.9 * self.mean + ...``. A recomputation must start from the original state and
must not change the current state.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.core._torch import is_functorch_wrapped

LARGE = 2**14
"""Maximum number of elements of a constant that a loop copies."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_CONTAINERS = {dict, OrderedDict, list, set}
INTERNAL = {name for name in vars(nn.Module()) if name.startswith("_")}
"""The attributes of every module."""


def check_substitutable(call: str, modules: Iterable[nn.Module]) -> None:
    """Raise an error if the parameters of a module cannot be substituted.

    Raises:
        TypeError: A module is compiled by TorchScript.
        ValueError: A parameter is sharded, or a lazy module is not initialized.
    """
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{call}: TorchScript keeps the parameters of its modules to itself, and others cannot be "
                "substituted for them. Pass the model as it was before torch.jit.script or torch.jit.trace."
            )
        tensors: list[Any] = [*module._parameters.values(), *module._buffers.values()]
        if any(map(nn.parameter.is_lazy, tensors)):
            raise ValueError(
                f"{call}: {type(module).__name__} is not initialized, since the shapes of its parameters depend on "
                "the first input. Call the model once on a batch before."
            )
        kind = type(module).__name__
        refuse_sharded(call, {f"{kind}.{name}": param for name, param in module._parameters.items()})


def called_on(function: Callable[..., Any], x: Any) -> Any:
    """Call ``function(**x)`` for a mapping, ``function(*x)`` for a tuple or list, and ``function(x)`` otherwise."""
    if isinstance(x, Mapping):
        return function(**x)
    return function(*x) if isinstance(x, (tuple, list)) else function(x)


def refuse_sharded(call: str, params: Mapping[str, Any]) -> None:
    """Raise an error if a parameter is sharded over ranks.

    Raises:
        ValueError: A parameter is a DTensor.
    """
    for name, param in params.items():
        if is_sharded(param):
            raise ValueError(
                f"{call}: the parameter {name!r} is a DTensor, as fully_shard makes them, of which this process has "
                f"a part. {_UNSHARDED}"
            )


def refuse_freed(call: str, params: Mapping[str, Any]) -> None:
    """Raise an error if the memory of a parameter is freed, as ``fully_shard`` does after the backward pass.

    Raises:
        ValueError: The storage of a parameter is empty.
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
    """Return whether a tensor has elements but an empty storage."""
    return has_memory(tensor) and tensor.numel() > 0 and not tensor.untyped_storage().size()


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has its own storage. Wrappers of transforms, traces and sparse layouts have none."""
    return not (
        torch.compiler.is_compiling()
        or tensor.is_inference()
        or tensor.layout != torch.strided
        or is_functorch_wrapped(tensor)
    )


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, without importing DTensor."""
    return hasattr(tensor, "device_mesh")


class ModuleSnapshot:
    """Snapshot of modules: attributes, containers in attributes, hooks, and buffers with their values.

    Parameters are not included, because a computation takes them as inputs.

    Args:
        modules: The modules, without duplicates.
        kept: Copies of buffers by id, shared by the snapshots of a loop. If None, buffer values are not recorded.
        most: Maximum number of elements of a copied buffer. For larger buffers, only the version is recorded.
    """

    def __init__(
        self, modules: Iterable[nn.Module], kept: dict[int, Tensor] | None = None, most: float = LARGE
    ) -> None:
        self.modules = list(modules)
        self._held = [_contents(module.__dict__) for module in self.modules]
        self._buffers = [
            (module, name, buffer, content_of(buffer, kept, most))
            for module in (self.modules if kept is not None else ())
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def put_back(self, *, values: bool = False) -> None:
        """Restore the modules. If ``values`` is True, also restore the values of the copied buffers."""
        for contents in self._held:
            for container, content in contents:
                _refill(container, content)
        for _, _, buffer, value in self._buffers if values else ():
            if isinstance(value, Tensor) and not is_as_it_was(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)

    @contextlib.contextmanager
    def restored(self, call: str = "") -> Generator[None]:
        """Context manager that restores the modules with copies of their buffers, and then undoes all changes.

        Raises:
            RuntimeError: A buffer without a copy was modified in place since the snapshot.
        """
        now = ModuleSnapshot(self.modules)
        try:
            self.put_back()
            for module, name, buffer, value in self._buffers:
                if not isinstance(value, Tensor) and not is_as_it_was(buffer, value):
                    raise RuntimeError(
                        f"{call}: the buffer {name!r} of shape {tuple(buffer.shape)} was modified in place between "
                        "the forward pass and its recomputation. Modify a copy."
                    )
                module._buffers[name] = value.clone() if isinstance(value, Tensor) else buffer
            yield
        finally:
            now.put_back()

    def changed(self, since: ModuleSnapshot) -> tuple[nn.Module, str] | None:
        """Return the first changed module and a description of the change, or None.

        Args:
            since: Another snapshot of the same modules, whose attributes are the reference. It may be later than
                this snapshot, because the first call of a module may set attributes.
        """
        for module, name, buffer, value in self._buffers:
            if module._buffers.get(name) is not buffer or not is_as_it_was(buffer, value):
                return module, f"writes its buffer {name!r}"
        for module, contents in zip(self.modules, since._held, strict=True):
            if (name := _changed_attribute(module.__dict__, contents)) is not None:
                return module, f"changes its attribute {name!r}"
        return None


def content_of(tensor: Tensor, kept: dict[int, Tensor] | None, most: float = LARGE) -> Tensor | int | None:
    """Return a copy of a constant, or the version of a tensor that is large or requires grad.

    The copy in ``kept`` is reused if the constant is unchanged. Inference tensors and sparse tensors give None.
    """
    if tensor.requires_grad:
        return tensor._version
    if tensor.is_inference() or tensor.layout != torch.strided:
        return None
    if tensor.numel() > most or kept is None:
        return tensor._version
    copy = kept.get(id(tensor))
    # On an accelerator, the comparison would wait for all queued kernels.
    if copy is None or not tensor.is_cpu or not torch.equal(copy, tensor):
        kept[id(tensor)] = copy = tensor.detach().clone()
    return copy


def is_as_it_was(tensor: Tensor, content: Tensor | int | None) -> bool:
    """Return whether a tensor still has the content that :func:`content_of` returned."""
    if isinstance(content, Tensor):
        return torch.equal(content, tensor)
    return content is None or tensor._version == content


def buffer_versions(model: nn.Module) -> list[tuple[int, int]]:
    """Return the id and version of each buffer. They change if a buffer is replaced or modified in place."""
    return [(id(buffer), buffer._version) for buffer in model.buffers()]


def _contents(namespace: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the namespace of a module and the containers in it, each with a copy."""
    contents: list[tuple[Any, Any]] = [(namespace, namespace.copy())]
    for name, value in namespace.items():
        if type(value) in _CONTAINERS and name != "_parameters" and (value or name not in INTERNAL):
            contents.append((value, value.copy()))
    return contents


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
        return
    if isinstance(container, set) or container.keys() != content.keys():
        container.clear()
    container.update(content)


def _changed_attribute(now: dict[str, Any], contents: list[tuple[Any, Any]]) -> str | None:
    """Return the name of an attribute that was set or whose container was modified, or None."""
    copies = {id(container): content for container, content in contents}
    before = contents[0][1]
    for name in (before.keys() | now.keys()) - INTERNAL:
        if name not in before or name not in now:
            return name
        if not _is_equal(copies.get(id(before[name]), before[name]), now[name]):
            return name
    return None


def _is_equal(first: Any, second: Any) -> bool:
    """Return whether two values are the same object, equal plain values, or containers of such values."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(map(_is_equal, first.values(), second.values()))
    if type(first) is tuple or type(first) in _CONTAINERS:
        return len(first) == len(second) and all(map(_is_equal, first, second))
    return isinstance(first, _PLAIN) and first == second


def refuse_wrapped(call: str, model: object) -> None:
    """Raise an error if the wrapper of a model would average the wrong gradients.

    Inner gradients and curvature products use ``torch.autograd.grad``. ``DistributedDataParallel`` averages only
    gradients that are accumulated into ``.grad``.

    Raises:
        ValueError: The model is a ``DistributedDataParallel``.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"{call}: model is a {type(model).__name__}, which averages what reaches .grad, not what is "
            "differentiated here. Pass the module in it, model.module, take batch.shard(), and call "
            "metagrad.distributed.average_gradients after the backward pass."
        )
