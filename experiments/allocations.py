"""The most memory that a call takes, torch's own internals included."""

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
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted(
        (event.start_ns(), event.nbytes())  # type: ignore[reportAttributeAccessIssue]
        for event in events
        if event.name() == "[memory]"
    )
    held = peak = 0
    for _, nbytes in changes:
        held += nbytes
        peak = max(peak, held)
    return peak
