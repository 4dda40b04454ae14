"""Validation curves of several groups of runs: the mean over runs, and each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.run.metrics import series
from experiments.run.plots.learning import dress, metric_names
from experiments.run.plots.style import CYCLE, figure, legend_below

if TYPE_CHECKING:
    from pathlib import Path

    Rows = list[dict[str, Any]]


DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))
"""The lines of the groups that have a colour first, second and third."""


def comparison(path: Path, groups: dict[str, list[Rows]]) -> Path | None:
    """Draw the validation metrics of groups of runs; None if there is nothing to draw."""
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
