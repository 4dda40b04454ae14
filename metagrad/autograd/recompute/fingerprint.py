"""Fingerprints of the results of a call, to compare them with the results of a recomputation.

A fingerprint holds the shape, the dtype, a few entries and the sum of each tensor. It takes microseconds and little
memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from metagrad.core._torch import is_functorch_wrapped

_NUM_SAMPLES = 32
_MANY = 2**14  # a sum of at most this many entries is computed in float64

RELATIVE_ERROR = 1e-5
"""Relative difference that is allowed if an operation rounds differently each time."""

_PLAIN_DISPATCH = getattr(Tensor, "__torch_dispatch__")  # noqa: B009, torch leaves it without a type


def is_deterministic() -> bool:
    """Return whether the same operations give the same bits: in one CPU thread, or with deterministic algorithms."""
    if torch.are_deterministic_algorithms_enabled():
        return True
    return torch.get_num_threads() == 1 and not torch.cuda.is_initialized()


class Fingerprint:
    """The fingerprint of some tensors.

    None, sparse tensors and tensors of a ``torch.func`` transform have no fingerprint. The numbers of tensors on an
    accelerator are read only when they are compared.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.kinds = [kind_of(tensor) for tensor in tensors]
        with torch.no_grad():
            self.numbers = [
                [] if kind is None or tensor is None else _numbers(tensor.detach())
                for kind, tensor in zip(self.kinds, tensors, strict=True)
            ]

    def difference(self, tensors: Sequence[Tensor | None], *, exact: bool) -> str | None:
        """Return a sentence about the first difference from ``tensors``, or None.

        Args:
            tensors: The tensors to compare, as many as in the fingerprint.
            exact: True if all bits must agree. False allows rounding errors.
        """
        other = Fingerprint(tensors)
        numbers = _read([*self.numbers, *other.numbers])
        first, second = numbers[: len(tensors)], numbers[len(tensors) :]
        largest = max(map(_largest, first), default=0.0) if first != second else 0.0
        for index, (kind, now) in enumerate(zip(self.kinds, other.kinds, strict=True)):
            if kind is None or now is None:
                continue
            if kind != now:
                return f"result {index} was {_named(kind)}, and became {_named(now)}"
            rounding, noise = (0.0, 0.0) if exact else _errors(*kind)
            # A sum that cancels, such as the gradient of a bias before batch norm, is only the rounding of its terms.
            if not _agree(first[index], second[index], rounding, noise * largest):
                return f"a result of shape {kind[1]} has other values"
        return None


def are_equal(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether plain tensors have the same entries. An accelerator is synchronized once."""
    for first, second in pairs:
        is_plain = (
            type(second) is Tensor and second.layout is torch.strided and not is_functorch_wrapped(second)
        )
        if not is_plain or first.shape != second.shape or first.dtype != second.dtype:
            return False
    if all(second.is_cpu for _, second in pairs):
        return all(torch.equal(first, second) for first, second in pairs)
    with torch.no_grad():
        return bool(torch.stack([(first == second).all() for first, second in pairs]).all())


def difference(index: int, tensor: Tensor, now: Tensor, *, exact: bool) -> str | None:
    """Return how a kept result differs from the recomputed one, or None."""
    kind, other = kind_of(tensor), kind_of(now)
    if kind is None or other is None:
        return None
    if kind != other:
        return f"result {index} was {_named(kind)}, and became {_named(other)}"
    tensor, now = tensor.detach(), now.detach()
    error = 0.0 if exact else _errors(*kind)[0]
    scale = tensor.abs().nan_to_num(0.0, 0.0, 0.0).max() if error else 0.0
    if torch.allclose(now, tensor, rtol=0.0, atol=float(scale) * error, equal_nan=True):
        return None
    return f"a result of shape {kind[1]} has other values"


def kind_of(tensor: Tensor | None) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Return the dtype and the shape of a plain tensor, or None for another value."""
    if tensor is None or is_functorch_wrapped(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if getattr(type(tensor), "__torch_dispatch__", None) is not _PLAIN_DISPATCH:
        return None  # a subclass with its own operations
    return tensor.dtype, tuple(tensor.shape)


def _named(kind: tuple[torch.dtype, tuple[int, ...]]) -> str:
    return f"{kind[0]} of shape {kind[1]}"


def _errors(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the allowed errors, relative to the largest entry of the tensor and of all compared tensors."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0, 0.0
    eps = torch.finfo(dtype).eps
    # The errors of the terms of a sum are independent.
    rounding = max(RELATIVE_ERROR, 8 * eps) * max(1.0, math.sqrt(math.prod(shape) / _MANY))
    return rounding, min(64 * eps, rounding)


def _numbers(tensor: Tensor) -> list[float] | Tensor:
    """Return all entries of a small tensor, or a few entries and the sum."""
    flat, size = tensor.reshape(-1), tensor.numel()
    if size <= _NUM_SAMPLES:
        return flat.tolist() if flat.is_cpu else flat
    samples = flat[:: -(-size // _NUM_SAMPLES)]
    total = flat.sum(0, keepdim=True, dtype=_wide(flat) if size <= _MANY else None)
    return [*samples.tolist(), *total.tolist()] if flat.is_cpu else torch.cat([samples, total])


def _wide(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype of a sum, or None for the default of torch. Some devices have no float64."""
    return torch.float64 if tensor.is_cpu and tensor.is_floating_point() else None


def _read(numbers: list[list[float] | Tensor]) -> list[list[float]]:
    """Return numbers as lists. Numbers on an accelerator are read together, since each read synchronizes it."""
    waiting = [part for part in numbers if isinstance(part, Tensor)]
    if not waiting:
        return numbers  # type: ignore[return-value]
    read = iter(torch.cat(waiting).tolist())
    return [list(itertools.islice(read, len(p))) if isinstance(p, Tensor) else p for p in numbers]


def _largest(numbers: list) -> float:
    return max((abs(x) for x in numbers if math.isfinite(abs(x))), default=0.0)


def _agree(first: list, second: list, error: float, noise: float = 0.0) -> bool:
    if first == second:
        return True
    slack = max(error * _largest(first), noise)
    return all(
        x == y or (x != x and y != y) or abs(x - y) <= slack for x, y in zip(first, second, strict=True)
    )
