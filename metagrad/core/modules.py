"""The modules that a function calls, as they are when it is called: flags, numbers, and which tensor a buffer is.

Modules change while a loss is computed and afterwards: by ``eval()``, another ``p`` of dropout, a counter in
``forward``, ``self.mean = 0.9 * self.mean + ...``. A second run is to find them as the first one did, and to leave no
trace.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.core._torch import is_functorch_wrapped

LARGE = 2**14
"""Numbers of a constant, beyond which a loop keeps no copy of it."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_CONTAINERS = {dict, OrderedDict, list, set}
_INTERNAL = {name for name in vars(nn.Module()) if name.startswith("_")}


def check_substitutable(call: str, modules: Iterable[nn.Module]) -> None:
    """Refuse modules in whose calls other parameters cannot be substituted for their own.

    Raises:
        TypeError: There is one that TorchScript has compiled.
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
    return has_memory(tensor) and tensor.numel() > 0 and not tensor.untyped_storage().size()


def has_memory(tensor: Tensor) -> bool:
    """Say whether a tensor has memory of its own, as those of transforms, traces and sparse layouts have not."""
    return not (
        torch.compiler.is_compiling()
        or tensor.is_inference()
        or tensor.layout != torch.strided
        or is_functorch_wrapped(tensor)
    )


def is_sharded(tensor: object) -> bool:
    """Say whether a tensor is a DTensor, without an import of them."""
    return hasattr(tensor, "device_mesh")


class ModuleSnapshot:
    """What modules are: attributes, flags, counters, containers among them, hooks, buffers and their values.

    Parameters are not part of it: a computation takes them as operands.

    Args:
        modules: The modules, each once.
        kept: Copies of buffers by their ids, shared by the snapshots of a loop; None copies no values.
        most: How many numbers a buffer may have to be copied; of a larger one the version is known.
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
        """Set the modules back to what they were, with ``values`` also the buffers that were copied."""
        for contents in self._held:
            for container, content in contents:
                _refill(container, content)
        for _, _, buffer, value in self._buffers if values else ():
            if isinstance(value, Tensor) and not is_as_it_was(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)

    @contextlib.contextmanager
    def restored(self, call: str = "") -> Generator[None]:
        """Set the modules back, with copies of their buffers, within a ``with`` block; undo what happens in it.

        Raises:
            RuntimeError: A buffer of which no copy is kept was written into since.
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
        """Return a module that has changed, and how; None if none has.

        Args:
            since: Attributes are compared with this snapshot of the same modules: the first call of a module may
                prepare the others.
        """
        for module, name, buffer, value in self._buffers:
            if module._buffers.get(name) is not buffer or not is_as_it_was(buffer, value):
                return module, f"writes its buffer {name!r}"
        for module, contents in zip(self.modules, since._held, strict=True):
            if (name := _changed_attribute(module.__dict__, contents)) is not None:
                return module, f"changes its attribute {name!r}"
        return None


def content_of(tensor: Tensor, kept: dict[int, Tensor] | None, most: float = LARGE) -> Tensor | int | None:
    """Return a copy of a constant, the one that is kept if the constant is as it was; of others their version.

    Others are large tensors, and those that require grad. Inference tensors have no version.
    """
    if tensor.requires_grad:
        return tensor._version
    if tensor.is_inference() or tensor.layout != torch.strided:
        return None
    if tensor.numel() > most or kept is None:
        return tensor._version
    copy = kept.get(id(tensor))
    # On an accelerator a comparison would wait for all that is queued there.
    if copy is None or not tensor.is_cpu or not torch.equal(copy, tensor):
        kept[id(tensor)] = copy = tensor.detach().clone()
    return copy


def is_as_it_was(tensor: Tensor, content: Tensor | int | None) -> bool:
    """Return whether a tensor still has a content that :func:`content_of` returned."""
    if isinstance(content, Tensor):
        return torch.equal(content, tensor)
    return content is None or tensor._version == content


def buffer_versions(model: nn.Module) -> list[tuple[int, int]]:
    """Return the identities and versions of buffers: they change when one is replaced or written into."""
    return [(id(buffer), buffer._version) for buffer in model.buffers()]


def _contents(namespace: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the containers that a module consists of, its namespace first, and copies of them."""
    contents: list[tuple[Any, Any]] = [(namespace, namespace.copy())]
    for name, value in namespace.items():
        if type(value) in _CONTAINERS and name != "_parameters" and (value or name not in _INTERNAL):
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
    """Return the name of an attribute that was set, or of a container that was changed."""
    copies = {id(container): content for container, content in contents}
    before = contents[0][1]
    for name in (before.keys() | now.keys()) - _INTERNAL:
        if name not in before or name not in now:
            return name
        if not _is_equal(before[name], now[name]):
            return name
        if (copy := copies.get(id(now[name]))) is not None and not _holds_same(copy, now[name]):
            return name
    return None


def _holds_same(before: Any, now: Any) -> bool:
    if isinstance(before, dict):
        return list(before) == list(now) and _holds_same(list(before.values()), list(now.values()))
    return len(before) == len(now) and all(map(_is_equal, before, now))


def _is_equal(first: object, second: object) -> bool:
    """Return whether values are the same object, or equal plain values, or tuples of such."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if type(first) is tuple:
        return len(first) == len(second) and all(map(_is_equal, first, second))  # type: ignore[arg-type]
    return isinstance(first, _PLAIN) and first == second


def refuse_wrapped(call: str, model: object) -> None:
    """Refuse a model whose wrapper would average the wrong gradients.

    The gradients of inner steps and the products of curvature are taken by `torch.autograd.grad`, which the reducer
    of a `DistributedDataParallel` does not see.

    Raises:
        ValueError: It is such a model.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"{call}: model is a {type(model).__name__}, which averages what reaches .grad, not what is "
            "differentiated here. Pass the module in it, model.module, take batch.shard(), and call "
            "metagrad.distributed.average_gradients after the backward pass."
        )
