"""Checks of what the user passes to the tracker."""

from __future__ import annotations

import operator
from typing import Literal

import torch

Method = Literal["auto", "allocator", "storage", "rss"]
_METHODS = ("auto", "allocator", "storage", "rss")


def check_device(device: torch.device | str | None) -> torch.device:
    """Return the device to measure, with its index if it is a CUDA device."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    if not isinstance(device, (torch.device, str)):
        came = type(device).__name__
        raise TypeError(f"MemoryTracker(device=...): expected a torch.device, its name or None, got {came}.")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"MemoryTracker(device={device!r}): expected a device such as 'cpu' or 'cuda:0'."
        ) from error
    if found.type == "cpu":
        return torch.device("cpu")
    call = f"MemoryTracker(device={str(found)!r})"
    if found.type != "cuda":
        raise ValueError(f"{call}: expected a CPU or CUDA device, got {found.type!r}.")
    if not torch.cuda.is_available():
        raise ValueError(f"{call}: expected CUDA to be available, but it is not; use device='cpu'.")
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())


def check_method(method: str, device: torch.device) -> str:
    """Return the method, "auto" resolved for `device`."""
    if method not in _METHODS:
        methods = ", ".join(_METHODS)
        raise ValueError(f"MemoryTracker(method=...): expected one of {methods}, got {method!r}.")
    if method == "auto":
        return "allocator" if device.type == "cuda" else "storage"
    if method == "allocator" and device.type != "cuda":
        raise ValueError(
            f"MemoryTracker(method='allocator'): expected a CUDA device, got {str(device)!r}; "
            "use method='storage'."
        )
    return method


def check_step(name: str, index: int | None) -> tuple[str, int | None]:
    """Return the step of a path that `name` and `index` make."""
    if not isinstance(name, str):
        raise TypeError(f"MemoryTracker.phase(name): expected a string, got {type(name).__name__}.")
    if index is None:
        return name, None
    try:
        return name, operator.index(index)
    except TypeError as error:
        came = type(index).__name__
        raise TypeError(
            f"MemoryTracker.phase({name!r}, index=...): expected an integer or None, got {came}."
        ) from error
