"""What a distillation comes to: tables, the images, and what a meta-gradient costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from experiments.run.files import markdown
from experiments.run.plots.style import BLUE, CYCLE, MUTED, VERMILION, figure, legend_below
from experiments.studies.distill.sets import IMAGES
from experiments.studies.study import Result, by_cell, spread

if TYPE_CHECKING:
    from experiments.studies.distill.schema import DistillConfig

SETS = {"random": "drawn at random", "k_center": "k-center", "herding": "herding", "all": "all drawings"}
TITLES = {"mlp": "64 hidden units", "wide": "256 hidden units", "convnet": "ConvNet"}
MIB = 2**20
LIMIT = 1.5  # ink, where colours end
GAP = 2  # pixels between images
Costs = dict[str, dict[int, list[float]]]
"""By memory mode and steps, a value for each seed."""
DASHES, MARKS = ("-", "--", ":"), ("black", "white", "gray")  # of networks


def title(name: str) -> str:
    """Name a set of images."""
    return SETS.get(name, f"learned through {name.removeprefix('learned_')} steps")


def sets_of(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results of each set of images, in the order of its accuracy, with all drawings last."""
    found = by_cell(one for one in results if "networks" in one)

    def order(name: str) -> tuple[bool, float]:
        first = next(iter(found[name][0]["networks"]))
        return name == "all", statistics.mean(means(found[name], first))

    return {name: found[name] for name in sorted(found, key=order)}


def means(results: Sequence[Result], network: str) -> list[float]:
    """Return the mean accuracy of a network for each seed."""
    return [statistics.mean(one["networks"][network]["accuracies"]) for one in results]


def costs_of(results: Sequence[Result], value: str) -> dict[str, Costs]:
    """Return what meta-gradients cost, by network, memory mode and steps, a value for each seed."""
    found: dict[str, Costs] = {}
    for one in (one for one in results if "rows" in one):
        network = found.setdefault(one["cell"].removeprefix("cost_"), {})
        for row in one["rows"]:
            if value in row:
                network.setdefault(row["memory"], {}).setdefault(row["steps"], []).append(row[value])
    return found


def report(results: list[Result], config: DistillConfig) -> str:
    """Return the tables as Markdown."""
    lines = [
        "# A data set in a few images",
        "",
        f"Accuracy (%) on the test drawings of {config.classes} alphabets: the mean over {config.judge.trials} fresh "
        f"networks for each of the seeds {config.seeds}, and the standard deviation over seeds. Images are learned "
        "for the first network.",
        "",
        markdown(_accuracies(sets_of(results), config.judge.networks)),
    ]
    peaks, seconds = costs_of(results, "peak"), costs_of(results, "seconds")
    for network, modes in peaks.items():
        lines += [
            "",
            f"A meta-gradient through the training of the network ({TITLES[network]}) in each memory mode: peak "
            "memory (with the first seed), and CPU seconds (the median over seeds).",
            "",
            markdown(_costs(modes, seconds[network])),
        ]
    return "\n".join([*lines, ""])


def _accuracies(sets: dict[str, list[Result]], networks: Sequence[str]) -> list[list[str]]:
    table = [["trained on", "images", "CPU seconds to learn them", *(TITLES[name] for name in networks)]]
    for name, own in sets.items():
        seconds = f"{statistics.median(one['seconds'] for one in own):.0f}" if "seconds" in own[0] else ""
        values = [spread(means(own, network)) for network in networks]
        table.append([title(name), f"{own[0]['size']:,}", seconds, *values])
    return table


def _costs(peaks: Costs, seconds: Costs) -> list[list[str]]:
    table = [["steps", *peaks]]
    for steps in next(iter(peaks.values())):
        cells = [
            f"{peaks[mode][steps][0] / MIB:.1f} MiB, {statistics.median(seconds[mode][steps]):.2f} s"
            for mode in peaks
        ]
        table.append([str(steps), *cells])
    return table


def figure_of(results: list[Result], config: DistillConfig, folder: Path) -> list[Path]:
    """Draw real and learned images, and below them accuracies, memory and time."""
    sets, path = sets_of(results), folder / "distill.png"
    with figure(path, 2, 3, size=(12.6, 7.8), height_ratios=(1.45, 1)) as axes:
        longest = f"learned_{max(config.lengths, default=0)}"
        for axis, name in zip(axes[0], ("random", "herding", longest), strict=True):
            file = folder / name / str(config.seeds[0]) / IMAGES
            _draw_images(axis, file if name in sets else None, config)
            axis.set_title(f"{config.per_class} a class: {title(name)}")
        _draw_accuracies(axes[1, 0], sets, config.judge.networks)
        peaks = costs_of(results, "peak")
        _draw_costs(axes[1, 1], peaks, 1 / MIB, "Peak of a meta-gradient (MiB)")
        _draw_costs(axes[1, 2], costs_of(results, "seconds"), 1, "Time of a meta-gradient (CPU s)")
        if peaks:
            legend_below(axes[1, 1], columns=8)
    return [path]


def _draw_images(axis: Any, file: Path | None, config: DistillConfig) -> None:
    """Draw a row of images for each class, ink blue, and what is below the ground red."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)
    if file is None:
        return
    x, _ = torch.load(file, weights_only=True)
    tiles = torch.nn.functional.pad(x[:, 0], [0, GAP, 0, GAP]).unflatten(
        0, (config.classes, config.per_class)
    )
    picture = tiles.transpose(1, 2).flatten(2).flatten(0, 1)
    axis.imshow(picture.numpy(), cmap="RdBu", vmin=-LIMIT, vmax=LIMIT, interpolation="nearest")


def _draw_accuracies(axis: Any, sets: dict[str, list[Result]], networks: Sequence[str]) -> None:
    """Draw bars of the network that images are learned for, a point for each seed, and those of the others."""
    for height, (name, own) in enumerate(sets.items()):
        color = MUTED if name == "all" else VERMILION if name.startswith("learned") else BLUE
        axis.barh(height, statistics.mean(means(own, networks[0])), color=color, height=0.65, alpha=0.85)
        for network, face in zip(networks, MARKS, strict=False):
            values, label = means(own, network), None if height else TITLES[network]
            axis.plot(
                values,
                [height] * len(values),
                "o",
                color="black",
                markerfacecolor=face,
                markersize=3.5,
                label=label,
            )
    axis.set_yticks(range(len(sets)), [title(name) for name in sets])
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel("Test accuracy (%)")
    axis.set_title("Networks trained on each set")
    axis.grid(axis="x")
    if sets:
        axis.legend(fontsize=8, loc="lower right")


def _draw_costs(axis: Any, costs: dict[str, Costs], scale: float, label: str) -> None:
    """Draw a line for each network, whose dashes are its own, and memory mode, whose colour is its own."""
    from matplotlib.ticker import FuncFormatter

    for network, dashes in zip(costs, DASHES, strict=False):
        axis.plot([], [], dashes, color=MUTED, label=TITLES[network])
        for (mode, by_steps), color in zip(costs[network].items(), CYCLE, strict=False):
            values = [scale * statistics.median(own) for own in by_steps.values()]
            own_label = mode if network == next(iter(costs)) else None
            axis.plot(
                list(by_steps), values, dashes, color=color, marker="o", markersize=3.5, label=own_label
            )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.minorticks_off()
    lengths = sorted({steps for modes in costs.values() for own in modes.values() for steps in own})
    axis.set_xticks(lengths, [str(steps) for steps in lengths])
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xlabel("Inner steps")
    axis.set_title(label)
    axis.grid()
