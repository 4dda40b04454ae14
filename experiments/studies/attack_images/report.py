"""What attacks on images come to: tables of defences, and accuracy over epsilon and over gradients."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from experiments.run.plots.style import BLUE, GREEN, INK, ORANGE, SKY, VERMILION, figure
from experiments.run.table_report import markdown
from experiments.studies.attack_images.run import ALL
from experiments.studies.study import by_cell, spread

if TYPE_CHECKING:
    from pathlib import Path

    from experiments.studies.attack_images.schema import ImagesConfig
    from experiments.studies.study import Result

DEFENCES = {
    "plain": ("none", INK),
    "gradient": ("gradient penalty", ORANGE),
    "cure": ("CURE", BLUE),
    "curvature": ("Hessian penalty", SKY),
    "adversarial": ("adversarial training", VERMILION),
}
ATTACKS = {
    "I-FGSM": (SKY, "-"),
    "PGD": (BLUE, "-"),
    "PGD, margin": (GREEN, "-"),
    "Newton": (ORANGE, "--"),
    "Newton, margin": (VERMILION, "--"),
}


def report(results: list[Result], config: ImagesConfig) -> str:
    """Return the tables as markdown."""
    found, epsilons = by_cell(results), config.attack.epsilons
    under = [["defence", "no attack", "FGSM", *ATTACKS]]
    costs = [
        ["defence", *map(str, epsilons), "norm of the gradient", "norm of H z", "CPU of training, over plain"]
    ]
    plain = {one["seed"]: one["seconds_per_step"] for one in found.get("plain", [])}
    for name, own in found.items():
        title, runs = DEFENCES[name][0], [at(one, config.defence.epsilon) for one in own]
        columns = [[one["clean"] for one in own], [run["I-FGSM"][0][1] for run in runs]]
        under.append(
            [title, *map(spread, columns), *(spread([run[a][-1][1] for run in runs]) for a in ATTACKS)]
        )
        all_attacks = (spread([at(one, epsilon)[ALL] for one in own]) for epsilon in epsilons)
        norms = (spread([one[key] for one in own], 2) for key in ("slope", "curvature"))
        ratios = [one["seconds_per_step"] / plain[one["seed"]] for one in own if one["seed"] in plain]
        costs.append([title, *all_attacks, *norms, spread(ratios) if ratios else "-"])
    images, seeds = config.data.classes * config.data.held_out, max(map(len, found.values()))
    product = spread([one["product_in_gradients"] for one in results], 2)
    text = [
        "# Images under attack",
        "",
        f"{config.data.classes} characters of Omniglot, {images} test images. Accuracy in percent, mean and standard "
        f"deviation over seeds ({seeds}), where a pixel may change by {config.defence.epsilon}: after one gradient "
        f"for FGSM, {config.attack.gradients[-1]} for each other attack.",
        "",
        *markdown(under),
        "",
        f"Under all attacks together, by what a pixel may change by. A Hessian product took {product} gradients of "
        "the CPU, and is counted as two.",
        "",
        *markdown(costs),
        "",
    ]
    return "\n".join(text)


def figures(results: list[Result], config: ImagesConfig, folder: Path) -> list[Path]:
    """Draw accuracy over epsilon for all defences, and over gradients for two of them."""
    found, path = by_cell(results), folder / "attack_images.png"
    shown = [name for name in ("gradient", "adversarial") if name in found]
    shown = shown if len(shown) == 2 else [next(iter(found)), list(found)[-1]]
    with figure(path, columns=3, size=(11, 4)) as axes:
        _by_epsilon(axes[0, 0], found, config)
        for axis, name in zip(axes[0, 1:], shown, strict=True):
            _by_gradients(axis, found[name], config)
            axis.set_title(f"Attacks: {DEFENCES[name][0]}")
        axes[0, 2].legend(fontsize=8)
    return [path]


def at(result: Result, epsilon: float) -> dict[str, Any]:
    """Return what attacks of a size came to."""
    return next(one for one in result["attacks"] if one["epsilon"] == epsilon)


def _by_epsilon(axis: Any, found: dict[str, list[Result]], config: ImagesConfig) -> None:
    x = [0.0, *config.attack.epsilons]
    for name, own in found.items():
        title, color = DEFENCES[name]
        values = [[one["clean"], *(at(one, epsilon)[ALL] for epsilon in x[1:])] for one in own]
        columns = list(zip(*values, strict=True))
        axis.fill_between(
            x, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.1, linewidth=0
        )
        axis.plot(
            x, list(map(statistics.mean, columns)), color=color, marker="o", markersize=3.5, label=title
        )
    axis.set(
        xlabel="What a pixel may change by", ylabel="Accuracy under all attacks (%)", ylim=(0, 100), xticks=x
    )
    axis.set_title("Defences")
    axis.grid(axis="y")
    axis.legend(fontsize=8)


def _by_gradients(axis: Any, own: list[Result], config: ImagesConfig) -> None:
    for name, (color, style) in ATTACKS.items():
        runs = [at(one, config.defence.epsilon)[name] for one in own]
        points = [list(map(statistics.mean, zip(*point, strict=True))) for point in zip(*runs, strict=False)]
        axis.plot(*zip(*points, strict=True), style, color=color, marker="o", markersize=3.5, label=name)
    axis.set_xscale("log")
    axis.set_xticks(config.attack.gradients, config.attack.gradients, minor=False)
    axis.set_xticks([], minor=True)
    axis.set(xlabel="Gradients; a Hessian product is two", ylim=(0, None))
    axis.set_ylabel(f"Accuracy at {config.defence.epsilon} (%)")
    axis.grid(axis="y")
