"""What an attack comes to: tables, and the accuracy over the edges that are flipped."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from experiments.run.plots.style import BLUE, MUTED, VERMILION, figure, legend_below
from experiments.run.table_report import markdown
from experiments.studies.study import spread

if TYPE_CHECKING:
    from pathlib import Path

    from experiments.studies.attack.schema import AttackConfig
    from experiments.studies.study import Result

TITLES = {
    "clean": "as it is",
    "no edges": "no edges: words alone",
    "clean, similar": "as it is, edges of dissimilar papers left out",
    "clean, learned": "as it is, edge weights learned on validation nodes",
    "metattack, similar": "Metattack, edges of dissimilar papers left out",
    "metattack, learned": "Metattack, edge weights learned on validation nodes",
}


def rows_of(results: list[Result]) -> list[dict[str, Any]]:
    """Return a row for each graph: the mean accuracy of each seed."""
    rows = []
    for name, first in results[0]["graphs"].items():
        means = [statistics.mean(one["graphs"][name]["accuracies"]) for one in results]
        rows.append(
            {
                "graph": name,
                "flips": first["flips"],
                "flips(%)": 100 * first["flips"] / results[0]["edges"],
                "accuracy(%)": means,
            }
        )
    return rows


def report(results: list[Result], config: AttackConfig) -> str:
    """Return the tables as markdown."""
    rows, first = rows_of(results), results[0]
    by_name = {row["graph"]: statistics.mean(row["accuracy(%)"]) for row in rows}
    flips = max(row["flips"] for row in rows)
    drop, by_chance = (by_name["clean"] - by_name[f"{kind} {flips}"] for kind in ("metattack", "random"))
    table = [["graph", "edges flipped", "accuracy (%)"]]
    for row in sorted(rows, key=lambda row: ("," in row["graph"], row["flips"])):
        flipped = f"{row['flips']} ({row['flips(%)']:.1f} %)"
        table.append([_title(row["graph"]), flipped, spread(row["accuracy(%)"])])
    sparse, dense = (max(one["memory"][kind] for one in results) / 2**20 for kind in ("sparse", "dense"))
    seconds = statistics.mean(one["seconds_per_flip"] for one in results)
    return "\n".join(
        [
            "# A citation graph under attack",
            "",
            f"Cora's largest component: {first['nodes']} papers, {first['edges']} citations; a tenth of the papers "
            "are labelled. Accuracy of a graph network on the test papers: the mean over seeds "
            f"({len(results)}) and the networks of each ({config.victims}), and the standard deviation over seeds.",
            "",
            *markdown(table),
            "",
            f"With {flips} edges the accuracy drops by {drop:.1f} points under Metattack, by {by_chance:.1f} with "
            f"edges drawn at random. A flip took {seconds:.2f} s. The peak of a meta-gradient through "
            f"{config.surrogate.steps} steps was {sparse:.1f} MiB, {dense:.0f} MiB with a dense matrix that keeps "
            f"all steps or recomputes them, whichever takes less: a factor of {dense / sparse:.0f}.",
            "",
        ]
    )


def curves(results: list[Result], config: AttackConfig, folder: Path) -> list[Path]:
    """Draw the accuracy over the edges that are flipped, with the range over seeds."""
    path = folder / "attack.png"
    with figure(path, size=(6.4, 4)) as axes:
        axis = axes[0, 0]
        for kind, color, label in (
            ("random", BLUE, "Edges added at random"),
            ("metattack", VERMILION, "Metattack"),
        ):
            x, means, lows, highs = zip(*_points(results, kind), strict=True)
            axis.fill_between(x, lows, highs, color=color, alpha=0.15, linewidth=0)
            axis.plot(x, means, color=color, marker="o", markersize=4, label=label)
        alone = statistics.mean(statistics.mean(one["graphs"]["no edges"]["accuracies"]) for one in results)
        axis.axhline(alone, color=MUTED, linestyle="--", linewidth=1.2, label="Words alone, no graph")
        axis.set_xlabel("Edges flipped (%)")
        axis.set_ylabel("Test accuracy of a graph network (%)")
        axis.set_title("Cora, poisoned by the gradient of training")
        axis.grid(axis="y")
        legend_below(axis, columns=3)
    return [path]


def _points(results: list[Result], kind: str) -> list[tuple[float, float, float, float]]:
    """Return edges flipped, mean, lowest and highest of the means of seeds, from the clean graph on."""
    names = ["clean", *(name for name in results[0]["graphs"] if name.startswith(f"{kind} "))]
    points = []
    for name in names:
        means = [statistics.mean(one["graphs"][name]["accuracies"]) for one in results]
        flipped = 100 * results[0]["graphs"][name]["flips"] / results[0]["edges"]
        points.append((flipped, statistics.mean(means), min(means), max(means)))
    return sorted(points)


def _title(name: str) -> str:
    if name in TITLES:
        return TITLES[name]
    return "Metattack" if name.startswith("metattack") else "edges added at random"
