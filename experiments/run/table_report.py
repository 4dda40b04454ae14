"""The table of a grid of runs, and its curves: what `experiments.table` writes."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.run import result
from experiments.run.evaluate import Interval
from experiments.run.files import markdown, write_text
from experiments.run.job import FAILURE
from experiments.run.metrics import last_values, read_rows, series
from experiments.run.plots.comparison import comparison

if TYPE_CHECKING:
    from experiments.table import Table

TIME, PEAK = "time/outer_step(ms)", "memory/peak(MiB)"
AFTER, BEFORE = "test/accuracy(%)", "test/accuracy_before(%)"
HEADER = [
    "algorithm",
    "accuracy (%)",
    "of each seed",
    "before",
    "inner steps",
    "batch norm",
    "outer steps",
    "minutes",
    "MiB",
    "papers",
]


def write(config: Table, experiment: str) -> None:
    """Write the table of an experiment, and draw its validation curves."""
    folder, papers = Path(config.folder), config.papers.get(experiment, {})
    cells = {
        name: [folder / experiment / name / str(seed) for seed in config.seeds] for name in config.algorithms
    }
    finished = {name: [cell for cell in own if (cell / result.FILE).exists()] for name, own in cells.items()}
    rows = [[name, *_values(finished[name]), papers.get(name, "-")] for name in cells]
    lines = [
        f"# {experiment}",
        "",
        *_protocol([cell for own in finished.values() for cell in own], config),
        "",
        markdown([HEADER, *rows]),
    ]
    lost = [
        f"- {cell}: {_reason(cell)}" for name in cells for cell in cells[name] if cell not in finished[name]
    ]
    lines += ["", "Not finished:", "", *lost] if lost else []
    write_text(folder / f"{experiment}.md", "\n".join(lines) + "\n")
    curves = {
        name: [read_rows(cell / "metrics.jsonl") for cell in own] for name, own in finished.items() if own
    }
    comparison(folder / f"{experiment}.png", curves)


def pooled(intervals: list[Interval]) -> Interval:
    """Return the mean of seeds, with the 95 % interval over the test tasks of all of them."""
    half = math.sqrt(sum(one.ci95**2 for one in intervals)) / len(intervals)
    return Interval(statistics.mean(one.mean for one in intervals), half, sum(one.tasks for one in intervals))


def read(cell: Path) -> dict[str, Any]:
    """Return the result of a run."""
    return json.loads((cell / result.FILE).read_text())


def _values(cells: list[Path]) -> list[str]:
    """Return the columns between the name of an algorithm and what papers report."""
    if not cells:
        return ["-"] * (len(HEADER) - 2)
    outcomes, costs = [read(cell) for cell in cells], [read_rows(cell / "costs.jsonl") for cell in cells]
    after = [Interval(**one["metrics"][AFTER]) for one in outcomes]
    before = [one["metrics"][BEFORE]["mean"] for one in outcomes if BEFORE in one["metrics"]]
    trained, tested = (outcomes[0]["protocol"][f"inner_steps_{when}"] for when in ("train", "test"))
    spent = [
        one["step"] * statistics.median(series(rows, TIME)[1])
        for one, rows in zip(outcomes, costs, strict=True)
    ]
    return [
        str(pooled(after)),
        ", ".join(f"{one.mean:.1f}" for one in after),
        f"{statistics.mean(before):.1f}" if before else "-",
        "-" if trained is None else f"{trained}, {tested} in the test",
        outcomes[0]["protocol"]["batch_norm"],
        ", ".join(map(str, sorted({one["step"] for one in outcomes}))),
        f"{statistics.mean(spent) / 60_000:.2f}",
        f"{max(last_values(rows)[PEAK] for rows in costs):.0f}",
    ]


def _protocol(cells: list[Path], config: Table) -> list[str]:
    if not cells:
        return ["No cell is finished."]
    protocol = read(cells[0])["protocol"]
    steps = "those of the experiment" if config.iterations is None else str(config.iterations)
    budget = f"outer steps: {steps}" if config.minutes is None else f"minutes of training: {config.minutes:g}"
    return [
        f"Test tasks: {protocol['tasks']}, {protocol['test_tasks']} a seed. Meta-batch: {protocol['meta_batch']}. "
        f"Budget of a cell, {budget}.",
        "",
        "Accuracy is the mean over seeds with the 95 % confidence interval over all their test tasks; minutes are "
        "outer steps times the median time of one; MiB are the peak of the process on a CPU, of the allocator on a "
        "GPU.",
    ]


def _reason(folder: Path) -> str:
    failure = folder / FAILURE
    return failure.read_text().strip().partition("\n")[0] if failure.exists() else "it has not ended"
