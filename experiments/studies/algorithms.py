"""Every algorithm for the same seconds: `python -m experiments.studies.algorithms [KEY=VALUE ...]`.

Each algorithm trains on the tasks of a protocol for a fixed number of CPU seconds. It then adapts to new tasks with
different numbers of inner steps. An algorithm with a closed-form head has no inner steps and is evaluated once. The
pages of the site draw `curves.json`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.run import build, outer
from experiments.run.config import composed, typed
from experiments.run.evaluate import Interval, evaluate
from experiments.run.files import markdown
from experiments.run.plots.panels import Curve, Panel, all_curves, write_panels
from experiments.run.schema import Config, key
from experiments.studies.study import Cell, Result, Study, StudyConfig, Work, by_cell

MEASURES = {"accuracy(%)": "accuracy (%)", "query_loss": "squared error"}
"""The metrics of classification and of regression, and the axis label of each metric."""
BEFORE = {"accuracy(%)": "accuracy_before(%)", "query_loss": "query_loss_before"}


@dataclass
class Protocol:
    """The tasks, the model, and the training time of a protocol."""

    title: str = key("What a figure calls it.")
    seconds: float = key("Seconds of CPU that an algorithm trains.")
    tasks: int = key("New tasks that it is evaluated on.")
    overrides: list[str] = key("Of experiments.train, for all of them.")
    algorithms: dict[str, list[str]] = key("What differs, by algorithm.")


@dataclass
class AlgorithmsConfig(StudyConfig):
    """The protocols, the algorithms and the numbers of inner steps."""

    steps: list[int] = key("Numbers of inner steps after which an algorithm is evaluated, besides 0.")
    most: dict[str, int] = key("The most of these, of algorithms that learn something for each step.")
    only: list[str] = key("The algorithms that run; empty is all.")
    protocols: dict[str, Protocol] = key("Protocols by name.")


def check(config: AlgorithmsConfig) -> None:
    """Raise `ValueError` for algorithms that do not exist."""
    known = {name for protocol in config.protocols.values() for name in protocol.algorithms}
    if unknown := set(config.only) - known:
        raise ValueError(f"algorithms: only has {sorted(unknown)}; there are {sorted(known)}.")


def cells(config: AlgorithmsConfig) -> list[Cell]:
    """Return every algorithm of every protocol, for the first seed, then for the next seeds."""
    return [
        Cell(f"{name}/{algorithm}", seed, partial(evaluated, config, protocol, algorithm))
        for seed in config.seeds
        for name, protocol in config.protocols.items()
        for algorithm in protocol.algorithms
        if algorithm in (config.only or protocol.algorithms)
    ]


def evaluated(config: AlgorithmsConfig, protocol: Protocol, algorithm: str, work: Work) -> Result:
    """Train an algorithm, and evaluate it after each number of inner steps."""
    choice = [f"algorithm={algorithm}", "logger=none", f"seed={work.seed}"]
    settings = typed(composed("config", [*protocol.overrides, *choice, *protocol.algorithms[algorithm]]))
    parts, splits = build.build_parts(settings), build.build_splits(settings)
    outer_steps = trained(parts, splits.train, settings.meta_batch, protocol.seconds)
    most = config.most.get(algorithm, max(config.steps))
    numbers = [None] if settings.evaluate.steps is None else [n for n in config.steps if n <= most]
    found = [_on_new_tasks(parts, splits.test, settings, protocol.tasks, steps) for steps in numbers]
    name = next(name for name in MEASURES if name in found[0])
    before = found[0].get(BEFORE[name])
    values = [intervals[name].mean for intervals in found]
    work.log(outer_steps, {name: values[-1]})
    return {
        "outer_steps": outer_steps,
        "inner_steps": settings.algorithm.steps,
        "measure": MEASURES[name],
        "steps": None if before is None else [0, *numbers],
        "values": values if before is None else [before.mean, *values],
    }


def _on_new_tasks(
    parts: build.Parts, tasks: Any, settings: Config, number: int, steps: int | None
) -> dict[str, Interval]:
    """Return the metrics of an algorithm on new tasks. Every call uses the same tasks."""
    return evaluate(
        parts.algorithm,
        tasks,
        num_tasks=number,
        steps=steps,
        chunk=settings.evaluate.chunk,
        generator=build.generator(settings.seed, "test"),
        device=build.device(settings),
    )


def trained(parts: build.Parts, tasks: Any, meta_batch: int, seconds: float) -> int:
    """Train for a number of CPU seconds, and return the number of outer steps."""
    advance: Callable[[], object] = getattr(parts.algorithm, "advance", lambda: None)
    began, number = time.process_time(), 0
    while time.process_time() - began < seconds:
        outer.step(parts, tasks.sample(meta_batch, generator=parts.generator), lambda _: nullcontext())
        advance()
        number += 1
    return number


def report(results: list[Result], config: AlgorithmsConfig) -> str:
    """Return a table for each protocol: means over seeds, after each number of inner steps."""
    parts = ["# Algorithms by one protocol", ""]
    for name, protocol in config.protocols.items():
        found = _of(results, name)
        if found:
            measure = next(iter(found.values()))[0]["measure"]
            header = ["algorithm", *(f"after {n}" for n in (0, *config.steps)), "outer steps", "trained with"]
            rows = [_row(algorithm, runs, len(header)) for algorithm, runs in found.items()]
            budget = f"{protocol.tasks} new tasks, {protocol.seconds:g} s of training"
            parts += [f"**{protocol.title}**: {measure} of {budget}.", "", markdown([header, *rows]), ""]
    return "\n".join(parts)


def figures(results: list[Result], config: AlgorithmsConfig, folder: Path) -> list[Path]:
    """Write the curves for the pages of the site, and draw them."""
    found = {name: _of(results, name) for name in config.protocols}
    panels = [_panel(config.protocols[name], runs) for name, runs in found.items() if runs]
    write_panels(folder / "curves.json", panels)
    return [all_curves(folder / "algorithms.png", panels)]


def _panel(protocol: Protocol, found: dict[str, list[Result]]) -> Panel:
    runs = next(iter(found.values()))
    measure = runs[0]["measure"]
    curves = {name: _curve(own) for name, own in found.items()}
    is_loss = measure == "squared error"
    return Panel(
        protocol.title, "Inner steps", measure.capitalize(), "linear", "log" if is_loss else "linear", curves
    )


def _curve(runs: list[Result]) -> Curve:
    columns = list(zip(*(run["values"] for run in runs), strict=True))
    middle = [sum(column) / len(column) for column in columns]
    said = f"{runs[0]['outer_steps']:,} outer steps"
    return Curve(runs[0]["steps"], middle, [min(c) for c in columns], [max(c) for c in columns], said)


def _row(algorithm: str, runs: list[Result], width: int) -> list[str]:
    values = [f"{value:.3g}" for value in _curve(runs).middle]
    steps, inner = str(runs[0]["outer_steps"]), runs[0]["inner_steps"]
    blank = [""] * (width - 3 - len(values))
    return [algorithm, *values, *blank, steps, "" if inner is None else f"{inner} inner steps"]


def _of(results: list[Result], protocol: str) -> dict[str, list[Result]]:
    """Return the results of a protocol by algorithm."""
    found = by_cell(one for one in results if one["cell"].startswith(f"{protocol}/"))
    return {cell.partition("/")[2]: runs for cell, runs in found.items()}


study = Study(
    "algorithms",
    AlgorithmsConfig,
    cells=cells,
    report=report,
    figures=figures,
    check=check,
    free=["only"],
)

if __name__ == "__main__":
    study.main()
