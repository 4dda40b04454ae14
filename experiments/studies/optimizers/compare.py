"""Compare optimizers: `python -m experiments.studies.optimizers.compare multirun/optimizers/DATE/TIME [FOLDER ...]`.

A folder is a sweep or a single run. For each workload a table is printed, sorted by the training loss at the end, and
the curves of all are drawn into `optimizers.png` in the first folder, or into the file that `--out` names. Runs that
are missing, failed or unfinished are listed below the tables.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.compare import Job, find_jobs
from experiments.run import result
from experiments.run.job import launch
from experiments.run.metrics import read_rows
from experiments.run.plots.optimizers import Curve, losses

DEFAULT = "adam"
HEADER = (
    "optimizer",
    "training loss",
    "test loss",
    "test accuracy (%)",
    "steps",
    "gradients",
    "seconds",
    "gradients a step",
)


@dataclass(frozen=True)
class Finished:
    """A run that has a result."""

    label: str
    workload: str
    outcome: dict[str, Any]
    curve: Curve

    def metric(self, name: str) -> float | None:
        """Return the last value of a metric, if it has one."""
        found = self.outcome["metrics"].get(name)
        return None if found is None else found["mean"]

    @property
    def rank(self) -> float:
        """What tables are sorted by."""
        return math.inf if self.outcome["diverged"] else self.outcome["metrics"]["loss/train"]["mean"]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="experiments.studies.optimizers.compare", description="Compare optimizers of a sweep."
    )
    parser.add_argument("folders", nargs="+", type=Path, help="sweep folders or run folders")
    parser.add_argument("--out", type=Path, help="the picture; by default optimizers.png in the first folder")
    arguments = parser.parse_args()
    launch(partial(compare, arguments.folders, arguments.out))


def compare(folders: list[Path], out: Path | None) -> None:
    """Print the tables of all runs, and draw their curves."""
    jobs = [job for folder in folders for job in find_jobs(folder)]
    runs = finished(jobs)
    print(report(runs, jobs))
    if runs:
        path = out or folders[0] / "optimizers.png"
        print(f"\nCurves: {losses(path, by_workload(runs))}")


def finished(jobs: list[Job]) -> list[Finished]:
    """Read the runs that have ended, in the order of their results.

    Raises:
        ValueError: A run is of another program.
    """
    names = _differing(jobs)
    runs = [read(job, label_of(job, names)) for job in jobs if job.metrics is not None]
    return sorted(runs, key=lambda run: run.rank)


def read(job: Job, label: str) -> Finished:
    """Read the folder of a run that has ended."""
    file = job.folder / "settings.json"
    if not file.is_file():
        raise ValueError(
            f"compare: {job.folder} is no run of experiments.studies.optimizers: it has no settings.json."
        )
    workload = json.loads(file.read_text())["workload"]["name"]
    outcome = json.loads((job.folder / result.FILE).read_text())
    return Finished(label, workload, outcome, read_curve(job.folder))


def read_curve(folder: Path) -> Curve:
    """Return what a run has measured, by name, one value for each evaluation."""
    rows = [
        {**row, "seconds": cost["time/training(s)"]}
        for row, cost in zip(
            read_rows(folder / "metrics.jsonl"), read_rows(folder / "costs.jsonl"), strict=False
        )
    ]
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}


def label_of(job: Job, names: list[str]) -> str:
    """Return the optimizer of a run, and of the other overrides those that tell runs apart."""
    others = [
        f"{name.removeprefix('optimizer.')}={job.overrides[name]}" for name in names if name in job.overrides
    ]
    return " ".join([job.overrides.get("optimizer", DEFAULT), *others])


def by_workload(runs: list[Finished]) -> dict[str, dict[str, Curve]]:
    """Return curves by workload and label."""
    names = dict.fromkeys(run.workload for run in runs)
    return {name: {run.label: run.curve for run in runs if run.workload == name} for name in names}


def report(runs: list[Finished], jobs: list[Job]) -> str:
    """Return a Markdown table for each workload, and what has not ended."""
    parts = [
        f"**{workload}**\n\n{table([run for run in runs if run.workload == workload])}"
        for workload in by_workload(runs)
    ]
    unfinished = [
        f"- {job.folder.name} ({label_of(job, _differing(jobs))}): {job.status}"
        for job in jobs
        if job.metrics is None
    ]
    return "\n\n".join([*parts, *(["\n".join(unfinished)] if unfinished else [])])


def table(runs: list[Finished]) -> str:
    """Return the results of one workload as a Markdown table."""
    rows = [_row(run) for run in runs]
    kept = [i for i in range(len(HEADER)) if any(row[i] for row in rows)]
    lines = [[HEADER[i] for i in kept], ["---" if i == 0 else "---:" for i in kept]]
    lines += [[row[i] for i in kept] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(run: Finished) -> list[str]:
    costs = run.outcome["costs"]
    measured = [run.metric(name) for name in ("loss/train", "loss/test", "accuracy/test(%)")]
    cells = ["" if value is None else f"{value:.4g}" for value in measured]
    if run.outcome["diverged"]:
        cells[0] = f"diverged at step {costs['steps']}"
    return [
        run.label,
        *cells,
        f"{costs['steps']:,}",
        f"{costs['gradient_equivalents']:,.0f}",
        f"{costs['seconds']:.0f}",
        f"{costs['gradients_of_a_step']:.3g}",
    ]


def _differing(jobs: list[Job]) -> list[str]:
    """Return the overrides that differ between the runs of one optimizer on one workload, or are not set in all."""
    names = dict.fromkeys(
        name for job in jobs for name in job.overrides if name not in ("optimizer", "workload")
    )
    return [name for name in names if len({job.overrides.get(name) for job in jobs}) > 1]


if __name__ == "__main__":
    main()
