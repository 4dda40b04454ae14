"""What is remembered of the results of a call, to recognise them when they are computed again.

Of each tensor: its shape, its dtype, a few of its entries, and the sum of all unless there are very many. So a
fingerprint takes microseconds, and keeps next to nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad._torch import disabled_torch_dispatch, is_functorch_wrapped

_NUM_SAMPLES = 32
_MOST_TO_SUM = 2**14  # a pass over more would show in the time of a step

RELATIVE_ERROR = 1e-5
"""What two numbers may differ by that were computed alike, by operations that round differently every time."""


def is_deterministic() -> bool:
    """Say whether the same operations give the same bits: in one thread of a CPU, or where torch was asked to."""
    if torch.are_deterministic_algorithms_enabled():
        return True
    return torch.get_num_threads() == 1 and not torch.cuda.is_initialized()


class Fingerprint:
    """The fingerprint of some tensors; what is None, sparse, or of a ``torch.func`` transform has none."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.kinds = [_kind(tensor) for tensor in tensors]
        groups: dict[tuple, list[Tensor]] = defaultdict(list)
        for tensor, kind in zip(tensors, self.kinds, strict=True):
            if tensor is not None and kind is not None and kind.size:
                groups[tensor.device, tensor.dtype].append(tensor.detach())
        self._groups = [_Group.of(group) for group in groups.values()]

    def difference(self, tensors: Sequence[Tensor | None], *, exact: bool) -> str | None:
        """Say what differs from tensors that should be the same; None if nothing does.

        Args:
            tensors: As many as there were.
            exact: Whether they must be so bit by bit, and not to rounding.
        """
        other = Fingerprint(tensors)
        for index, (kind, now) in enumerate(zip(self.kinds, other.kinds, strict=True)):
            if kind is not None and now is not None and kind != now:
                return f"result {index} was {kind.dtype} of shape {kind.shape}, and became {now.dtype} of {now.shape}"
        for group, again in zip(self._groups, other._groups, strict=False):
            place = group.difference(again, exact)
            if place is not None:
                return f"a result of shape {group.shapes[place]} has other values"
        return None


class _Kind(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def _kind(tensor: Tensor | None) -> _Kind | None:
    if tensor is None or is_functorch_wrapped(tensor) or tensor.layout != torch.strided or tensor.is_meta:
        return None
    if getattr(type(tensor), "__torch_dispatch__", None) is not disabled_torch_dispatch:
        return None  # a subclass with operations of its own
    return _Kind(tuple(tensor.shape), tensor.dtype)


class _Group(NamedTuple):
    """Numbers from tensors of one device and dtype, in one transfer."""

    shapes: list[tuple[int, ...]]
    lengths: list[int]
    numbers: Tensor | list
    """On a CPU a list, which is no storage."""
    rounding: float
    """The relative error of results that were computed in another order."""

    @classmethod
    def of(cls, tensors: list[Tensor]) -> _Group:
        parts = [list(_parts(tensor)) for tensor in tensors]
        lengths = [sum(part.numel() for part in of_one) for of_one in parts]
        numbers = torch.cat([part for of_one in parts for part in of_one])
        on_cpu = numbers.device.type == "cpu"
        dtype = tensors[0].dtype
        floating = dtype.is_floating_point or dtype.is_complex
        rounding = max(RELATIVE_ERROR, 8 * torch.finfo(dtype).eps) if floating else 0.0
        return cls(
            [tuple(t.shape) for t in tensors], lengths, numbers.tolist() if on_cpu else numbers, rounding
        )

    def difference(self, other: _Group, exact: bool) -> int | None:
        """Return which tensor differs."""
        a, b = self._listed(), other._listed()
        if a == b:
            return None
        start = 0
        for place, length in enumerate(self.lengths):
            piece = slice(start, start + length)
            if not _agree(a[piece], b[piece], 0.0 if exact else self.rounding):
                return place
            start += length
        return None

    def _listed(self) -> list:
        return self.numbers.tolist() if isinstance(self.numbers, Tensor) else self.numbers


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    size = tensor.numel()
    if _NUM_SAMPLES < size <= _MOST_TO_SUM:
        yield tensor.sum().reshape(1)
    step = -(-size // _NUM_SAMPLES)
    if tensor.is_contiguous():
        yield tensor.as_strided((-(-size // step),), (step,))
    else:
        places = torch.arange(0, size, step, device=tensor.device)
        yield tensor[torch.unravel_index(places, tensor.shape)].reshape(-1)


def _agree(first: list, second: list, error: float) -> bool:
    slack = error * max((abs(x) for x in first if math.isfinite(abs(x))), default=0.0)
    return all(
        x == y or (x != x and y != y) or abs(x - y) <= slack for x, y in zip(first, second, strict=True)
    )
