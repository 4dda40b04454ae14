"""What the runs come to: a table."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from experiments.run.files import markdown
from experiments.studies.curvature.measure import TOTAL
from experiments.studies.study import by_cell, spread

if TYPE_CHECKING:
    from experiments.studies.landscape.schema import LandscapeConfig
    from experiments.studies.study import Result

HEADER = [
    "run",
    "step size",
    "training loss",
    "training accuracy (%)",
    "test accuracy (%)",
    "above the first run",
    "largest eigenvalue",
    "trace",
    "its 95 % interval",
    "sharpness / edge",
]


def report(results: list[Result], config: LandscapeConfig) -> str:
    """Return the table as markdown."""
    data, rows, seeds = config.data, [], len({one["seed"] for one in results})
    for name, repeated in by_cell(results).items():
        run = config.runs[name]
        spectra = [one["spectra"][-1] for one in repeated]
        rows.append(
            [
                run.title,
                f"{run.lr:g}",
                f"{statistics.geometric_mean([one['loss'] for one in repeated]):.1e}",
                spread([one["accuracy/train"] for one in repeated]),
                spread([one["accuracy/test"] for one in repeated]),
                gain(repeated, results),
                spread([one["sharpness"] for one in repeated], 2),
                spread([one[f"trace/{TOTAL}"] for one in spectra]),
                f"± {statistics.mean(one[f'trace/{TOTAL}_ci95'] for one in spectra):.1f}",
                spread([at_the_edge(one) for one in repeated], 2),
            ]
        )
    return "\n".join(
        [
            "# The landscape that optimizers train in",
            "",
            f"{data.count} characters of Omniglot, {data.shots} drawings of each to train on; a tanh network of "
            f"{', '.join(map(str, config.hidden))} hidden units, squared errors, {config.steps} steps on all "
            f"examples, with characters of its own for each of {seeds} seed(s). Mean and "
            "standard deviation over seeds at the last step; of the loss the geometric mean, of the difference of "
            "accuracies that of the same seed. The interval is that of one estimate of the trace. The last column is "
            "the median over the second half of the preconditioned sharpness over the edge of stability.",
            "",
            markdown([HEADER, *rows]),
            "",
        ]
    )


def gain(repeated: list[Result], results: list[Result]) -> str:
    """Return by how much the test accuracy is above that of the first run with the same seed."""
    first = {one["seed"]: one["accuracy/test"] for one in results if one["cell"] == results[0]["cell"]}
    if repeated[0]["cell"] == results[0]["cell"]:
        return ""
    return spread([one["accuracy/test"] - first[one["seed"]] for one in repeated if one["seed"] in first])


def at_the_edge(result: Result) -> float:
    """Return the median of the preconditioned sharpness over its edge, in the second half of a run."""
    rows = [row for row in result["path"] if row["preconditioned"] is not None]
    return statistics.median(row["preconditioned"] / row["edge"] for row in rows[len(rows) // 2 :])
