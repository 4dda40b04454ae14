"""Fingerprints of the results of a call, to compare them with those of a recomputation.

A fingerprint has the shape, the dtype and a few entries of each tensor, and, for tensors of up to 2**14 entries, the
sum of all. So it takes microseconds and little memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from metagrad.core._torch import (
    disabled_torch_dispatch,
    flattened,
    from_numpy,
    is_functorch_wrapped,
    without_torch_function,
)

_NUM_SAMPLES = 32
_MOST_TO_SUM = 2**14  # a pass over more would show in the time of a step

RELATIVE_ERROR = 1e-5
"""By how much a number may differ when it is computed again by operations that round differently every time."""


def is_deterministic() -> bool:
    """Say whether the same operations give the same bits: in one thread of a CPU, or where torch was asked to."""
    if torch.are_deterministic_algorithms_enabled():
        return True
    return torch.get_num_threads() == 1 and not torch.cuda.is_initialized()


class _Kind(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} of shape {tuple(self.shape)}"


class Fingerprint:
    """The fingerprint of some tensors; what is None, sparse, or of a ``torch.func`` transform has none."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.kinds = [_kind(tensor) for tensor in tensors]
        groups: dict[tuple, list[Tensor]] = {}
        with torch.no_grad():
            for tensor, kind in zip(tensors, self.kinds, strict=True):
                if tensor is not None and kind is not None and 0 not in kind.shape:
                    groups.setdefault((tensor.device, kind.dtype), []).append(tensor)
            self._groups = [_Group.of(group) for group in groups.values()]

    def difference(self, tensors: Sequence[Tensor | None], *, exact: bool) -> str | None:
        """Say what differs from tensors that should be the same; None if nothing does.

        Args:
            tensors: As many as there were.
            exact: Whether they must agree bit by bit, and not to rounding.
        """
        other = Fingerprint(tensors)
        for index, (kind, now) in enumerate(zip(self.kinds, other.kinds, strict=True)):
            if kind is not None and now is not None and kind != now:
                return f"result {index} was {kind}, and became {now}"
        pairs = zip(self._groups, other._groups, strict=False)
        return next((found for first, second in pairs if (found := first.difference(second, exact))), None)


class Copy:
    """All entries of one small tensor of a CPU, in a tenth of the time of a fingerprint, and without a storage."""

    def __init__(self, tensor: Tensor) -> None:
        self.kind, self.entries = _kind(tensor), _entries(tensor)

    @staticmethod
    def suits(tensors: Sequence[Tensor]) -> bool:
        """Say whether these are one such tensor."""
        return len(tensors) == 1 and tensors[0].is_cpu and tensors[0].numel() <= _NUM_SAMPLES

    def difference(self, tensors: Sequence[Tensor | None], *, exact: bool) -> str | None:
        """Say what differs from the tensor that should be the same; None if nothing does."""
        (tensor,) = tensors
        kind = _kind(tensor)
        if tensor is None or kind is None or self.kind is None:
            return None
        if kind != self.kind:
            return f"result 0 was {self.kind}, and became {kind}"
        error = 0.0 if exact else _kept(kind.dtype)[1]
        if _agree(self.entries, _entries(tensor), error):
            return None
        return f"a result of shape {tuple(kind.shape)} has other values"


def _entries(tensor: Tensor) -> list[float]:
    return [] if _kind(tensor) is None else tensor.detach().flatten().tolist()


