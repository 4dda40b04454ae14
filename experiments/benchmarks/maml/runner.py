"""Check that all methods agree on a workload, then run them alternately, in fresh processes."""

from __future__ import annotations

import random
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks.maml.methods import BASELINE, is_ours
from experiments.benchmarks.maml.worker import Request
from experiments.run.measure import answered
from experiments.run.progress import Progress

ROUNDING = 1e-9  # relative, in float64

Ask = Callable[[Request], dict[str, Any]]


@dataclass
class Record:
    """The results of one method on one workload.

    Attributes:
        note: Reason why there are no measurements, empty otherwise.
        error: Relative difference between the gradients of the method and of the loop, in float64.
        rounds: The answers of the worker processes, one for each round.
    """

    note: str = ""
    error: float | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def peak(self) -> int | None:
        """Peak memory in bytes, measured in the first round."""
        return self.rounds[0].get("peak") if self.rounds else None

    @property
    def compile_seconds(self) -> list[float]:
        """The time of the first call of each process, minus the time of later calls."""
        return [max(answer["first"] - answer["median"], 0.0) for answer in self.rounds]


Records = dict[str, Record]


def ask_process(request: Request, *, device: str, threads: int, limit: float, cache: Path) -> dict[str, Any]:
    """Return the answer of a fresh process, or the reason if it fails or takes longer than `limit` seconds."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache / re.sub(r"\W+", "-", request.method))}
    return answered(
        "experiments.benchmarks.maml.worker",
        replace(request, device=device).to_json(),
        threads=threads,
        limit=limit,
        environment=variables,
    )


@contextmanager
def processes(device: str, threads: int, limit: float) -> Iterator[Ask]:
    """Yield a function that runs a request in a fresh process.

    The processes of a method share only a compiler cache.
    """
    with tempfile.TemporaryDirectory(prefix="metagrad-bench-") as folder:
        yield partial(ask_process, device=device, threads=threads, limit=limit, cache=Path(folder))


def counted(ask: Ask, bar: Progress[Any]) -> Ask:
    """Show the requests on a progress bar, and count the answers."""

    def shown(request: Request) -> dict[str, Any]:
        bar.set_postfix_str(f"{request.workload}: {request.method}")
        answer = ask(request)
        bar.update()
        return answer

    return shown


def agreement(ask: Ask, workload: str, methods: Sequence[str]) -> Records:
    """Compare all meta-gradients with the loop's, in float64.

    Raises:
        SystemExit: The loop does not run, or a method of metagrad differs by more than rounding.
    """
    records: Records = {}
    reference = None
    for name in [BASELINE, *(name for name in methods if name != BASELINE)]:
        gradient, note = _gradient(ask, workload, name)
        if gradient is None:
            records[name] = Record(note)
        else:
            reference = gradient if reference is None else reference
            records[name] = Record(error=relative_error(gradient, reference))
        if reference is None:
            raise SystemExit(f"{workload}: the {BASELINE} does not run: {note}.")
        error = records[name].error
        if is_ours(name) and error is not None and not error < ROUNDING:
            raise SystemExit(
                f"{workload}: {name} does not agree with the {BASELINE}: error {error:.1e}. Nothing is timed."
            )
    return records


def _gradient(ask: Ask, workload: str, method: str) -> tuple[np.ndarray | None, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gradient.npy"
        note = ask(Request(workload, method, save=str(path))).get("refused", "")
        return (None, note) if note else (np.load(path), "")


def relative_error(gradient: np.ndarray, reference: np.ndarray) -> float:
    """Return the largest difference, relative to the largest entry."""
    return float(np.abs(gradient - reference).max() / np.abs(reference).max())


def measure(ask: Ask, workload: str, records: Records, *, rounds: int, seconds: float) -> None:
    """Run the methods alternately, in a new order each round, so that drift of the machine affects them equally."""
    for number in range(rounds):
        running = [name for name, record in records.items() if not record.note]
        for name in random.Random(number).sample(running, len(running)):
            answer = ask(Request(workload, name, seconds=seconds, weigh=number == 0))
            if "refused" in answer:
                records[name] = Record(answer["refused"], records[name].error)
            else:
                records[name].rounds.append(answer)
        if records[BASELINE].note:
            raise SystemExit(f"{workload}: the {BASELINE} does not run: {records[BASELINE].note}.")


@dataclass(frozen=True)
class Ratios:
    """A comparison of a method with the loop.

    Attributes:
        faster: The loop's time divided by the method's time, median over rounds.
        lowest: The speedup in the worst round.
        highest: The speedup in the best round.
        memory: Peak memory relative to the peak of the loop. None if it was not measured.
    """

    faster: float
    lowest: float
    highest: float
    memory: float | None


def ratios(record: Record, loop: Record) -> Ratios:
    """Compare measurements of the same round."""
    pairs = zip(loop.rounds, record.rounds, strict=True)
    faster = [theirs["median"] / own["median"] for theirs, own in pairs]
    memory = record.peak / loop.peak if record.peak and loop.peak else None
    return Ratios(statistics.median(faster), min(faster), max(faster), memory)


def as_json(records: Records) -> dict[str, Any]:
    """Return all measurements, and the ratios."""
    return {
        name: asdict(record)
        | ({"ratios": asdict(ratios(record, records[BASELINE]))} if record.rounds else {})
        for name, record in records.items()
    }
