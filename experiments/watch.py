"""Watch runs: `python -m experiments.watch FOLDER [--metric NAME] [--every SECONDS] [--once]`.

Shows every run below a folder, running, finished or failed: its step, the time left, the last value of a metric and
its curve, in the terminal again and again until Ctrl-C.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml
from tqdm import tqdm

from experiments.run import result
from experiments.run.job import launch
from experiments.run.metrics import read_rows, series

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40
TIME = "time/outer_step(ms)"
CLEAR = "\x1b[H\x1b[J"


@dataclass(frozen=True)
class Watched:
    """A line of the display of a run.

    Attributes:
        name: Folder of the run.
        state: Running, stopped, finished, or why it failed.
        step: Number of iterations so far.
        iterations: Total number of iterations. None if the folder does not record it.
        seconds_left: Estimated time left, from the speed of the last steps. None for a run that is not running.
        metric: The name of the metric.
        curve: Steps and values of the metric.
    """

    name: str
    state: str
    step: int
    iterations: int | None
    seconds_left: float | None
    metric: str
    curve: tuple[list[int], list[float]]

    def cells(self) -> list[str]:
        """Return name, state, progress, time left, and the metric with its last value."""
        of = "" if self.iterations is None else f" / {self.iterations}"
        left = "" if self.seconds_left is None else f"{tqdm.format_interval(self.seconds_left)} left"
        last = f"{self.metric} {self.curve[1][-1]:.4g}" if self.curve[1] else "no metric yet"
        return [self.name, self.state, f"{self.step}{of}", left, last]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="experiments.watch", description="Watch the curves of runs.")
    parser.add_argument("folder", type=Path, help="a run folder, or one with run folders below it")
    parser.add_argument("--metric", default="", help="what is drawn (the first that is validated)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks (5)")
    parser.add_argument("--once", action="store_true", help="look once")
    arguments = parser.parse_args()
    launch(partial(watch, **vars(arguments)))


def watch(folder: Path, metric: str, every: float, once: bool) -> None:
    """Show all runs, again and again.

    Raises:
        ValueError: There is no run, or no run has the metric.
    """
    while True:
        runs = [look(run, folder, metric) for run in runs_below(folder)]
        if metric and not any(run.curve[1] for run in runs):
            raise ValueError(f"watch: no run below {folder} has the metric {metric}.")
        sys.stdout.write(f"{CLEAR if sys.stdout.isatty() else ''}{table(runs)}\n")
        sys.stdout.flush()
        if once:
            return
        time.sleep(every)


def runs_below(folder: Path) -> list[Path]:
    """Return the folders that have metrics, a folder itself included.

    Raises:
        ValueError: No folder has metrics.
    """
    found = sorted(file.parent for file in folder.rglob("metrics.jsonl"))
    if not found:
        raise ValueError(f"watch: {folder} has no run in it or below it: expected a metrics.jsonl.")
    return found


def look(folder: Path, root: Path, metric: str) -> Watched:
    """Read a run, which may be running, finished or failed."""
    rows, costs = read_rows(folder / "metrics.jsonl"), read_rows(folder / "costs.jsonl")
    step, iterations, state = rows[-1]["step"] if rows else 0, _iterations(folder), _state(folder)
    times = series(costs, TIME)[1][-10:]
    runs_on = state == "running" and iterations is not None and times
    left = (iterations - step) * statistics.median(times) / 1000 if runs_on else None  # type: ignore[reportOptionalOperand]
    name = metric or _first_metric(rows)
    shown = str(folder.relative_to(root)) if folder != root else folder.name
    return Watched(shown, state, step, iterations, left, name, series(rows, name))


def table(runs: list[Watched]) -> str:
    """Return one line with a curve for each run."""
    cells = [run.cells() for run in runs]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=True)), sparkline(run.curve[1])]).rstrip()
        for row, run in zip(cells, runs, strict=True)
    )


def sparkline(values: list[float], width: int = WIDTH) -> str:
    """Draw values with one character each, or with one character for the mean of neighbors if there are too many.

    NaN and Inf are drawn as a question mark.
    """
    count = min(width, len(values))
    bounds = [round(i * len(values) / count) for i in range(count + 1)] if count else []
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(bounds)]
    finite = [value for value in means if abs(value) < float("inf")]
    low, span = (min(finite), max(finite) - min(finite)) if finite else (0.0, 0.0)
    return "".join(
        BLOCKS[round((value - low) / (span or 1.0) * (len(BLOCKS) - 1))] if abs(value) < float("inf") else "?"
        for value in means
    )


def _first_metric(rows: list[dict[str, float]]) -> str:
    """Return what is drawn where nobody says: a validation metric after adaptation, else the first there is."""
    names = [name for row in rows for name in row if name != "step" and "_ci95" not in name]
    validated = [name for name in names if name.startswith("validation/") and "_before" not in name]
    return next(iter([*validated, *names]), "")


def _iterations(folder: Path) -> int | None:
    file = folder / ".hydra" / "config.yaml"
    return yaml.safe_load(file.read_text()).get("iterations") if file.is_file() else None


def _state(folder: Path) -> str:
    if (folder / result.FAILURE).exists():
        return (folder / result.FAILURE).read_text().strip().partition("\n")[0] or "failed"
    if (folder / result.FILE).exists():
        return "finished"
    return "running" if _is_locked(folder) else "stopped"


def _is_locked(folder: Path) -> bool:
    """Return whether a process writes to a folder, whose lock it then holds."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


if __name__ == "__main__":
    main()
