"""A worker process, which runs one method on one workload.

It reads a request and writes an answer, each as a JSON line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from experiments.benchmarks.maml.methods import METHODS, Prepared, RefusedError
from experiments.benchmarks.maml.workloads import load
from experiments.run.measure import peak_bytes
from metagrad.sparse import RowSparse

FEWEST_CALLS = 3


@dataclass(frozen=True)
class Request:
    """A request to a worker process: one method on one workload.

    Attributes:
        workload: Name of the workload.
        method: Name of the method.
        save: Path to write the gradient in float64 to. If empty, the method is measured in float32.
        seconds: The time to spend on timing. 0 disables timing.
        weigh: Whether to measure the peak.
        device: The device that computes.
    """

    workload: str
    method: str
    save: str = ""
    seconds: float = 0.0
    weigh: bool = False
    device: str = "cpu"

    def to_json(self) -> str:
        """Return the request as one line of JSON."""
        return json.dumps(asdict(self))


def answer(request: Request) -> dict[str, Any]:
    """Run a request. If it cannot run, the entry `refused` of the answer is the reason."""
    method = METHODS[request.method]
    if method.package and not _is_installed(method.package):
        return {"refused": "not installed"}
    work = load(request.workload).to(request.device)
    work = work.double() if request.save else work
    try:
        start = time.perf_counter()
        prepared = method.prepare(work)
        gradient = _first(prepared)
        first = time.perf_counter() - start
    except RefusedError as reason:
        return {"refused": str(reason)}
    if request.save:
        np.save(request.save, np.concatenate([_dense(part).ravel() for part in gradient]))
        return {}
    return _measured(prepared, request, first)


def _dense(part: Any) -> np.ndarray:
    part = part.to_dense() if isinstance(part, RowSparse) else part
    return np.asarray(part.cpu() if isinstance(part, torch.Tensor) else part)


def _is_installed(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def _first(prepared: Prepared) -> Any:
    """Run for the first time. Raise an error if a warning says that the method fell back to another way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradient = prepared.run()
    for warning in caught:
        if str(warning.message).startswith("MAML"):
            raise RefusedError(str(warning.message))
    return gradient


def _measured(prepared: Prepared, request: Request, first: float) -> dict[str, Any]:
    result: dict[str, Any] = {"first": first}
    if request.seconds:
        times = durations(synchronized(prepared.run, request.device), request.seconds)
        result |= {"median": statistics.median(times), "min": min(times), "calls": len(times)}
    if request.weigh and prepared.peak is not None:
        result |= {"peak": prepared.peak, "peak_by": "compiler"}
    elif request.weigh:
        result |= {"peak": peak_bytes(prepared.run, request.device), "peak_by": "allocator"}
    return result


def synchronized(run: Callable[[], object], device: str) -> Callable[[], object]:
    """Return a call that waits for the kernels of a GPU."""
    if torch.device(device).type != "cuda":
        return run
    return lambda: (run(), torch.cuda.synchronize(device))


def durations(run: Callable[[], object], seconds: float) -> list[float]:
    """Return the durations of calls over some seconds, at least of `FEWEST_CALLS` calls."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < FEWEST_CALLS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def _stay_on(num_threads: int) -> None:
    """Limit the thread pools of other libraries, such as XLA, to as many cores as torch uses."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_threads])


def main() -> None:
    """Answer one request. The output of libraries goes to the error stream."""
    request = Request(**json.loads(sys.stdin.readline()))
    _stay_on(torch.get_num_threads())
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to the terminal otherwise
    with contextlib.redirect_stdout(sys.stderr):
        result = answer(request)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
