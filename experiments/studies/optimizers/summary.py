"""What optimizers come to over seeds: medians and quartiles, at equal seconds and at equal gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import NullFormatter

from experiments.run.files import markdown
from experiments.run.plots.panels import Curve, Panel, write_panels
from experiments.run.plots.style import CYCLE, figure, legend_below

if TYPE_CHECKING:
    from pathlib import Path

    from experiments.studies.study import Result

Runs = dict[str, list[Any]]
"""By optimizer, its runs."""
REFERENCE = "adam"
AXES = {"seconds": "Seconds of CPU", "gradients": "Gradient-equivalents"}
MEASURES = {
    "pinn": ("error/test", "relative L2 error"),
    "logistic": ("gap", "loss above the lowest of all runs"),
}
LOSS = ("loss/train", "training loss")
LEAST = 1e-15  # what a gap is raised to, so that it has a logarithm
POINTS, KEPT = 200, 40  # of a curve, in a figure and in a file


def report(results: list[Result], config: Any) -> str:
    """Return a table for each workload."""
    parts = ["# Optimizers over seeds", ""]
    for workload, runs in by_workload(results).items():
        seconds, gradients = limits(runs)
        first = next(iter(runs.values()))[0]
        parts += [
            f"**{workload}**: {MEASURES.get(workload, LOSS)[1]}, median and quartiles over "
            f"{max(map(len, runs.values()))} seeds, after {seconds:.3g} s and {gradients:,.0f} gradient-equivalents. "
            f"Each optimizer had {first['trials']} trials, on seed {config.tuning_seed}.",
            "",
            markdown([header(seconds, gradients), *rows(workload, runs)]),
            "",
        ]
    return "\n".join(parts)


def header(seconds: float, gradients: float) -> list[str]:
    """Return the first row of a table."""
    return [
        "optimizer",
        "chosen",
        f"after {seconds:.3g} s",
        f"{REFERENCE}'s over it",
        f"after {gradients:,.0f} gradients",
        "steps",
        "gradients",
    ]


def rows(workload: str, runs: Runs) -> list[list[str]]:
    """Return a row for each optimizer, the best after equal seconds first."""
    seconds, gradients = limits(runs)
    ends = {name: values_at(workload, own, runs, "seconds", seconds) for name, own in runs.items()}
    reference = np.median(ends[REFERENCE]) if REFERENCE in ends else None
    return [
        [
            name,
            runs[name][0]["trial"],
            quartiles(ends[name]),
            "" if reference is None else f"{reference / np.median(ends[name]):.3g}",
            quartiles(values_at(workload, runs[name], runs, "gradients", gradients)),
            f"{np.median([run['curve']['step'][-1] for run in runs[name]]):,.0f}",
            f"{np.median([run['curve']['gradients'][-1] for run in runs[name]]):,.0f}",
        ]
        for name in sorted(ends, key=lambda name: np.median(ends[name]))
    ]


def by_workload(results: list[Result]) -> dict[str, Runs]:
    """Return the runs of each workload by optimizer; trials are none."""
    found: dict[str, Runs] = {}
    for one in results:
        if "curve" in one:
            found.setdefault(one["workload"], {}).setdefault(one["optimizer"], []).append(one)
    return found


def limits(runs: Runs) -> tuple[float, float]:
    """Return the seconds and gradients that the median run of every optimizer has come to."""
    seconds, gradients = (
        min(float(np.median([run["curve"][axis][-1] for run in own])) for own in runs.values())
        for axis in AXES
    )
    return seconds, gradients


def values_at(workload: str, own: list[Any], runs: Runs, axis: str, limit: float) -> list[float]:
    """Return what was measured last in each run before a limit; of a run that diverged, infinity."""
    found = []
    for run in own:
        curve = measured(workload, run, runs)
        index = int(np.searchsorted(run["curve"][axis], limit * (1 + 1e-9), side="right")) - 1
        over = not run["is_finite"] and index == len(curve) - 1
        found.append(np.inf if over else float(curve[max(index, 0)]))
    return found


def measured(workload: str, run: Any, runs: Runs) -> np.ndarray:
    """Return the curve of a run that a workload is judged by."""
    name = MEASURES.get(workload, LOSS)[0]
    if name != "gap":
        return np.array(run["curve"][name])
    lowest = min(min(one["curve"][LOSS[0]]) for own in runs.values() for one in own)
    return np.maximum(np.array(run["curve"][LOSS[0]]) - lowest, LEAST)


def quartiles(values: list[float]) -> str:
    """Return the median and, of several values, the quartiles as text."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], method="nearest")
    return f"{middle:.2g}" if len(values) == 1 else f"{middle:.2g} ({low:.2g} to {high:.2g})"


def figures(results: list[Result], config: Any, folder: Path) -> list[Path]:
    """Draw medians and quartiles over seconds and over gradients, a row for each workload; write the former."""
    workloads = by_workload(results)
    if not workloads:
        return []
    names = list(dict.fromkeys(name for runs in workloads.values() for name in runs))
    path = folder / "optimizers_study.png"
    write_panels(folder / "curves.json", panels(results))
    with figure(path, len(workloads), len(AXES), size=(10, 3.6 * len(workloads)), sharey="row") as axes:
        for row, (workload, runs) in zip(axes, workloads.items(), strict=True):
            for axis, (name, title) in zip(row, AXES.items(), strict=True):
                _panel(axis, workload, runs, name, names)
                axis.set_xlabel(title)
            row[0].set_ylabel(MEASURES.get(workload, LOSS)[1].capitalize().replace("l2", "L2"))
            row[0].set_title(workload)
        legend_below(*axes[:, 0], columns=len(names))
    return [path]


def panels(results: list[Result]) -> list[Panel]:
    """Return the curves over seconds, a panel for each workload."""
    found = []
    for workload, runs in by_workload(results).items():
        curves = {name: along(workload, own, runs, "seconds", KEPT) for name, own in runs.items()}
        label = MEASURES.get(workload, LOSS)[1].capitalize().replace("l2", "L2")
        kept = {name: curve for name, curve in curves.items() if curve is not None}
        found.append(Panel(workload, AXES["seconds"], label, "log", "log", kept))
    return found


def along(workload: str, own: list[Any], runs: Runs, name: str, points: int) -> Curve | None:
    """Return median and quartiles of an optimizer along an axis; None where too little was measured."""
    first = max(run["curve"][name][1] if len(run["curve"][name]) > 1 else 0.0 for run in own)
    last = min(run["curve"][name][-1] for run in own)
    if not 0 < first < last:
        return None
    grid = np.geomspace(first, last, points)
    values = [values_at(workload, own, runs, name, limit) for limit in grid]
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], axis=1, method="nearest").tolist()
    steps = np.median([run["curve"]["step"][-1] for run in own])
    return Curve(grid.tolist(), middle, low, high, f"{own[0]['trial']}, {steps:,.0f} steps")


def _panel(axis: Any, workload: str, runs: Runs, name: str, names: list[str]) -> None:
    for optimizer, own in runs.items():
        curve = along(workload, own, runs, name, POINTS)
        if curve is None:
            continue
        place = names.index(optimizer)
        color, dashes = CYCLE[place % len(CYCLE)], ("-", "--", ":")[place // len(CYCLE) % 3]
        axis.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.15, linewidth=0)
        axis.plot(curve.x, curve.middle, color=color, linestyle=dashes, label=optimizer)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(axis="y")
