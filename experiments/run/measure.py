"""Memory and CPU time of a call, and fresh processes that answer one request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Return the peak of bytes held by torch's allocator during a call, minus the bytes held before.

    Unlike a ``TorchDispatchMode``, this counts memory inside kernels, such as matrices that a kernel densifies.
    Scratch space of libraries (MKL, cuSPARSE) is not counted.

    Args:
        call: The function to run.
        device: The device whose memory is counted.

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
    """Return the bytes that a call leaves allocated for its result and the graph of its result.

    Args:
        call: The function to run.
        device: The device whose memory is counted.

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
    """Return the result of a call and its allocations on the CPU in order, in bytes. Frees are negative."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = call()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    in_order = sorted(
        (event.start_ns(), event.nbytes())  # type: ignore[reportAttributeAccessIssue]
        for event in events
        if event.name() == "[memory]"
    )
    return result, [nbytes for _, nbytes in in_order]


def cpu_seconds(call: Callable[[], object], calls: int = 1) -> float:
    """Return the CPU seconds of the fastest call.

    Args:
        call: The function to run.
        calls: Number of calls.
    """
    found = []
    for _ in range(calls):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)


ROOT = Path(__file__).parents[2]


def answered(
    module: str, line: str, *, threads: int, limit: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the answer of a fresh process, or why it gave none: it failed or took longer than `limit` seconds.

    Args:
        module: The module to run, as for `python -m`.
        line: The request.
        threads: Number of threads of OpenMP and MKL.
        limit: Seconds.
        environment: Environment variables, in addition to the variables of this process.
    """
    command, pipe = [sys.executable, "-m", module], subprocess.PIPE
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **environment,
    }
    # A separate session, so that a compiler's child processes end with it.
    with subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=ROOT,
        env=variables,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(line + "\n", timeout=limit)
        except subprocess.TimeoutExpired:
            return {"refused": f"took longer than {limit:g} s"}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        return {"refused": f"failed: {(err.strip().splitlines() or ['without a word'])[-1]}"}
    return json.loads(out.splitlines()[-1])
