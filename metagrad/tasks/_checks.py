"""Checks of arguments that every task distribution makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metagrad.core.checks import is_integer

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def check_counts(call: str, counts: Mapping[str, int]) -> None:
    """Raise unless every count is an integer of at least one."""
    for name, count in counts.items():
        if not is_integer(count):
            raise TypeError(f"{call}: {name} must be an int, got {count!r} ({type(count).__name__}).")
        if count < 1:
            raise ValueError(f"{call}: {name} must be at least 1, got {count}.")


def check_generator(call: str, generator: torch.Generator | None, device: torch.device) -> None:
    """Raise when the generator cannot fill tensors on the device."""
    if generator is not None and not _same_device(generator.device, device):
        raise ValueError(
            f"{call}: the generator is on {generator.device}, the tasks are on {device}. "
            f"Pass torch.Generator(device={str(device)!r}), or make the distribution on {generator.device}."
        )


def check_float_dtype(call: str, dtype: torch.dtype) -> None:
    """Raise unless the data type is a floating one."""
    if not dtype.is_floating_point:
        raise ValueError(f"{call}: dtype must be a floating-point type such as torch.float32, got {dtype}.")


def _same_device(one: torch.device, other: torch.device) -> bool:
    """Compare devices, where a device without an index stands for any of its type."""
    return one.type == other.type and (None in (one.index, other.index) or one.index == other.index)
