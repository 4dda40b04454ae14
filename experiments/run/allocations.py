"""The most memory that a call takes, and what it keeps, torch's own internals included."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Return the most bytes that torch's allocator held during a call, beyond what it held before.

    What a ``TorchDispatchMode`` cannot see is counted: matrices that a kernel makes dense for itself. Scratch space
    of libraries (MKL, cuSPARSE) is not.

    Args:
        call: What to run.
        device: Whose memory to count.

    Example:
        >>> peak_bytes(lambda: torch.zeros(1000) + torch.zeros(1000))
        12000
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    held = peak = 0
    for nbytes in changes(call)[1]:
        held += nbytes
        peak = max(peak, held)
    return peak


def held_bytes(call: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Return the bytes that the result of a call holds, with its graph, and that were not there before.

    Args:
        call: What to run.
        device: Whose memory to count.

    Example:
        >>> x = torch.zeros(1000, requires_grad=True)
        >>> held_bytes(lambda: x.exp())  # which the backward pass multiplies with
        4000
    """
    device = torch.device(device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        kept = call()
        held = torch.cuda.memory_allocated(device) - before
    else:
        kept, allocated = changes(call)
        held = sum(allocated)
    del kept
    return held


def changes(call: Callable[[], object]) -> tuple[object, list[int]]:
    """Return the result of a call, and what it allocated and freed on the CPU, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    in_order = sorted(
        (event.start_ns(), event.nbytes())  # type: ignore[reportAttributeAccessIssue]
        for event in events
        if event.name() == "[memory]"
    )
    return result, [nbytes for _, nbytes in in_order]
