"""Compare runs: `python -m experiments.compare multirun/DATE/TIME [FOLDER ...]` prints a table, draws curves.

A folder is a sweep or a single run. Runs that differ only in their seed are one group, shown as mean and standard
deviation over seeds. Failed and unfinished runs are listed, but they are not part of a mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from experiments.run import result
from experiments.run.job import launch
from experiments.run.metrics import read_rows
from experiments.run.plots.learning import comparison

OVERRIDES = ".hydra/overrides.yaml"
IGNORED = ("seed", "resume")


@dataclass(frozen=True)
class Job:
    """One run of a comparison: its folder, its overrides, and its test metrics or the reason why there are none."""

    folder: Path
    overrides: dict[str, str]
    metrics: dict[str, float] | None
    status: str

    def setting(self, names: list[str]) -> str:
        """Return the overrides that differ between groups."""
        return " ".join(f"{name}={self.overrides.get(name, 'default')}" for name in names) or "all"


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="experiments.compare", description="Compare runs of a sweep.")
    parser.add_argument("folders", nargs="+", type=Path, help="sweep folders or run folders")
    launch(partial(compare, parser.parse_args().folders))


def compare(folders: list[Path]) -> None:
    """Print the table of all runs, and draw their curves."""
    jobs = [job for folder in folders for job in find_jobs(folder)]
    names = differing(jobs)
    print(table(jobs, names))
    drawn = {job.setting(names): [] for job in jobs}
    for job in (job for job in jobs if not job.status.startswith("unreadable")):
        drawn[job.setting(names)].append(read_rows(job.folder / "metrics.jsonl"))
    path = comparison(folders[0] / "compare.png", drawn)
    print(f"\nCurves: {path}" if path else "\nNo run has validated yet, so there are no curves.")


def find_jobs(folder: Path) -> list[Job]:
    """Return the jobs of a sweep folder, or the only job of a run folder.

    Raises:
        ValueError: The folder is neither a sweep nor a run.
    """
    if (folder / OVERRIDES).is_file():
        return [read_job(folder)]
    started = sorted({file.parent.parent for file in folder.glob(f"*/{OVERRIDES}")}, key=_number)
    if not started:
        raise ValueError(
            f"compare: {folder} is neither a sweep nor a run folder: expected {OVERRIDES} in it or below it."
        )
    return [read_job(job) for job in started]


def read_job(folder: Path) -> Job:
    """Read a run folder in any state. If it cannot be read, the job holds the reason."""
    overrides: dict[str, str] = {}
    try:
        overrides = _parse(yaml.safe_load((folder / OVERRIDES).read_text()) or [])
        if (folder / result.FILE).exists():
            metrics = json.loads((folder / result.FILE).read_text())["metrics"]
            means = {name: value["mean"] for name, value in metrics.items()}
            return Job(folder, overrides, means, "finished")
        return Job(folder, overrides, None, result.reason(folder))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        return Job(
            folder, overrides, None, f"unreadable: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        )


def differing(jobs: list[Job]) -> list[str]:
    """Return the overrides that differ between jobs, without seeds."""
    names = dict.fromkeys(name for job in jobs for name in job.overrides if name not in IGNORED)
    return [name for name in names if len({job.overrides.get(name) for job in jobs}) > 1]


def table(jobs: list[Job], names: list[str]) -> str:
    """Return one line for each group and one for each run that is not finished."""
    groups: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        groups[job.setting(names)].append(job)
    metrics = list(dict.fromkeys(name for job in jobs for name in job.metrics or {}))
    rows = [["setting", "runs", *(name.removeprefix("test/") for name in metrics)]]
    rows += [_group_row(setting, group, metrics) for setting, group in groups.items()]
    lines = [*_aligned(rows), "Mean over runs +- their standard deviation; runs: finished / planned."]
    unfinished = [job for job in jobs if job.metrics is None]
    return "\n".join([*lines, *(f"  {job.folder.name} ({_words(job)}): {job.status}" for job in unfinished)])


def _group_row(setting: str, group: list[Job], metrics: list[str]) -> list[str]:
    finished = [job.metrics for job in group if job.metrics is not None]
    cells = [_cell([values[name] for values in finished if name in values]) for name in metrics]
    return [setting, f"{len(finished)} / {len(group)}", *cells]


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.mean(values):.4g}" + (
        f" +- {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    )


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _parse(overrides: list[str]) -> dict[str, str]:
    return {key.lstrip("+"): value for key, _, value in (item.partition("=") for item in overrides)}


def _words(job: Job) -> str:
    return " ".join(f"{name}={value}" for name, value in job.overrides.items())


def _number(folder: Path) -> tuple[int, str]:
    return (int(folder.name), "") if folder.name.isdigit() else (sys.maxsize, folder.name)


if __name__ == "__main__":
    main()
