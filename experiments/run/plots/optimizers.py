"""Losses of optimizers against steps, seconds and gradient-equivalents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.run.plots.style import CYCLE, MUTED, figure

if TYPE_CHECKING:
    from pathlib import Path

Curve = dict[str, list[float]]
"""What a run has measured, by name, one value for each evaluation."""

AXES = {"step": "Steps", "seconds": "Seconds", "gradient_equivalents": "Gradient-equivalents"}
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.4)))
MOST_ABOVE = 2.5  # times the median of final losses: where panels end, since what is of interest is below
DECADE = 10
GAP = 0.062  # of the height of a panel, from one label to the next


def losses(path: Path, workloads: Mapping[str, Mapping[str, Curve]]) -> Path:
    """Draw a row of three panels for each workload; the best optimizer comes first in its mapping."""
    labels = sorted({label for curves in workloads.values() for label in curves})
    styles = {label: _style(i) for i, label in enumerate(labels)}
    size = (12.5, 3.7 * len(workloads) + 0.2)
    with figure(path, len(workloads), len(AXES), size=size, sharey="row") as axes:
        for row, (workload, curves) in zip(axes, workloads.items(), strict=True):
            for axis, (name, title) in zip(row, AXES.items(), strict=True):
                for label, curve in curves.items():
                    axis.plot(curve[name], curve["loss/train"], linewidth=1.5, **styles[label])
                _scale(axis, [curve[name] for curve in curves.values()])
                axis.set_xlabel(title)
                axis.grid(axis="y")
            row[0].set_ylabel("Training loss")
            row[0].set_title(workload.capitalize())
            _limit(row[0], curves)
            _label(row[-1], curves, styles)
    return path


def _style(i: int) -> dict[str, Any]:
    return {"color": CYCLE[i % len(CYCLE)], "linestyle": DASHES[i // len(CYCLE) % len(DASHES)]}


def _scale(axis: Any, values: Sequence[Sequence[float]]) -> None:
    """Take a logarithmic axis where some curves end ten times further than others; it begins after zero."""
    from matplotlib.ticker import FuncFormatter

    ends = [value[-1] for value in values if value[-1] > 0]
    if ends and max(ends) > DECADE * min(ends):
        axis.set_xscale("log", nonpositive="mask")
        axis.set_xlim(left=min(value[1] for value in values if value[-1] > 0))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _limit(axis: Any, curves: Mapping[str, Curve]) -> None:
    """Show the losses below what most optimizers begin with, on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    finals = sorted(curve["loss/train"][-1] for curve in curves.values())
    lowest = min(value for curve in curves.values() for value in curve["loss/train"])
    highest = max(value for curve in curves.values() for value in curve["loss/train"])
    axis.set_yscale("log")
    axis.set_ylim(0.93 * lowest, 1.03 * min(highest, MOST_ABOVE * finals[len(finals) // 2]))
    axis.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _label(axis: Any, curves: Mapping[str, Curve], styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Write names beside the ends of curves, moved apart where they would overlap."""
    low, high = axis.get_ylim()
    ends = {
        label: (curve["gradient_equivalents"][-1], curve["loss/train"][-1]) for label, curve in curves.items()
    }
    heights = {label: math.log(end[1] / low) / math.log(high / low) for label, end in ends.items()}
    for label, height in spread(heights, GAP).items():
        axis.annotate(
            label,
            (ends[label][0], min(ends[label][1], high)),
            (1.06, height),
            textcoords="axes fraction",
            color=styles[label]["color"],
            va="center",
            fontsize=8.5,
            arrowprops={
                "arrowstyle": "-",
                "color": MUTED,
                "linewidth": 0.5,
                "relpos": (0, 0.5),
                "shrinkA": 0,
                "shrinkB": 0,
            },
            annotation_clip=False,
        )


def spread(heights: Mapping[str, float], gap: float) -> dict[str, float]:
    """Move heights apart to a distance of `gap`, from 0 to 1 if they fit there, and keep their order."""
    order = sorted(heights, key=lambda label: heights[label])
    placed: dict[str, float] = {}
    floor = 0.0
    for label in order:
        placed[label] = max(heights[label], floor)
        floor = placed[label] + gap
    ceiling = max(1.0, gap * (len(order) - 1))
    for label in reversed(order):
        placed[label] = min(placed[label], ceiling)
        ceiling = placed[label] - gap
    return placed
