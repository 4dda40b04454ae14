"""Checks of arguments that every task distribution makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from metagrad.core.checks import check_count, refuse


def check_counts(call: str, counts: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless every count is an integer of at least one."""
    for name, count in counts.items():
        check_count(f"{call}({name})", count)


def check_generator(call: str, generator: torch.Generator | None, device: torch.device) -> None:
    """Raise ``ValueError`` if the generator cannot fill tensors on the device."""
    if not isinstance(generator, torch.Generator | None):
        refuse(call, "generator=torch.Generator().manual_seed(0) or None", generator, TypeError)
    if generator is None or (
        generator.device.type == device.type
        and (None in (generator.device.index, device.index) or generator.device.index == device.index)
    ):
        return
    raise ValueError(
        f"{call}: the generator is on {generator.device}, the tasks are on {device}. "
        f"Pass torch.Generator(device={str(device)!r}), or make the distribution on {generator.device}."
    )


def check_float_dtype(call: str, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless the dtype is a floating-point dtype."""
    if not dtype.is_floating_point:
        raise ValueError(f"{call}: dtype must be a floating-point type such as torch.float32, got {dtype}.")
