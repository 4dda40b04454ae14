"""What searches come to: a table, and figures of accuracies and eigenvalues."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

from experiments.run.files import markdown
from experiments.run.plots.style import CYCLE, INK, MUTED, figure, legend_below, thousands
from experiments.studies.study import Result, by_cell, spread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from experiments.studies.search.schema import ArchitectureConfig

TITLES = {
    "random": "random search: best on validation",
    "by_hand": "by hand: 3 x 3 convolutions",
    "first_order": "FirstOrder (DARTS, first order)",
    "finite_difference": "FiniteDifference (DARTS, second order)",
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
            markdown(rows),
            "",
            *_correlation(results, medians),
        ]
    )


def _correlation(results: list[Result], medians: dict[int, float]) -> list[str]:
    """Say whether searches that end where the curvature is high have found worse architectures."""
    searches = [one for one in results if "eigenvalues" in one and one["seed"] in medians]
    last = _ranks([one["eigenvalues"][-1][1] for one in searches])
    gain = _ranks([one["accuracy"] - medians[one["seed"]] for one in searches])
    if min(len(set(last)), len(set(gain))) < 3:
        return []
    return [
        f"Over {len(searches)} searches, the rank correlation of the last eigenvalue with the accuracy above the "
        f"median drawn is {statistics.correlation(last, gain):.2f}.",
        "",
    ]


def _ranks(values: list[float]) -> list[int]:
    return [sorted(values).index(value) for value in values]


def _row(name: str, own: list[Result], medians: dict[int, float]) -> list[str]:
    above = [one["accuracy"] > medians[one["seed"]] for one in own if one["seed"] in medians]
    return [
        TITLES[name],
        spread([one["accuracy"] for one in own]),
        f"{sum(above)} of {len(above)}",
        _mean([str(one["architecture"]).count("conv_3x3") for one in own if "architecture" in one]),
        spread([one["seconds"] for one in own]) if name != "by_hand" else "-",
        _mean([one["gradients"] for one in own if "gradients" in one]),
        _mean([one["peak(MiB)"] for one in own if "peak(MiB)" in one], 2),
    ]


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
    drawn = {seeds.index(one["seed"]): one["accuracies"] for one in groups.get("random", [])}
    points = [(x, value) for x, values in drawn.items() for value in values]
    style = {"color": MUTED, "alpha": 0.45, "markersize": 4}
    axis.plot(*_columns(points), "o", label="Drawn at random", **style)
    x = torch.tensor(list(drawn), dtype=torch.float64)
    medians = [statistics.median(values) for values in drawn.values()]
    axis.hlines(medians, x - 0.35, x + 0.35, color=INK, linewidth=1.4, label="Their median")
    for i, (name, color) in enumerate(colors.items()):
        shift = 0.12 * (i - (len(colors) - 1) / 2)
        points = [(seeds.index(one["seed"]) + shift, one["accuracy"]) for one in groups[name]]
        axis.plot(*_columns(points), "D", color=color, markersize=5.5, label=TITLES[name].split(" (")[0])
    axis.set_xticks(range(len(seeds)), [str(seed) for seed in seeds])
    axis.set_xlabel("Seed")
    axis.set_ylabel("Test accuracy (%)")
    axis.set_title("Architectures, trained from scratch")
    axis.grid(axis="y")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _eigenvalues(axis: Any, own: list[Result], color: str) -> None:
    """Draw each seed, and the median over seeds."""
    steps = [step for step, _ in own[0]["eigenvalues"]]
    rows = [[max(value, 1e-4) for _, value in one["eigenvalues"]] for one in own]
    for row in rows:
        axis.plot(steps, row, color=color, alpha=0.25, linewidth=0.8)
    medians = [statistics.median(values) for values in zip(*rows, strict=True)]
    axis.plot(steps, medians, color=color, marker="o", markersize=3.5)
