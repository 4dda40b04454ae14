"""What a fresh process does: some methods on one model of one size. A JSON line comes in, a JSON line goes out."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from experiments.run.allocations import held_bytes, peak_bytes
from experiments.run.seconds import cpu_seconds
from experiments.studies.overhead.methods import prepared
from experiments.studies.overhead.models import load
from experiments.studies.overhead.run import Run, flat
from experiments.studies.overhead.work import Size, Work

GIVEN_UP = (
    "MAML",
    "unroll",
    "checkpoint",
)  # how warnings begin that something else is done than was asked for

LONG = 1.0  # seconds of a first call after which one more is enough in each round


@dataclass(frozen=True)
class Request:
    """What is asked of a process.

    Attributes:
        model: Its name.
        size: Depth, width, batch.
        steps: Numbers of inner steps; each is measured.
        methods: What is computed, and how.
        rounds: How often each is timed, in turns.
        seconds: How long each is timed in a round, one call at least.
        seed: Of weights and data.
        device: Where.
    """

    model: str
    size: tuple[int, int, int]
    steps: tuple[int, ...]
    methods: tuple[tuple[str, str], ...]
    rounds: int
    seconds: float
    seed: int = 0
    device: str = "cpu"

    def to_json(self) -> str:
        """Return one line."""
        return json.dumps(asdict(self))


@dataclass
class Row:
    """What one method takes.

    Attributes:
        held: Bytes between the loss, or its gradient, and the result.
        peak: Bytes at most.
        error: How far the result is from that of the first way, relative to its norm.
        first: Seconds of the first call, compilation included.
        seconds: Of a call, for each round; of the processor, or of a GPU those that pass.
        note: Why there is nothing more.
    """

    quantity: str
    remedy: str
    steps: int
    held: int | None = None
    peak: int | None = None
    error: float | None = None
    first: float | None = None
    seconds: list[float] = field(default_factory=list)
    note: str = ""


def answer(request: Request) -> list[Row]:
    """Measure all that is asked for."""
    device = torch.device(request.device)
    work = load(request.model, Size(*request.size), request.seed, device)
    rows: list[Row] = []
    for steps in request.steps:
        rows += measured(replace(work, steps=steps), request)
    return rows


def measured(work: Work, request: Request) -> list[Row]:
    """Weigh each method, and then time all in turns."""
    rows = [Row(quantity, remedy, work.steps) for quantity, remedy in request.methods]
    exact: dict[str, Tensor] = {}
    runs = [(row, started(row, work, exact)) for row in rows]
    timers = [(row, timer(run, row.first or 0.0, request.seconds)) for row, run in runs if run is not None]
    shuffle = random.Random(request.seed)
    for _ in range(request.rounds):
        for row, time_it in shuffle.sample(timers, len(timers)):
            row.seconds.append(time_it())
    return rows


def started(row: Row, work: Work, exact: dict[str, Tensor]) -> Run | None:
    """Run a method for the first time, weigh it, and compare its result; None if it is refused."""
    try:
        with unchanged():
            run = prepared(row.quantity, row.remedy, work)
            begun = time.perf_counter()
            result = flat(run.finish(run.hold()))
            row.first = time.perf_counter() - begun
        expected = exact.setdefault(row.quantity, result)
        row.error = ((result - expected).norm() / expected.norm()).item()
        gc.collect()
        row.held = held_bytes(run.hold, work.x.device)
        row.peak = peak_bytes(lambda: run.finish(run.hold()), work.x.device)
    except Exception as reason:  # whatever a method says that it cannot do
        row.note = f"{type(reason).__name__}: {reason}".splitlines()[0]
        return None
    return run


@contextlib.contextmanager
def unchanged():
    """Refuse a method that warns that it does something else."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if str(warning.message).startswith(GIVEN_UP):
            raise ValueError(str(warning.message))


def timer(run: Run, first: float, seconds: float) -> Callable[[], float]:
    """Return what times a call of a run; of one whose graph serves many results, without what makes it.

    Args:
        run: What to time.
        first: Seconds that the first call took.
        seconds: How long to time; the median call is taken.
    """
    kept = run.hold() if run.is_kept else None

    def call() -> None:
        run.finish(kept if run.is_kept else run.hold())

    calls = 1 if first > LONG else max(1, math.ceil(seconds / max(timed(call), 1e-6)))
    return lambda: statistics.median(timed(call) for _ in range(calls))


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that the processor spends on a call, or those that pass where a GPU does."""
    if torch.cuda.is_initialized():
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - begun
    return cpu_seconds(call)


def main() -> None:
    """Answer one request; what libraries print goes to the error stream."""
    given = json.loads(sys.stdin.readline())
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to the terminal otherwise
    with contextlib.redirect_stdout(sys.stderr):
        rows = answer(Request(**given))
    print(json.dumps({"rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
