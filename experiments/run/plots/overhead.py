"""What order 2 costs over order 1, how a meta-gradient grows with inner steps, and what each remedy buys."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.run.plots.optimizers import spread
from experiments.run.plots.style import BLUE, CYCLE, GREEN, INK, MUTED, VERMILION, figure
from experiments.studies.overhead.methods import META, PRODUCT, SECOND
from experiments.studies.overhead.rows import MIB, Row, chosen, unique
from experiments.studies.overhead.work import DENSE

if TYPE_CHECKING:
    from pathlib import Path

COSTS = {
    (SECOND, ""): ("Second derivative", BLUE),
    (PRODUCT, ""): ("Hessian product, graph kept", GREEN),
    (PRODUCT, "forward over reverse"): ("Hessian product, forward over reverse", VERMILION),
}
LINES = {"": ("all graphs", "-"), "step": ("step", "--"), "sqrt": ("sqrt", ":")}
EXACT = 1e-4  # error up to which a remedy changes nothing
TIMES, PEAKS = (0.3, 10), (0.1, 2.2)  # in sight, in those without a remedy
GAP = 0.075  # of the height of a panel, from one label to the next


def draw(path: Path, rows: Sequence[Row]) -> Path:
    """Draw a row of costs, and a row of remedies."""
    base = [row for row in chosen(rows, axis="base") if not row["note"]]
    with figure(path, 2, 3, size=(14, 8.6), height_ratios=(1, 1.1)) as axes:
        _orders(axes[0, 0], base, "peak/gradients", "Peak memory, in gradients")
        _orders(axes[0, 1], base, "seconds/gradients", "Time, in gradients")
        handles, labels = axes[0, 1].get_legend_handles_labels()
        axes[0, 1].figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
        _steps(axes[0, 2], [row for row in chosen(rows, axis="steps", quantity=META) if not row["note"]])
        for axis, quantity in zip(axes[1], (SECOND, PRODUCT, META), strict=True):
            _remedies(axis, chosen(base, quantity=quantity), quantity)
        for label, color in (("the same result", BLUE), ("another: off by more than 0.01 %", VERMILION)):
            axes[1, 0].plot([], [], "o", color=color, markersize=6, label=label)
        axes[1, 0].legend(loc="lower left", fontsize=8.5)
    return path


def _orders(axis: Any, base: Sequence[Row], value: str, title: str) -> None:
    models = [name for (name,) in unique(base, "model")]
    for i, ((quantity, remedy), (label, color)) in enumerate(COSTS.items()):
        found = chosen(base, quantity=quantity, remedy=remedy)
        heights = [models.index(row["model"]) + 0.27 * (i - 1) for row in found]
        axis.barh(heights, [row[value] for row in found], height=0.24, color=color, alpha=0.85, label=label)
    axis.axvline(1, color=MUTED, linewidth=0.8)
    axis.set_yticks(range(len(models)), models)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.set_title(title)
    axis.grid(axis="x")


def _steps(axis: Any, rows: Sequence[Row]) -> None:
    """Draw peaks over inner steps, in units of the peak of one step with all graphs."""
    for i, (name,) in enumerate(unique(rows, "model")):
        own = chosen(rows, model=name)
        unit = min(chosen(own, remedy=""), key=lambda row: row["steps"])["peak"]
        for remedy, (_, dashes) in LINES.items():
            line = chosen(own, remedy=remedy)
            peaks = [row["peak"] / unit for row in line]
            axis.plot([row["steps"] for row in line], peaks, dashes, color=CYCLE[i], linewidth=1.5)
        axis.plot([], [], color=CYCLE[i], label=f"{name}, {unit / MIB:.3g} MiB")
    for label, dashes in LINES.values():
        axis.plot([], [], dashes, color=INK, label=label)
    axis.set(xscale="log", yscale="log", xlabel="Inner steps")
    _plain(axis.xaxis, sorted({row["steps"] for row in rows}))
    _plain(axis.yaxis, [1, 2, 5, 10, 20, 50])
    axis.set_title("Peak of a meta-gradient, in that of one step")
    axis.grid()
    axis.legend(loc="upper left", fontsize=8.5)


def _remedies(axis: Any, rows: Sequence[Row], quantity: str) -> None:
    """Draw what each remedy takes: the median over models, with lines to the least and the most."""
    points = {}
    for (remedy,) in unique(rows, "remedy"):
        own = chosen(rows, remedy=remedy)
        if remedy not in ("", DENSE):
            time, peak = ([row[f"{name}/ways"] for row in own] for name in ("seconds", "peak"))
            points[remedy] = (
                _within(statistics.median(time), TIMES),
                _within(statistics.median(peak), PEAKS),
            )
            is_exact = statistics.median(row["error"] for row in own) < EXACT
            color = BLUE if is_exact else VERMILION
            axis.plot([min(time), max(time)], [points[remedy][1]] * 2, color=color, alpha=0.3, linewidth=1)
            axis.plot([points[remedy][0]] * 2, [min(peak), max(peak)], color=color, alpha=0.3, linewidth=1)
            axis.plot(*points[remedy], "o", color=color, markersize=6)
    axis.axhline(1, color=MUTED, linewidth=0.8, zorder=0)
    axis.axvline(1, color=MUTED, linewidth=0.8, zorder=0)
    axis.set(
        xscale="log", yscale="log", xlabel="Time, in that without a remedy", ylabel="Peak memory, likewise"
    )
    axis.set(xlim=TIMES, ylim=PEAKS)
    _plain(axis.xaxis, [0.5, 1, 2, 4, 8])
    _plain(axis.yaxis, [0.125, 0.25, 0.5, 1, 2])
    axis.set_title(f"Remedies: {quantity}")
    axis.grid()
    _label(axis, points)


def _within(value: float, ends: tuple[float, float]) -> float:
    return min(max(value, ends[0]), ends[1])


def _label(axis: Any, points: dict[str, tuple[float, float]]) -> None:
    """Write names at the right, moved apart where they would overlap."""
    low, high = PEAKS
    heights = {name: math.log(y / low) / math.log(high / low) for name, (_, y) in points.items()}
    line = {
        "arrowstyle": "-",
        "color": MUTED,
        "linewidth": 0.5,
        "relpos": (0, 0.5),
        "shrinkA": 0,
        "shrinkB": 3,
    }
    for name, height in spread(heights, GAP).items():
        axis.annotate(
            name,
            points[name],
            (1.03, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=INK,
            arrowprops=line,
            annotation_clip=False,
        )


def _plain(axis: Any, values: Sequence[float]) -> None:
    """Put ticks with plain numbers at values that are in sight."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(FixedLocator([value for value in values if 0.9 * low <= value <= 1.1 * high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
