"""The values of ``memory=``, and the free memory of a device."""

from __future__ import annotations

import math
import os
import re
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from metagrad.core.tree import Tree, dissect

MemoryMode = Literal["full", "step", "sqrt", "log", "auto"]

Memory: TypeAlias = "MemoryMode | str | int | float"
"""A checkpointing policy, or a budget in bytes, such as ``2e9``, ``"512MiB"`` or ``"2GB"``."""

Bytes: TypeAlias = "str | int | float"
"""A size in bytes, such as ``2e9`` or ``"64MiB"``."""

_UNITS = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BUDGET = re.compile(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([kmg]?i?b|)\s*", re.IGNORECASE)


class BudgetError(ValueError):
    """Error for a budget that is too small for one step."""


def checked_memory(call: str, memory: Memory) -> MemoryMode | int:
    """Return ``memory`` as a policy, or as a budget in bytes. Raise ``ValueError`` if it is neither."""
    if memory in get_args(MemoryMode):
        return memory  # type: ignore[return-value]
    if (budget := _parsed(memory)) is not None:
        return budget
    raise ValueError(
        f'{call}: memory must be "full", "step", "sqrt", "log", "auto", or a budget in bytes such as 2e9 or '
        f'"512MiB", got {memory!r}.'
    )


def checked_bytes(call: str, name: str, value: Bytes) -> int:
    """Return an argument in bytes. Raise ``ValueError`` if it is not a size."""
    if (number := _parsed(value)) is not None:
        return number
    raise ValueError(f'{call}: {name} must be bytes, such as 2e9 or "64MiB", got {value!r}.')


def _parsed(value: Bytes) -> int | None:
    """Return a size in bytes, or None if the value is not a size of at least one byte."""
    if isinstance(value, str):
        match = _BUDGET.fullmatch(value)
        value = float(match[1]) * _UNITS.get(match[2].lower(), 0) if match else 0
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return int(value) if is_number and math.isfinite(value) and value >= 1 else None


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes, including the unused memory reserved by torch."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_of(*trees: Tree) -> torch.device:
    """Return the device of the first tensor, or the CPU if there is none."""
    tensors: list[Tensor] = dissect(trees)[0]
    return tensors[0].device if tensors else torch.device("cpu")
