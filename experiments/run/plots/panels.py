"""Curves of many methods in panels: stored in a file, drawn together, or drawn with one method highlighted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.run.files import write_text
from experiments.run.plots.learning import plain_log
from experiments.run.plots.style import BLUE, CYCLE, MUTED, figure, legend_below

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GREY = "#C8C8C8"
DIGITS = 4
FEW = 300  # an axis with a smaller ratio of its ends has plain numbers as labels


class Curve(NamedTuple):
    """A method in a panel.

    Attributes:
        x: The x-coordinates. None for a single value, which is drawn as a horizontal line.
        middle: The mean or median over runs.
        low: The lower ends of the intervals.
        high: The upper ends of the intervals.
        said: The text about the runs that the page shows.
    """

    x: list[float] | None
    middle: list[float]
    low: list[float]
    high: list[float]
    said: str = ""


class Panel(NamedTuple):
    """A protocol, its axes and the curves of its methods."""

    title: str
    x: str
    y: str
    xscale: str
    yscale: str
    curves: dict[str, Curve]


def write_panels(path: Path, panels: Sequence[Panel]) -> None:
    """Write panels as JSON, with one line for each curve."""
    parts = []
    for panel in panels:
        curves = ",\n".join(
            f"  {json.dumps(name)}: {_written(curve)}" for name, curve in panel.curves.items()
        )
        head = json.dumps({name: value for name, value in panel._asdict().items() if name != "curves"})
        parts.append(f'{head[:-1]}, "curves": {{\n{curves}}}}}')
    write_text(path, "[" + ",\n".join(parts) + "]\n")


def read_panels(path: Path) -> list[Panel]:
    """Return the panels of a file."""
    return [
        Panel(**{**panel, "curves": {name: Curve(**curve) for name, curve in panel["curves"].items()}})
        for panel in json.loads(path.read_text())
    ]


def all_curves(path: Path, panels: Sequence[Panel]) -> Path:
    """Draw all curves in color, and return the file."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    with figure(path, 1, max(len(panels), 1), size=(11, 4.2)) as axes:
        for axis, panel in zip(axes[0], panels, strict=False):
            for name, curve in panel.curves.items():
                place = names.index(name)
                dashes = ("-", "--", ":", "-.")[place // len(CYCLE) % 4]
                _line(axis, panel, curve, color=CYCLE[place % len(CYCLE)], linestyle=dashes, label=name)
            _dress(axis, panel)
        legend_below(*axes[0], columns=len(names))
    return path


def highlighted(path: Path, panel: Panel, name: str, reference: str, called: Mapping[str, str]) -> Path:
    """Draw one method in color, a reference dashed and all other methods in gray, and return the file.

    Args:
        path: The file.
        panel: The curves.
        name: The method.
        reference: The method that is drawn dashed.
        called: The names of method and reference in the legend.
    """
    with figure(path, size=(4.6, 3.4)) as axes:
        axis = axes[0, 0]
        for curve in panel.curves.values():
            _line(axis, panel, curve, color=GREY, linewidth=1, zorder=1)
        if reference in panel.curves and reference != name:
            dashed = {"color": MUTED, "linestyle": "--", "linewidth": 1.4, "zorder": 2}
            _line(axis, panel, panel.curves[reference], label=called[reference], **dashed)
        _line(axis, panel, panel.curves[name], color=BLUE, linewidth=2.4, zorder=3, label=called[name])
        axis.plot([], [], color=GREY, linewidth=1, label="all others")
        _dress(axis, panel)
        legend_below(axis, columns=3)
    return path


def _written(curve: Curve) -> str:
    return json.dumps({name: _rounded(value) for name, value in curve._asdict().items()})


def _rounded(value: Any) -> Any:
    return [float(f"{one:.{DIGITS}g}") for one in value] if isinstance(value, list) else value


def _line(axis: Any, panel: Panel, curve: Curve, *, color: str, **options: Any) -> None:
    xs = curve.x
    if xs is None:
        wide = [x for other in panel.curves.values() for x in other.x or ()] or [0, 1]
        xs = [min(wide), max(wide)]
        curve = Curve(None, 2 * curve.middle, 2 * curve.low, 2 * curve.high)
    axis.plot(xs, curve.middle, color=color, **options)
    if options.get("zorder") == 3:
        axis.fill_between(xs, curve.low, curve.high, color=color, alpha=0.15, linewidth=0, zorder=3)


def _dress(axis: Any, panel: Panel) -> None:
    axis.set_title(panel.title)
    axis.set_xlabel(panel.x)
    axis.set_ylabel(panel.y)
    axis.set_xscale(panel.xscale)
    axis.set_yscale(panel.yscale)
    axis.grid(axis="y")
    for part, scale in ((axis.xaxis, panel.xscale), (axis.yaxis, panel.yscale)):
        low, high = part.get_view_interval()
        if scale == "log" and high < FEW * low:
            plain_log(part)