def _kind(tensor: Tensor | None) -> _Kind | None:
    if tensor is None or is_functorch_wrapped(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if getattr(type(tensor), "__torch_dispatch__", None) is not disabled_torch_dispatch:
        return None  # a subclass with operations of its own
    return _Kind(tensor.shape, tensor.dtype)


class _Group(NamedTuple):
    """Numbers from tensors of one device and dtype, in one transfer."""

    shapes: list[torch.Size]
    sizes: tuple[int, ...]
    """How many entries of each are known or summed together."""
    numbers: Tensor | list
    """Entries of each tensor, and the sum of all that are known. On a CPU a list, which is no storage."""
    rounding: float
    """The relative error of results that were computed in another order."""
    noise: float
    """The error of each that is due to terms as large as the largest of them."""

    @classmethod
    def of(cls, tensors: list[Tensor]) -> _Group:
        parts = [_part(tensor) for tensor in tensors]
        sizes = tuple([part.numel() for part in parts])
        kept, *errors = _kept(tensors[0].dtype)
        entries = flattened(parts)
        entries = entries if entries.dtype == kept else entries.to(kept)
        shapes = [tensor.shape for tensor in tensors]
        if entries.is_cpu:
            array = entries.numpy(force=True)  # a zero without memory has no array
            total = np.add.reduce(array, dtype=np.result_type(array, np.float64))
            return cls(shapes, sizes, [*array.take(_places(sizes)).tolist(), total], *errors)
        wide = kept if kept == torch.int64 else torch.promote_types(kept, torch.float64)
        numbers = entries[_places_on(sizes, entries.device)].to(wide)
        return cls(shapes, sizes, torch.cat([numbers, entries.sum(0, keepdim=True, dtype=wide)]), *errors)

    def difference(self, other: _Group, exact: bool) -> str | None:
        """Say which tensor differs."""
        (*first, total), (*second, other_total) = _read(self.numbers, other.numbers)
        error = 0.0 if exact else self.rounding
        # What cancels, as the gradient of a bias before batch norm does, leaves the rounding of its terms alone.
        noise = 0.0 if exact else self.noise * _largest(first)
        start = 0
        for shape, size in zip(self.shapes, self.sizes, strict=True):
            end = start + len(_steps(size))
            if not _agree(first[start:end], second[start:end], error, noise):
                return f"a result of shape {tuple(shape)} has other values"
            start = end
        # The errors of the terms are independent.
        error *= max(1.0, math.sqrt(sum(self.sizes) / _MOST_TO_SUM))
        if not _agree([*first, complex(total)], [*second, complex(other_total)], error):
            shapes = ", ".join(str(tuple(shape)) for shape in self.shapes)
            return f"results of shapes {shapes} have another sum"
        return None


@functools.lru_cache(maxsize=64)
def _kept(dtype: torch.dtype) -> tuple[torch.dtype, float, float]:
    """Return a dtype that NumPy knows for the numbers of another, and the errors that recomputing them may have.

    The first is relative to the tensor, the second to all tensors that are compared.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.int64, 0.0, 0.0
    eps = torch.finfo(dtype).eps
    rounding = max(RELATIVE_ERROR, 8 * eps)
    least = torch.complex64 if dtype.is_complex else torch.float32
    return least if dtype.itemsize < least.itemsize else dtype, rounding, min(64 * eps, rounding)


def _part(tensor: Tensor) -> Tensor:
    """Return the entries of a tensor, or a few of very many."""
    size = tensor.numel()
    if size <= _MOST_TO_SUM:
        return tensor
    step = -(-size // _NUM_SAMPLES)
    if tensor.is_contiguous():
        return tensor.as_strided((-(-size // step),), (step,))
    places = torch.arange(0, size, step, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)]


def _steps(size: int) -> range:
    """Return which entries of a part are kept."""
    return range(0, size, -(-size // _NUM_SAMPLES))


@functools.lru_cache(maxsize=256)
def _places(sizes: tuple[int, ...]) -> np.ndarray:
    """Return where the entries to keep of several parts are, one after the other."""
    starts = np.cumsum((0, *sizes))
    return np.concatenate(
        [start + np.array(_steps(size)) for start, size in zip(starts, sizes, strict=False)]
    )


@functools.lru_cache(maxsize=256)
def _places_on(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return them on a device, to which they are copied once: each copy waits for what is queued there."""
    with without_torch_function(), torch.inference_mode(False):
        return from_numpy(_places(sizes)).to(device)


def _read(first: Tensor | list, second: Tensor | list) -> list[list]:
    """Return numbers as lists, by one look at the device, since each waits for it."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.stack([first, second]).tolist()
    assert isinstance(first, list)
    assert isinstance(second, list)
    return [first, second]


def _largest(numbers: list) -> float:
    return max((abs(x) for x in numbers if math.isfinite(abs(x))), default=0.0)


def _agree(first: list, second: list, error: float, noise: float = 0.0) -> bool:
    if first == second:
        return True
    slack = max(error * _largest(first), noise)
    return all(
        x == y or (x != x and y != y) or abs(x - y) <= slack for x, y in zip(first, second, strict=True)
    )
