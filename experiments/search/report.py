"""What searches come to: a table, and figures of accuracies and eigenvalues."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from experiments.plots.style import CYCLE, INK, MUTED, figure, legend_below, thousands
from experiments.study import Result, by_cell, spread
from experiments.table_report import markdown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from experiments.search.schema import ArchitectureConfig

TITLES = {
    "random": "random search: best on validation",
    "by_hand": "by hand: 3 x 3 convolutions",
    "first_order": "FirstOrder (DARTS, first order)",
    "finite_difference": "FiniteDifference (DARTS, second order)",
    "unroll_1": "Unroll, 1 step",
    "unroll": "Unroll",
    "cg": "CG",
    "neumann": "Neumann",
}
HEADER = [
    "cell found by",
    "test accuracy (%)",
    "above the median drawn",
    "3 x 3 convolutions",
    "seconds of the search",
    "gradients a hypergradient",
    "MiB of its peak",
]


def report(results: list[Result], config: ArchitectureConfig) -> str:
    """Return the page."""
    groups = by_cell(results)
    medians = {one["seed"]: statistics.median(one["accuracies"]) for one in groups.get("random", [])}
    rows = [HEADER]
    if medians:
        rows.append(["random search: median", spread(list(medians.values())), *["-"] * (len(HEADER) - 2)])
    rows += [_row(name, own, medians) for name, own in groups.items()]
    units = [one["gradient peak(MiB)"] for one in results if "gradient peak(MiB)" in one]
    unit = f" Its peak is {statistics.mean(units):.2f} MiB." if units else ""
    return "\n".join(
        [
            "# Architecture search",
            "",
            f"{config.data.characters} characters of Omniglot at {config.data.size} x {config.data.size} pixels: "
            f"{config.data.train} drawings of each to train on, {config.data.validation} to choose by, the rest for "
            f"the test. Seeds {', '.join(map(str, config.seeds))}; means and standard deviations over seeds. "
            f"Random search trains {config.drawn} architectures. The unit of a hypergradient is a gradient of the "
            f"training loss in the weights.{unit}",
            "",
            *markdown(rows),
            "",
        ]
    )


def _row(name: str, own: list[Result], medians: dict[int, float]) -> list[str]:
    above = [one["accuracy"] > medians[one["seed"]] for one in own if one["seed"] in medians]
    seconds = spread([one["seconds"] for one in own])
    return [
        TITLES[name],
        spread([one["accuracy"] for one in own]),
        f"{sum(above)} of {len(above)}",
        _mean([convolutions(one["architecture"]) for one in own if "architecture" in one]),
        "-" if name == "by_hand" else seconds,
        _mean([one["gradients"] for one in own if "gradients" in one]),
        _mean([one["peak(MiB)"] for one in own if "peak(MiB)" in one], 2),
    ]


def convolutions(architecture: Sequence[Any]) -> int:
    """Count the edges with a 3 x 3 convolution."""
    return sum(operation == "conv_3x3" for _, _, operation in architecture)


def _mean(values: Sequence[float], digits: int = 1) -> str:
    return f"{statistics.mean(values):.{digits}f}" if values else "-"


def curves(results: list[Result], config: ArchitectureConfig, folder: Path) -> list[Path]:
    """Draw the accuracies of all architectures, and the eigenvalues along the searches."""
    groups = by_cell(results)
    names = [name for name in groups if name not in ("random", "by_hand")]
    colors: dict[str, str] = dict(zip(names, CYCLE, strict=False))
    with figure(folder / "search.png", columns=2, size=(10.4, 4.3)) as axes:
        _accuracies(axes[0, 0], groups, config.seeds, colors)
        for name in names:
            _eigenvalues(axes[0, 1], groups[name], colors[name])
        axes[0, 1].set_yscale("log")
        thousands(axes[0, 1].xaxis)
        axes[0, 1].set_xlabel("Step on the architecture")
        axes[0, 1].set_ylabel("Largest eigenvalue")
        axes[0, 1].set_title("Hessian of the validation loss in the architecture")
        axes[0, 1].grid(axis="y")
        legend_below(axes[0, 0], columns=4)
    return [folder / "search.png"]


def _accuracies(axis: Any, groups: dict[str, list[Result]], seeds: list[int], colors: dict[str, str]) -> None:
    place = {seed: i for i, seed in enumerate(seeds)}
    for one in groups.get("random", []):
        x, label = place[one["seed"]], one["seed"] == seeds[0]
        axis.plot(
            [x] * len(one["accuracies"]), one["accuracies"], "o", color=MUTED, alpha=0.45, markersize=4,
            label="Drawn at random" if label else None,
        )  # fmt: skip
        axis.hlines(
            statistics.median(one["accuracies"]), x - 0.3, x + 0.3, color=INK, linewidth=1.4,
            label="Their median" if label else None,
        )  # fmt: skip
    for i, (name, color) in enumerate(colors.items()):
        shift = 0.1 * (i - (len(colors) - 1) / 2)
        points = [(place[one["seed"]] + shift, one["accuracy"]) for one in groups[name]]
        axis.plot(
            *zip(*points, strict=True), "D", color=color, markersize=5.5, label=TITLES[name].split(" (")[0]
        )
    axis.set_xticks(range(len(seeds)), [str(seed) for seed in seeds])
    axis.set_xlabel("Seed")
    axis.set_ylabel("Test accuracy (%)")
    axis.set_title("Architectures, trained from scratch")
    axis.grid(axis="y")


def _eigenvalues(axis: Any, own: list[Result], color: str) -> None:
    """Draw the median over seeds, and their range."""
    values = list(zip(*([max(v, 1e-4) for _, v in one["eigenvalues"]] for one in own), strict=True))
    steps = [step for step, _ in own[0]["eigenvalues"]]
    axis.fill_between(
        steps, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.1, linewidth=0
    )
    axis.plot(steps, [statistics.median(v) for v in values], color=color, marker="o", markersize=3.5)
