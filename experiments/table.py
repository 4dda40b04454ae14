"""Compare algorithms: `python -m experiments.table [algorithms=[maml,protonet]] [minutes=15] [KEY=VALUE ...]`.

A cell of the grid is an experiment, an algorithm and a seed. Each cell is a run of `experiments.train` in its own
process, in `FOLDER/EXPERIMENT/ALGORITHM/SEED`. The same command resumes: it skips finished cells and resumes
interrupted cells from their checkpoints. After every cell it writes the tables `FOLDER/EXPERIMENT.md` and the
validation curves `FOLDER/EXPERIMENT.png`.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from tqdm.contrib.logging import logging_redirect_tqdm

from experiments.run import checkpoint, result, resume
from experiments.run.build import build_tasks
from experiments.run.config import composed, converted
from experiments.run.evaluate import Interval
from experiments.run.files import markdown, write_text
from experiments.run.help import CONF
from experiments.run.job import launch
from experiments.run.metrics import last_values, read_rows, series
from experiments.run.plots.learning import comparison
from experiments.run.progress import Progress
from experiments.run.schema import key

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("experiments.table")
PILOT = 30  # outer steps that measure the time of one step
TIME, PEAK = "time/outer_step(ms)", "memory/peak(MiB)"
METRICS = {
    "accuracy (%)": ("test/accuracy(%)", "test/accuracy_before(%)"),
    "query loss": ("test/query_loss", "test/query_loss_before"),
}
"""The metrics after and before adaptation, by the title of their column. Regression tasks have no accuracy."""
HEADER = [
    "algorithm",
    "of each seed",
    "before",
    "inner steps",
    "batch norm",
    "outer steps",
    "min",
    "MiB",
    "papers",
]
SHORT = ["evaluate.tasks=2", "evaluate.validation_tasks=2", "memory.enabled=false", "log.every=5"]


@dataclass
class Table:
    """A grid of runs."""

    folder: str = key("Where cells and tables are.")
    experiments: list[str] = key("The protocols, options of `experiment`; each has a table.")
    algorithms: list[str] = key("Options of `algorithm`, the rows of a table.")
    seeds: list[int] = key("The seeds of each row.")
    iterations: int | None = key("Outer steps of every cell; null is the number of the experiment.")
    minutes: float | None = key("Minutes of training of every cell, which say how many outer steps it takes.")
    overrides: list[str] = key('Overrides of every cell: ["threads=1"].')
    own: dict[str, list[str]] = key('Overrides of the cells of an algorithm: {maml: ["algorithm.steps=3"]}.')
    papers: dict[str, dict[str, Any]] = key(  # str, but OmegaConf merges no file into a dict of dicts of str
        "What the papers report, by experiment and algorithm."
    )


class Cell(NamedTuple):
    """A run of the grid."""

    folder: Path
    overrides: list[str]


ConfigStore.instance().store(name="table_schema", node=Table)


def main() -> None:
    """Run the program."""
    launch(program, "table", "experiments.table")


@hydra.main(config_path="../conf", config_name="table", version_base="1.3")
def program(config: DictConfig) -> None:
    """Run the cells that are missing, and write the tables."""
    run_table(converted("table", config))


def run_table(config: Table) -> None:
    """Run all cells, seed by seed, so that an interrupted table has every row."""
    if config.iterations is not None and config.minutes is not None:
        raise ValueError("table: give iterations or minutes, not both.")
    if config.minutes is not None and not 0 < config.minutes < math.inf:
        raise ValueError(f"table: minutes must be positive and finite, got {config.minutes}.")
    for group, names in {"experiment": config.experiments, "algorithm": config.algorithms}.items():
        for name in names:
            if not (CONF / group / f"{name}.yaml").is_file():
                raise ValueError(f"table: there is no {group}={name}; conf/{group} has one file for each.")
    _check_data(config)
    grid = list(itertools.product(config.seeds, config.experiments, config.algorithms))
    if config.minutes is not None:
        log.info("%d cells take about %.1f hours of training.", len(grid), len(grid) * config.minutes / 60)
    with logging_redirect_tqdm(), Progress(grid, unit="cell") as bar:
        for seed, experiment, algorithm in bar:
            bar.set_postfix_str(f"{experiment} {algorithm} {seed}")
            start(_cell(config, experiment, algorithm, seed))
            write(config, experiment)
    for experiment in config.experiments:
        print((Path(config.folder) / f"{experiment}.md").read_text())


def _check_data(config: Table) -> None:
    """Raise before the first cell if the data of an experiment are missing."""
    for experiment in config.experiments:
        build_tasks(
            converted("table", composed("config", [f"experiment={experiment}", *config.overrides])).task
        )


def start(cell: Cell) -> None:
    """Run a cell if it is not finished, and resume from its checkpoint if there is one.

    Raises:
        ValueError: Its folder holds a run with other overrides.
    """
    saved = cell.folder / ".hydra" / "overrides.yaml"
    if saved.exists() and (yaml.safe_load(saved.read_text()) or []) != cell.overrides:
        raise ValueError(
            f"table: {cell.folder} holds a run with other overrides, {saved}; choose another folder=, or remove it."
        )
    if not (cell.folder / result.FILE).exists():
        log.info("%s", cell.folder)
        where = resume.quoted(cell.folder)
        is_begun = (cell.folder / checkpoint.FILE).exists()
        arguments = [f"resume={where}"] if is_begun else [*cell.overrides, f"hydra.run.dir={where}"]
        train(arguments)


def train(arguments: list[str]) -> None:
    """Run `experiments.train` in its own process, whose peak memory is the peak memory of the cell."""
    subprocess.run([sys.executable, "-m", "experiments.train", *arguments], check=False)


def _cell(config: Table, experiment: str, algorithm: str, seed: int) -> Cell:
    folder = Path(config.folder) / experiment / algorithm
    choice = [f"experiment={experiment}", f"algorithm={algorithm}"]
    overrides = [*choice, f"seed={seed}", *config.overrides, *config.own.get(algorithm, [])]
    number = config.iterations
    if config.minutes is not None:
        pilot = Cell(folder / "pilot", [*overrides[:2], *overrides[3:], f"iterations={PILOT}", *SHORT])
        start(pilot)
        times = series(read_rows(pilot.folder / "costs.jsonl"), TIME)[1]
        number = max(1, round(60_000 * config.minutes / statistics.median(times))) if times else 1
    return Cell(folder / str(seed), overrides if number is None else [*overrides, f"iterations={number}"])


def write(config: Table, experiment: str) -> None:
    """Write the table of an experiment, and draw its validation curves."""
    folder, papers = Path(config.folder), config.papers.get(experiment, {})
    cells = {
        name: [folder / experiment / name / str(seed) for seed in config.seeds] for name in config.algorithms
    }
    finished = {name: [cell for cell in own if (cell / result.FILE).exists()] for name, own in cells.items()}
    title = _title([cell for own in finished.values() for cell in own])
    header = [*HEADER[:1], title, *HEADER[1:]]
    rows = [[name, *_values(finished[name], *METRICS[title]), papers.get(name, "-")] for name in cells]
    lines = [
        f"# {experiment}",
        "",
        *_protocol([cell for own in finished.values() for cell in own], config),
        "",
        markdown([header, *rows]),
    ]
    lost = [
        f"- {cell}: {result.reason(cell)}"
        for name in cells
        for cell in cells[name]
        if cell not in finished[name]
    ]
    lines += ["", "Not finished:", "", *lost] if lost else []
    write_text(folder / f"{experiment}.md", "\n".join(lines) + "\n")
    curves = {
        name: [read_rows(cell / "metrics.jsonl") for cell in own] for name, own in finished.items() if own
    }
    comparison(folder / f"{experiment}.png", curves)


def pooled(intervals: list[Interval]) -> Interval:
    """Return the mean over seeds, with the 95 % interval over the test tasks of all seeds."""
    half = math.sqrt(sum(one.ci95**2 for one in intervals)) / len(intervals)
    return Interval(statistics.mean(one.mean for one in intervals), half, sum(one.tasks for one in intervals))


def read(cell: Path) -> dict[str, Any]:
    """Return the result of a run."""
    return json.loads((cell / result.FILE).read_text())


def _title(cells: list[Path]) -> str:
    """Return the title of the first metric that the runs have."""
    known = {name for cell in cells for name in read(cell)["metrics"]}
    return next((title for title, (after, _) in METRICS.items() if after in known), "accuracy (%)")


def _values(cells: list[Path], metric: str, first: str) -> list[str]:
    """Return the measured columns of a row of the table."""
    if not cells:
        return ["-"] * (len(HEADER) - 1)
    outcomes, costs = [read(cell) for cell in cells], [read_rows(cell / "costs.jsonl") for cell in cells]
    after = [Interval(**one["metrics"][metric]) for one in outcomes]
    before = [one["metrics"][first]["mean"] for one in outcomes if first in one["metrics"]]
    trained, tested = (outcomes[0]["protocol"][f"inner_steps_{when}"] for when in ("train", "test"))
    spent = [
        one["step"] * statistics.median(series(rows, TIME)[1])
        for one, rows in zip(outcomes, costs, strict=True)
    ]
    return [
        str(pooled(after)),
        ", ".join(f"{one.mean:.3g}" for one in after),
        f"{statistics.mean(before):.3g}" if before else "-",
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
        "A result is the mean over seeds with the 95 % confidence interval over all their test tasks; minutes are "
        "outer steps times the median time of one; MiB are the peak of the process on a CPU, of the allocator on a "
        "GPU.",
    ]


if __name__ == "__main__":
    main()
