"""Bytes that the autograd graph stores for backward, counted by saved-tensor hooks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from metagrad.core import _torch
from metagrad.memory.storages import storages_of

if TYPE_CHECKING:
    from collections.abc import Generator


class _Saved:
    """Detached alias that the graph stores instead of a tensor, with the version of the tensor at the save.

    The tensor itself would be a reference cycle through its `grad_fn`. `detach` shares the version counter, so a
    later in-place change is detected.
    """

    __slots__ = ("graph", "serial", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, graph: SavedGraph, serial: int | None) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.graph = graph
        self.serial = serial

    def __del__(self) -> None:
        if self.serial is not None:
            self.graph.forget(self.serial)


class SavedGraph:
    """Count the bytes on `device` that autograd saves for backward while this object is open, each storage once.

    Leaf parameters and their views are not counted, because they are alive without the graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._live: dict[int, tuple[tuple[int, int], ...]] = {}
        self._holders: dict[int, int] = {}
        self._nbytes: dict[int, int] = {}
        self._forgotten: list[int] = []
        self._total = 0
        self.next_serial: int = 0

    def open(self) -> None:
        """Push the hooks.

        Raises:
            RuntimeError: torch does not support hooks here, or other hooks are active and would be hidden.
        """
        if not _torch.saved_tensors_hooks_enabled():
            raise RuntimeError(
                "MemoryTracker: expected to be opened where saved-tensor hooks are allowed, but was opened "
                "inside torch.func.grad or vjp, which refuse them; open it around the transform."
            )
        if _torch.innermost_saved_tensors_hooks(False) is not None:
            raise RuntimeError(
                "MemoryTracker: expected no saved-tensor hooks to be on, but found some "
                "(torch.utils.checkpoint or save_on_cpu), which the tracker's would replace; "
                "open the tracker outside of them."
            )
        self._hooks.__enter__()

    def close(self) -> None:
        """Pop the hooks. Saved tensors stay usable."""
        self._hooks.__exit__()

    def forget(self, serial: int) -> None:
        """Queue the removal of a dropped saved tensor. Safe at any time, in any thread."""
        self._forgotten.append(serial)

    def held(self) -> int:
        """Return the bytes that were saved since `open` and are still held."""
        self._settle()
        return self._total

    def held_since(self, serial: int) -> int:
        """Return the bytes of all saves with number `serial` or higher that are still held.

        A storage counts even if an earlier save also holds it.
        """
        self._settle()
        nbytes: dict[int, int] = {}
        for number in reversed(self._live):
            if number < serial:
                break
            nbytes.update(self._live[number])
        return sum(nbytes.values())

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        # A custom autograd.Function saves under active function modes. They must not see these operations.
        with _torch.without_torch_function():
            parts = () if _is_leaf_parameter(tensor) else self._parts(tensor)
            saved = _Saved(tensor, self, self.next_serial if parts else None)
        if not parts:
            return saved
        self._settle()
        self._live[self.next_serial] = parts
        self.next_serial += 1
        for key, nbytes in parts:
            if key not in self._holders:
                self._holders[key] = 0
                self._nbytes[key] = nbytes
                self._total += nbytes
            self._holders[key] += 1
        return saved

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        with _torch.without_torch_function():
            if saved.tensor._version == saved.version:
                return saved.tensor
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a {saved.tensor.dtype} tensor of shape {tuple(saved.tensor.shape)} is at "
                f"version {saved.tensor._version}; expected version {saved.version} instead."
            )

    def _parts(self, tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
        here = (storage for storage in storages_of(tensor) if storage.device == self._device)
        return tuple((storage._cdata, storage.nbytes()) for storage in here)

    def _settle(self) -> None:
        # A saved tensor may be freed while a dict above is iterated, so `forget` only queues its number.
        while self._forgotten:
            for key, _ in self._live.pop(self._forgotten.pop()):
                self._holders[key] -= 1
                if not self._holders[key]:
                    del self._holders[key]
                    self._total -= self._nbytes.pop(key)

    @contextlib.contextmanager
    def aside(self) -> Generator[None]:
        """Remove the hooks for a ``with`` block, if they are the innermost hooks."""
        top = _torch.innermost_saved_tensors_hooks(False)
        if top is None or top[0] is not self._hooks.pack_hook:
            yield
            return
        self._hooks.__exit__()
        try:
            yield
        finally:
            self._hooks.__enter__()


def _is_leaf_parameter(tensor: torch.Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and base.requires_grad
