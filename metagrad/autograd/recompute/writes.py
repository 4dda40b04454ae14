"""What a function writes into that it did not make, known by storage: views, ``.data`` and ``detach()`` share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from metagrad.core._torch import is_functorch_wrapped
from metagrad.core.writes import ALIASING_NAMES


class Writes:
    """The storages that a call writes into, or lets others write into, and what they held before.

    Attributes:
        written: Storages that torch functions wrote into; a weak reference keeps their identity from being given
            to another once they are freed.
        before: Copies of those that the call read and did not make.
    """

    def __init__(self) -> None:
        self.written: dict[int, StorageWeakRef] = {}
        self.before: dict[int, torch.UntypedStorage] = {}
        self._known: dict[int, None] = {}

    def know(self, tensor: Tensor) -> None:
        """Note the storage of a tensor that the call reads: before it is written into, it is copied."""
        key = storage_of(tensor)
        if key is not None:
            self._known[key] = None

    def protect(self, function: Callable, targets: Iterable[Tensor]) -> None:
        """Copy what a torch function is about to write into, where the call did not make it."""
        is_alias = getattr(function, "__name__", "") in ALIASING_NAMES
        for tensor in targets:
            key = storage_of(tensor)
            if key is None:
                continue
            if not is_alias and key not in self.written:
                self.written[key] = StorageWeakRef(tensor.untyped_storage())
            if key in self._known and key not in self.before:
                self.before[key] = tensor.untyped_storage().clone()

    def reach(self, tensor: Tensor) -> bool:
        """Say whether a torch function wrote into the storage of a tensor."""
        return bool(self.written) and storage_of(tensor) in self.written

    def keep_changes(self, read: Iterable[tuple[Tensor, bool]]) -> None:
        """Forget the copies of storages that no read tensor shows a change of.

        Args:
            read: The tensors that were read, and whether their versions are as they were. Batch normalisation
                writes its running statistics without a new version, so what they hold is compared as well.
        """
        changed = set()
        for tensor, is_as_read in read:
            key = storage_of(tensor)
            if key in self.before and (not is_as_read or not _same_bytes(self.before[key], tensor)):
                changed.add(key)
        self.before = {key: copy for key, copy in self.before.items() if key in changed}

    def copies(self) -> Copies:
        """Return what was written into as it was before, to be written into again."""
        return Copies({key: copy.clone() for key, copy in self.before.items()})


class Copies:
    """Storages to take in the place of others."""

    def __init__(self, storages: dict[int, torch.UntypedStorage]) -> None:
        self.storages = storages

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor of the same strides on the copy of its storage; None if there is none."""
        storage = self.storages.get(storage_of(tensor)) if self.storages else None  # type: ignore[arg-type]
        if storage is None:
            return None
        with torch.no_grad():
            return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[arg-type]


def storage_of(tensor: Tensor) -> int | None:
    """Identify the storage of a tensor; None where it has none of its own."""
    if is_functorch_wrapped(tensor) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()._cdata


def _same_bytes(copy: torch.UntypedStorage, tensor: Tensor) -> bool:
    now = tensor.untyped_storage()
    if now.nbytes() != copy.nbytes():
        return False
    views = (torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(s) for s in (copy, now))  # type: ignore[call-overload]
    return torch.equal(*views)
