"""A counter of storages: the bytes of every storage allocated while it is open, and the phase that allocated it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from metagrad.core import _torch
from metagrad.core._torch import FakeTensor, TorchDispatchMode
from metagrad.core.tree import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_COMPONENTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}

# Operations that introduce storages that `torch.tensor` and `torch.load` allocate outside of the dispatcher.
_LIFTS = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default})
_REBUILD = torch.ops.aten.set_.source_Storage_storage_offset


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of `tensor`, or the storages of its components if it is sparse or a wrapper.

    Nothing is yielded for mkldnn tensors and for the zero tensors of forward mode, whose memory torch does not own.
    """
    if _has_own_dispatch(type(tensor)):
        for inner in _wrapped(tensor):
            yield from storages_of(inner)
    elif tensor.layout in _COMPONENTS:
        for component in _COMPONENTS[tensor.layout]:
            yield from storages_of(getattr(tensor, component)())
    elif not tensor.is_mkldnn and not tensor._is_zerotensor():  # type: ignore[attr-defined]
        yield tensor.untyped_storage()


def _has_own_dispatch(cls: type) -> bool:
    return getattr(cls, "__torch_dispatch__", None) is not getattr(torch.Tensor, "__torch_dispatch__")  # noqa: B009


def _wrapped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if isinstance(tensor, FakeTensor):
        return
    if (flatten := getattr(tensor, "__tensor_flatten__", None)) is not None:
        yield from tensors_in([getattr(tensor, name) for name in flatten()[0]])
    else:
        yield from tensors_in(vars(tensor))


class Slot:
    """Live bytes of one phase, now and at the peak of the run."""

    __slots__ = ("_at_peak", "_epoch", "live")

    def __init__(self) -> None:
        self.live: int = 0
        self._at_peak = 0
        self._epoch = -1

    def freeze(self, epoch: int) -> None:
        """Store the live bytes as the bytes at peak number `epoch`, unless they are already stored."""
        if self._epoch != epoch:
            self._at_peak = self.live
            self._epoch = epoch

    def at_peak(self, epoch: int) -> int:
        """Return the bytes at peak number `epoch`. They are the live bytes if nothing has changed since."""
        return self._at_peak if self._epoch == epoch else self.live


class _Known(weakref.ref):
    """Weak reference to a storage in the counter."""

    __slots__ = ("key", "nbytes", "slot")

    key: int
    nbytes: int
    slot: Slot


class StorageCounter:
    """Count the bytes of the storages that operations allocate on `device` from now on, by phase.

    Storages that exist already are not counted, and their release is not subtracted. The peak is attributed
    copy-on-write. A new maximum only increments an epoch number, and a slot stores its bytes at the first change
    after the maximum. The cost of an allocation therefore does not depend on the number of phases.

    Attributes:
        total: Bytes alive.
        allocated: Bytes that were allocated.
        peak: Maximum of `total`.
        window_peak: Maximum of `total` since `reset_window`.
        slot: Slot of the current phase, which counts new storages.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total: int = 0
        self.allocated: int = 0
        self.peak: int = 0
        self.window_peak: int = 0
        self.slot: Slot = Slot()
        self._epoch = 0
        self._known: dict[int, _Known] = {}

    def observe(self, func: object, inputs: object, outputs: object) -> None:
        """Register the storages that `func` allocated, and update the sizes of storages that it resized."""
        old: set[int] | None = None
        for tensor in tensors_in(outputs):
            for storage in storages_of(tensor):
                known = self._known.get(storage._cdata)
                if known is not None:
                    self._resize(known, storage.nbytes())
                elif storage.device == self.device:
                    old = self._keys(func, inputs) if old is None else old
                    if storage._cdata not in old:
                        self._register(storage)

    def at_peak(self, slot: Slot) -> int:
        """Return the bytes of `slot` when `total` was at its peak."""
        return slot.at_peak(self._epoch)

    def reset_window(self) -> None:
        """Start a new `window_peak`."""
        self.window_peak = self.total

    def close(self) -> None:
        """Stop counting. Storages that are freed later have no effect."""
        self._known.clear()

    def _keys(self, func: object, inputs: object) -> set[int]:
        """Return the keys of the storages that `func` did not allocate.

        These are the storages of its inputs, except for the operations that introduce their input.
        """
        if func is _REBUILD:
            return set()
        storages = (storage for tensor in tensors_in(inputs) for storage in storages_of(tensor))
        if func in _LIFTS:
            # Memory that torch does not own, as after `from_numpy`, cannot be resized.
            return {storage._cdata for storage in storages if not storage.resizable()}
        return {storage._cdata for storage in storages}

    def _register(self, storage: torch.UntypedStorage) -> None:
        known = _Known(storage, self._died)
        known.key, known.nbytes, known.slot = storage._cdata, storage.nbytes(), self.slot
        self._known[known.key] = known
        self.allocated += known.nbytes
        self._change(known.slot, known.nbytes)

    def _resize(self, known: _Known, nbytes: int) -> None:
        if known.nbytes != nbytes:
            self._change(known.slot, nbytes - known.nbytes)
            known.nbytes = nbytes

    def _died(self, known: weakref.ref) -> None:
        assert isinstance(known, _Known)
        del self._known[known.key]
        self._change(known.slot, -known.nbytes)

    def _change(self, slot: Slot, nbytes: int) -> None:
        # This runs wherever dropping a reference frees a storage. The updates below drop only integers.
        total = self.total + nbytes
        if total > self.peak:
            self.peak = total
            self._epoch += 1
        else:
            slot.freeze(self._epoch)
        slot.live += nbytes
        self.total = total
        if total > self.window_peak:
            self.window_peak = total


class StorageMode(TorchDispatchMode):
    """Pass the outputs of every operation to a counter.

    A wrapper subclass runs first, so the counter also sees the operations inside the wrapper.
    """

    supports_higher_order_operators = True

    def __init__(self, counter: StorageCounter) -> None:
        super().__init__()
        self.counter = counter

    def _observed(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        # A fake tensor has no memory to count, and it cannot run below its own mode.
        if any(_has_own_dispatch(cls) and not issubclass(cls, FakeTensor) for cls in types):
            return NotImplemented
        # A custom autograd.Function saves its outputs under active function modes, which must not see this call.
        with _torch.without_torch_function():
            outputs = _call(func, args, kwargs or {})
            self.counter.observe(func, (args, kwargs), outputs)
        return outputs


# Assigned after the class, because torch wraps a method of the class body and loads the compiler for it.
StorageMode.__torch_dispatch__ = StorageMode._observed


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Call `func` below a mode, with the kernels for zero tensors.

    Forward mode creates zero tensors. Below any mode, torch 2.13 excludes their kernels, and `mul.Scalar` of a zero
    tensor reads a null pointer. A backward pass through `torch.func.hessian` then crashes the process.
    """
    if not any(isinstance(arg, torch.Tensor) and arg._is_zerotensor() for arg in args):
        return func(*args, **kwargs)
    included = _torch.included_dispatch_keys()
    excluded = _torch.excluded_dispatch_keys().remove(_torch.DispatchKey.ZeroTensor)
    with _torch.force_dispatch_keys(included, excluded):
        return func(*args, **kwargs)
