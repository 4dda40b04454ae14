"""What cleaning comes to: a table, and the accuracy over the seconds of each way."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from experiments.run.files import markdown
from experiments.run.plots.style import CYCLE, INK, MUTED, VERMILION, figure, legend_below
from experiments.studies.clean.schema import CleanConfig
from experiments.studies.study import Result, by_cell, spread

TITLES = {
    "everything": "everything, as it is",
    "clean part": "the clean part",
    "validation alone": "the validation drawings alone",
    "agreeing": "what the validation drawings' network agrees with",
    "T1-T2": "T1-T2 (FirstOrder)",
    "FiniteDifference": "DARTS (FiniteDifference)",
    "reweight": "learning to reweight",
    "learned loss": "a learned loss (one exponent), Unroll",
}
COLUMNS = {
    "accuracy": ("accuracy (%)", 1),
    "with_validation": ("and on validation (%)", 1),
    "at_the_end": ("end of loop (%)", 1),
    "auc": ("AUC", 3),
    "precision": ("precision (%)", 1),
    "seconds": ("seconds", 1),
    "mib": ("MiB", 1),
}
REFERENCES = {"clean part": (INK, "-"), "validation alone": (MUTED, "--"), "everything": (MUTED, ":")}
DASHES = ("-", (0, (4, 1.5)))


def report(results: list[Result], config: CleanConfig) -> str:
    """Return the page."""
    found, data = by_cell(results), config.data
    number = data.alphabets * data.characters
    header = ["trained on, or weights by", *(title for title, _ in COLUMNS.values())]
    rows = [
        [TITLES.get(name, name), *(_text(own, column) for column in COLUMNS)] for name, own in found.items()
    ]
    return "\n".join(
        [
            "# Cleaning of labels",
            "",
            f"{data.alphabets} alphabets of Omniglot, {data.characters} characters of each: "
            f"{number * data.drawers[0]} drawings to train on, of which {data.wrong:.0%} have a wrong label, "
            f"{number * data.drawers[1]} for validation and {number * data.drawers[2]} for the test, of other "
            f"drawers. Means of the seeds ({len(config.seeds)}) with their standard deviation. Precision is that of "
            "as many of the smallest weights as there are wrong labels; seconds are of the processor; MiB the peak "
            "of an outer step.",
            "",
            markdown([header, *rows]),
            "",
            *_gaps(found),
        ]
    )


def _gaps(found: dict[str, list[Result]]) -> list[str]:
    """Say by how much each falls short of the clean part, seed by seed."""
    clean = {one["seed"]: one["accuracy"] for one in found.get("clean part", [])}
    gaps = {
        name: [one["accuracy"] - clean[one["seed"]] for one in own if one["seed"] in clean]
        for name, own in found.items()
        if name != "clean part"
    }
    texts = [f"{name} {spread(own)}" for name, own in gaps.items() if own]
    return [f"Points above the clean part, of each seed by itself: {'; '.join(texts)}.", ""] if texts else []


def _text(own: list[Result], name: str) -> str:
    values = [one[name] for one in own if one.get(name) is not None]
    return spread(values, COLUMNS[name][1]) if values else ""


def figures(results: list[Result], config: CleanConfig, folder: Path) -> list[Path]:
    """Draw accuracy over seconds, and what weights wrong and right labels get."""
    found = {name: own for name, own in by_cell(results).items() if "curve" in own[0]}
    if not found:
        return []
    with figure(folder / "clean.png", 1, 2, size=(10, 4.2), width_ratios=(3, 2)) as axes:
        _curves(axes[0, 0], found, by_cell(results))
        axes[0, 0].set_title(f"{config.data.wrong:.0%} of the labels are wrong")
        _weights(axes[0, 1], found)
        legend_below(axes[0, 0], columns=6)
    return [folder / "clean.png"]


def _curves(axis: Any, found: dict[str, list[Result]], everything: dict[str, list[Result]]) -> None:
    for i, (name, own) in enumerate(found.items()):
        points = zip(*(one["curve"]["accuracy"] for one in own), strict=False)
        times = zip(*(one["curve"]["seconds"] for one in own), strict=False)
        style = {"color": CYCLE[i % len(CYCLE)], "linestyle": DASHES[i // len(CYCLE) % len(DASHES)]}
        axis.plot(
            [statistics.mean(t) for t in times], [statistics.mean(p) for p in points], label=name, **style
        )
    levels = {}
    for name, (color, dash) in REFERENCES.items():
        if name in everything:
            levels[name] = statistics.mean(one["accuracy"] for one in everything[name])
            axis.axhline(levels[name], color=color, linestyle=dash, linewidth=1.1, label=name)
    axis.set_ylim(bottom=min(levels.values(), default=10) - 10)
    axis.set_xlabel("Seconds of the processor")
    axis.set_ylabel("Test accuracy of the network in the loop (%)")
    axis.grid(axis="y")


def _weights(axis: Any, found: dict[str, list[Result]]) -> None:
    name, own = next(iter(found.items()))
    bins = len(own[0]["shares"]["wrong"])
    edges = [i / bins for i in range(bins)]
    for which, color in (("right", CYCLE[0]), ("wrong", VERMILION)):
        means = [
            100 * statistics.mean(parts) for parts in zip(*(one["shares"][which] for one in own), strict=True)
        ]
        axis.bar(edges, means, width=1 / bins, align="edge", color=color, alpha=0.55, label=f"{which} labels")
    axis.set_xlabel("Learned weight")
    axis.set_ylabel("Drawings with such a label (%)")
    axis.set_title(f"What {name} gives to them")
    axis.legend()
