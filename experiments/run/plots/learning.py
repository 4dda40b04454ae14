"""Curves over outer iterations: of one run, and of groups of runs, with their mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.run.metrics import read_rows, series
from experiments.run.plots.style import BLUE, CYCLE, ORANGE, VERMILION, figure, legend_below, thousands

LABELS = {"query_loss": "Query loss", "accuracy(%)": "Query accuracy (%)"}


def learning_curve(folder: Path, *, train_steps: int | None, steps: int | None) -> Path:
    """Draw the metrics of a run, given the numbers of inner steps in training and validation (or None)."""
    rows = read_rows(folder / "metrics.jsonl")
    names = metric_names(rows)
    path = folder / "plots" / "learning_curve.png"
    with figure(path, 1, len(names), size=(6.4 if len(names) == 1 else 10, 4)) as axes:
        for axis, name in zip(axes[0], names, strict=True):
            _training(axis, *series(rows, f"train/{name}"), train_steps)
            _validation(axis, rows, name, steps)
            dress(axis, name)
            axis.set_title(f"{LABELS[name].partition(' (')[0]} over training")
        legend_below(axes[0, 0], columns=3 if len(names) > 1 else 2)
    return path


def metric_names(rows: list[dict[str, Any]]) -> list[str]:
    """Return the metrics that were validated."""
    return [name for name in LABELS if any(f"validation/{name}" in row for row in rows)]


def dress(axis: Any, name: str) -> None:
    """Label the axes of a metric over iterations."""
    axis.set_xlabel("Outer iteration")
    axis.set_ylabel(LABELS[name])
    axis.grid(axis="y")
    axis.margins(x=0.02)
    if name == "query_loss" and _spans_a_decade(axis):
        axis.set_yscale("log")
        plain_log(axis.yaxis)
    thousands(axis.xaxis)


def smooth(values: list[float], window: int) -> list[float]:
    """Return the mean over `window` values to both sides. At the ends the mean is over the values that exist."""
    parts = (values[max(i - window, 0) : i + window + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _training(axis: Any, steps: list[int], values: list[float], inner_steps: int | None) -> None:
    axis.plot(steps, values, color=BLUE, alpha=0.22, linewidth=0.7)
    smoothed = smooth(values, len(values) // 60)
    axis.plot(steps, smoothed, color=BLUE, label=f"Training{_after(inner_steps)}, smoothed")


def _validation(axis: Any, rows: list[dict[str, Any]], name: str, inner_steps: int | None) -> None:
    stem, bracket, unit = name.partition("(")
    steps, means = series(rows, f"validation/{name}")
    halves = series(rows, f"validation/{stem}_ci95{bracket}{unit}")[1]
    before = series(rows, f"validation/{stem}_before{bracket}{unit}")[1]
    dashes = (0, (4, 2))
    if before:
        axis.plot(
            steps, before, color=ORANGE, linewidth=1.2, linestyle=dashes, label="Validation, before adapting"
        )
    label = f"Validation{_after(inner_steps)}, 95 % interval"
    axis.errorbar(
        steps, means, yerr=halves, color=VERMILION, fmt="o", markersize=3.5, linewidth=1.2, label=label
    )


def _after(inner_steps: int | None) -> str:
    return "" if inner_steps is None else f", after {inner_steps} inner step{'s' if inner_steps != 1 else ''}"


def _spans_a_decade(axis: Any) -> bool:
    low, high = axis.dataLim.intervaly
    return 0 < low < high / 10


def plain_log(axis: Any) -> None:
    """Label an axis that is logarithmic over few decades by 1, 2, 5, 10."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


Rows = list[dict[str, Any]]


DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))
"""The line styles: the first groups are solid, and groups that repeat a color are dashed or dotted."""


def comparison(path: Path, groups: dict[str, list[Rows]]) -> Path | None:
    """Draw the validation metrics of groups of runs. Return None if there is nothing to draw."""
    names = metric_names([row for runs in groups.values() for rows in runs for row in rows])
    if not names:
        return None
    with figure(path, 1, len(names), size=(6.6 if len(names) == 1 else 11, 3.9)) as axes:
        for axis, name in zip(axes[0], names, strict=True):
            for i, (setting, runs) in enumerate(groups.items()):
                _group(
                    axis,
                    setting,
                    [series(rows, f"validation/{name}") for rows in runs],
                    CYCLE[i % len(CYCLE)],
                    DASHES[i // len(CYCLE) % len(DASHES)],
                )
            dress(axis, name)
            axis.set_title(f"Validation {axis.get_ylabel().partition(' (')[0].lower()}")
        legend_below(axes[0, 0], columns=min(len(groups), 3))
    return path


def mean_curve(runs: list[tuple[list[int], list[float]]]) -> tuple[list[int], list[float]]:
    """Return the mean over runs at the steps that all runs have reached."""
    curves = [dict(zip(*run, strict=True)) for run in runs]
    shared = sorted(set.intersection(*map(set, curves)))
    return shared, [sum(curve[step] for curve in curves) / len(curves) for step in shared]


def _group(
    axis: Any, setting: str, runs: list[tuple[list[int], list[float]]], color: str, dashes: Any
) -> None:
    drawn = [run for run in runs if run[0]]
    if not drawn:
        axis.plot([], [], color=color, label=f"{setting} (no data)")
        return
    if len(drawn) > 1:
        for run in drawn:
            axis.plot(*run, color=color, alpha=0.35, linewidth=0.8)
    count = f" (mean of {len(drawn)})" if len(drawn) > 1 else ""
    axis.plot(
        *mean_curve(drawn), marker="o", ls=dashes, markersize=3.2, color=color, label=f"{setting}{count}"
    )
