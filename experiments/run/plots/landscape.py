"""The landscape along training: losses, sharpness against the edge of stability, traces, and the last densities."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.run.plots.curvature import draw_density, floor_of
from experiments.run.plots.style import CYCLE, INK, MUTED, figure, legend_below, thousands
from experiments.studies.curvature.measure import TOTAL, density_of
from experiments.studies.study import by_cell

if TYPE_CHECKING:
    from experiments.studies.landscape.schema import LandscapeConfig
    from experiments.studies.study import Result

    Runs = dict[str, list[Result]]
    Quantity = Callable[[dict[str, Any]], float | None]


def figures(results: list[Result], config: LandscapeConfig, folder: Path) -> list[Path]:
    """Draw all panels into one figure."""
    runs, path = by_cell(results), folder / "landscape.png"
    colors = dict(zip(config.runs, itertools.cycle((*CYCLE, INK))))
    with figure(path, 2, 3, size=(12.5, 7)) as axes:
        panels = iter(axes.flatten())
        for title, label, quantity in (
            ("Training loss", "Squared error", lambda row: row["loss"]),
            ("Largest eigenvalue of the Hessian", "Eigenvalue", lambda row: row["sharpness"]),
            ("Where each optimizer trains", "Preconditioned sharpness / edge", ratio),
        ):
            axis = next(panels)
            for name, repeated in runs.items():
                _curve(axis, repeated, quantity, label=config.runs[name].title, color=colors[name])
            _dress(axis, title, label)
        axes[0, 0].set_yscale("log")
        axes[0, 1].set_ylim(0, None)
        _edges(axes[0, 2])
        _descents(next(panels), runs, config, colors)
        _traces(next(panels), runs, colors)
        _densities(next(panels), runs, colors)
        legend_below(axes[0, 0], columns=len(runs))
    return [path]


def ratio(row: dict[str, Any]) -> float | None:
    """Return the preconditioned sharpness over the edge of stability, where there is a preconditioner."""
    return None if row["preconditioned"] is None or not row["edge"] else row["preconditioned"] / row["edge"]


def _curve(axis: Any, repeated: list[Result], quantity: Quantity, **options: Any) -> None:
    """Draw the median over seeds, and their range."""
    points = []
    for rows in zip(*(one["path"] for one in repeated), strict=False):
        values = [value for row in rows if (value := quantity(row)) is not None]
        if values:
            points.append((rows[0]["step"], statistics.median(values), min(values), max(values)))
    steps, medians, lows, highs = zip(*points, strict=True)
    axis.fill_between(steps, lows, highs, color=options["color"], alpha=0.15, linewidth=0)
    axis.plot(steps, medians, linewidth=1.4, **options)


def _edges(axis: Any) -> None:
    axis.axhline(1, color=INK, linewidth=1, linestyle=":")
    axis.set_ylim(0, 2)


def _descents(axis: Any, runs: Runs, config: LandscapeConfig, colors: dict[str, str]) -> None:
    """Draw the sharpness of gradient descent at each step size, and 2 over that."""
    for name, repeated in runs.items():
        run = config.runs[name]
        if run.method.value == "gd" and not run.rho and not run.penalty:
            _curve(axis, repeated, lambda row: row["sharpness"], color=colors[name])
            axis.axhline(2 / run.lr, color=colors[name], linewidth=1, linestyle=":")
            axis.annotate(
                f"2 / {run.lr:g}", (0.01, 2 / run.lr), xycoords=("axes fraction", "data"), color=MUTED,
                va="bottom",
            )  # fmt: skip
    _dress(axis, "Gradient descent", "Largest eigenvalue")
    axis.set_ylim(0, None)


def _traces(axis: Any, runs: Runs, colors: dict[str, str]) -> None:
    """Draw the mean trace over seeds, with the 95 % interval that the estimates leave it."""
    for name, repeated in runs.items():
        groups = list(zip(*(one["spectra"] for one in repeated), strict=False))
        means = [statistics.mean(row[f"trace/{TOTAL}"] for row in rows) for rows in groups]
        halves = [math.hypot(*(row[f"trace/{TOTAL}_ci95"] for row in rows)) / len(rows) for rows in groups]
        options = {"marker": "o", "markersize": 3, "linewidth": 1.4, "elinewidth": 1, "capsize": 2}
        axis.errorbar([rows[0]["step"] for rows in groups], means, yerr=halves, **options, color=colors[name])
    _dress(axis, "Trace of the Hessian", "Trace, 95 % interval")
    axis.set_ylim(0, None)


def _densities(axis: Any, runs: Runs, colors: dict[str, str]) -> None:
    """Draw the spectral density at the end of the first seed of each run."""
    found = {name: density_of(repeated[0]["spectra"][-1]["density"]) for name, repeated in runs.items()}
    floor = min(floor_of(density) for density in found.values())
    highest = max(draw_density(axis, density, floor, color=colors[name]) for name, density in found.items())
    axis.set_yscale("log")
    axis.set_ylim(floor, 3 * highest)
    axis.set_title("Spectrum after training, one seed")
    axis.set_xlabel("Eigenvalue")
    axis.set_ylabel("Spectral density, standard error")
    axis.grid(axis="y")


def _dress(axis: Any, title: str, label: str) -> None:
    axis.set_title(title)
    axis.set_xlabel("Training step")
    axis.set_ylabel(label)
    axis.grid(axis="y")
    thousands(axis.xaxis)
