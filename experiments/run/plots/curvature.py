"""Curvature over training: spectral densities, traces with 95 % intervals, and the largest eigenvalues."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from experiments.run.metrics import read_rows, series
from experiments.run.plots.style import BLUE, CYCLE, INK, MUTED, VERMILION, figure, legend_below
from experiments.studies.curvature.measure import TOTAL, density_of

if TYPE_CHECKING:
    from pathlib import Path

    from metagrad.curvature import Density

    Rows = list[dict[str, Any]]

MOST_COLUMNS, MOST_TICKS = 3, 9
DECADE = 10
MARKERS = ("o", "^", "s")


def draw(folder: Path) -> list[Path]:
    """Draw all plots of a run folder."""
    rows = read_rows(folder / "metrics.jsonl")
    return [densities(folder), traces(folder, rows), eigenvalues(folder, rows)]


def densities(folder: Path) -> Path:
    """Draw the spectral density at every measured step, one panel each, over its own range of eigenvalues."""
    found = [(row["step"], density_of(row)) for row in read_rows(folder / "densities.jsonl")]
    rows = math.ceil(len(found) / MOST_COLUMNS)
    columns = math.ceil(len(found) / rows)
    path = folder / "plots" / "density.png"
    size = (max(3.4 * columns, 6.4), 2.8 * rows + 0.3)
    with figure(path, rows, columns, size=size, sharey=True) as axes:
        panels = axes.flatten()
        floor = min(floor_of(density) for _, density in found)
        highest = [
            draw_density(axis, density, floor) for axis, (_, density) in zip(panels, found, strict=False)
        ]
        for axis, (step, _) in zip(panels, found, strict=False):
            axis.set_title(f"Step {step:,}")
            axis.set_xlabel("Eigenvalue")
        for axis in panels[len(found) :]:
            axis.set_axis_off()
        for axis in axes[:, 0]:
            axis.set_ylabel("Spectral density, standard error")
        panels[0].set_yscale("log")
        panels[0].set_ylim(floor, 3 * max(highest))
    return path


def traces(folder: Path, rows: Rows) -> Path:
    """Draw the trace of the whole matrix, and of every layer, against the step."""
    names = [key.removeprefix("trace/") for key in rows[0] if key.startswith("trace/")]
    layers = [name for name in names if name != TOTAL and not name.endswith("_ci95")]
    path = folder / "plots" / "traces.png"
    with figure(path, 1, 2, size=(10, 4.2)) as axes:
        whole, parts = axes[0]
        _line(whole, rows, f"trace/{TOTAL}", color=INK, half=f"trace/{TOTAL}_ci95")
        for i, name in enumerate(layers):
            style = {"color": CYCLE[i % len(CYCLE)], "marker": MARKERS[i // len(CYCLE) % len(MARKERS)]}
            _line(parts, rows, f"trace/{name}", half=f"trace/{name}_ci95", label=name, **style)
        for axis, title in ((whole, "Trace"), (parts, "Trace by layer")):
            _dress(axis, rows, "Trace, 95 % interval")
            axis.set_title(title)
        legend_below(parts, columns=min(len(layers), 5))
    return path


def eigenvalues(folder: Path, rows: Rows) -> Path:
    """Draw the largest eigenvalues with their bounds, and the lowest seen, against the step."""
    path = folder / "plots" / "eigenvalues.png"
    count = sum(key.startswith("eigenvalue/") and key.endswith("_residual") for key in rows[0])
    with figure(path, size=(6.8, 4.2)) as axes:
        axis = axes[0, 0]
        for i in range(1, count + 1):
            fade = 1 - 0.7 * (i - 1) / max(count - 1, 1)
            label = "Largest" if i == 1 else f"Next {count - 1}" if i == 2 else None
            options = {"color": BLUE, "alpha": fade, "label": label}
            _line(axis, rows, f"eigenvalue/{i}", half=f"eigenvalue/{i}_residual", **options)
        _line(axis, rows, "eigenvalue/lowest_seen", color=VERMILION, label="Lowest seen")
        _dress(axis, rows, "Eigenvalue, with its bound")
        axis.set_title("Largest eigenvalues over training")
        legend_below(axis, columns=3)
    return path


def draw_density(
    axis: Any, density: Density, floor: float, *, color: str = BLUE, label: str | None = None
) -> float:
    """Draw the mean over probes, a standard error to both sides of it, and return its largest value."""
    grid = density.grid()
    found = density(grid)
    low, high = found.value - found.stderr, found.value + found.stderr
    if len(density.nodes) > 1:
        axis.fill_between(grid, low.clamp_min(floor), high, color=color, alpha=0.25, linewidth=0)
    axis.plot(grid, found.value, color=color, linewidth=1.1, label=label)
    axis.grid(axis="y")
    return found.value.max().item()


def floor_of(density: Density) -> float:
    """Return a tenth of the height of one eigenvalue."""
    return 0.1 / (density.n * density.sigma * math.sqrt(2 * math.pi))


def _line(axis: Any, rows: Rows, name: str, *, half: str | None = None, **options: Any) -> None:
    steps, values = series(rows, name)
    halves = None if half is None else series(rows, half)[1]
    axis.errorbar(
        steps,
        values,
        yerr=halves,
        **{"marker": "o", "markersize": 4, "linewidth": 1.4, "elinewidth": 1, "capsize": 2, **options},
    )


def _dress(axis: Any, rows: Rows, label: str) -> None:
    """Label the axes; a logarithmic one, zero included, where steps span more than a decade."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    steps = [row["step"] for row in rows]
    first, last = next((step for step in steps if step), 1), steps[-1]
    if last > DECADE * first:
        axis.set_xscale("symlog", linthresh=first, linscale=0.5)
        axis.set_xlim(-0.4 * first, 1.4 * last)
    axis.set_xlabel("Training step")
    axis.set_ylabel(label)
    axis.grid(axis="y")
    axis.axhline(0, color=MUTED, linewidth=0.8)
    axis.xaxis.set_major_locator(FixedLocator(steps, nbins=MOST_TICKS))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
