"""The style of every plot: quiet axes, and colors that color-blind readers can distinguish."""

from __future__ import annotations

import textwrap
from contextlib import contextmanager
from statistics import mean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
"""Okabe and Ito's palette, as in metagrad/plots.mplstyle."""
LONGEST_LABEL = 90  # number of characters that fit into the width of a figure
INK, MUTED, FAINT = "#222222", "#767676", "#E4E4E4"


@contextmanager
def figure(
    path: Path, rows: int = 1, columns: int = 1, *, size: tuple[float, float], **options: Any
) -> Iterator[Any]:
    """Open a figure, yield its axes [rows, columns], and write the file at the end. No display is needed."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context(["metagrad.plots", {"axes.grid": False}]):
        canvas = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(canvas)
        yield canvas.subplots(rows, columns, squeeze=False, **options)
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, dpi=160)


def thousands(axis: Any) -> None:
    """Label an axis of counts with thousands separators, such as 20,000."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def label_lines(axis: Any, *, gap: float = 0.07) -> None:
    """Write the label of each line next to its end. Labels are at least a gap apart, in heights of the axis."""
    lines = [line for line in axis.get_lines() if not line.get_label().startswith("_")]
    axis.autoscale_view()  # limits are otherwise set when the figure is drawn
    place = axis.transScale + axis.transLimits
    ends = sorted((place.transform(line.get_xydata()[-1])[1], i) for i, line in enumerate(lines))
    free = [height - gap * rank for rank, (height, _) in enumerate(ends)]
    for rank, (_, i) in enumerate(ends):  # the nearest ascending heights, by isotonic regression
        means = (min(mean(free[j:k]) for k in range(rank + 1, len(free) + 1)) for j in range(rank + 1))
        options = {"xycoords": "axes fraction", "va": "center", "annotation_clip": False}
        axis.annotate(
            lines[i].get_label(),
            (1.02, max(*means, 0.02) + gap * rank),
            color=lines[i].get_color(),
            **options,
        )


def legend_below(*axes: Any, columns: int) -> None:
    """Put one legend of some axes below the figure, in as many columns as fit. The figure grows by its rows."""
    whole = axes[0].figure
    found = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if not found:
        return
    handles, labels = list(found.values()), [textwrap.fill(label, LONGEST_LABEL) for label in found]
    options = {"loc": "outside lower center", "handlelength": 1.6, "columnspacing": 1.6}
    for number in range(columns, 0, -1):
        legend = whole.legend(handles, labels, ncols=number, **options)
        box = legend.get_window_extent(whole.canvas.get_renderer())
        if box.width <= whole.bbox.width or number == 1:
            break
        legend.remove()
    whole.set_figheight(whole.get_figheight() + box.height / whole.dpi)
