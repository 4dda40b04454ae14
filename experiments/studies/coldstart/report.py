"""What a cold start comes to: errors by the ratings seen, and what a meta-step takes by the rows of its tables."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from experiments.run.files import markdown
from experiments.run.plots.style import BLUE, GREEN, MUTED, ORANGE, PURPLE, VERMILION, figure, legend_below
from experiments.studies.study import by_cell, spread

if TYPE_CHECKING:
    from pathlib import Path

    from experiments.studies.coldstart.schema import ColdStartConfig
    from experiments.studies.study import Result

FLOOR = "biases"
METHODS = {
    "biases": ("user + item bias", MUTED),
    "factors": ("matrix factorization", ORANGE),
    "fine-tuned": ("network, fine-tuned", PURPLE),
    "maml": ("MAML, all adapts", VERMILION),
    "anil": ("ANIL, the head adapts", GREEN),
    "cavia": ("CAVIA, a context adapts", BLUE),
}


def report(results: list[Result], config: ColdStartConfig) -> str:
    """Return the page as markdown."""
    found = by_cell(results)
    lines = [
        "# Students of whom few ratings are known",
        "",
        f"Root mean square error on {config.queries} ratings of each of {config.drawn} students drawn from the fifth "
        "that no method saw in training, by how many other ratings of the student are seen; below it the difference "
        f"from user + item bias, in thousandths. Mean and standard deviation over seeds ({len(config.seeds)}).",
        "",
        markdown([["method", *map(str, config.shots)], *_error_rows(found)]),
    ]
    steps = [own for name, own in found.items() if "ms" in own[0]]
    if steps:
        lines += [
            "",
            f"A meta-step of {config.rows.students} students on synthetic ratings, with vectors of "
            f"{config.rows.width}: CPU time and peak memory of the meta-gradient, beyond the tables; and apart, "
            "those of SparseAdam, whose state has the rows touched so far.",
            "",
            markdown([STEP_HEADER, *map(_step_row, steps)]),
        ]
    return "\n".join([*lines, ""])


STEP_HEADER = ["method", "rows", "tables (MiB)", "ms", "MiB", "SparseAdam: ms", "MiB"]


def _error_rows(found: dict[str, list[Result]]) -> list[list[str]]:
    rows = []
    for name, (title, _) in METHODS.items():
        if name in found:
            columns = zip(*(one["errors"] for one in found[name]), strict=True)
            rows.append([title, *(f"{statistics.mean(column):.4f}" for column in columns)])
            if differences := differences_of(found, name):
                rows.append(["", *(spread(column) for column in differences)])
    return rows


def differences_of(found: dict[str, list[Result]], name: str) -> list[list[float]]:
    """Return by how many thousandths a method errs more than biases: of each seed, by how many ratings are seen."""
    floors = {} if name == FLOOR else {one["seed"]: one["errors"] for one in found.get(FLOOR, [])}
    each = [
        [1000 * (own - floor) for own, floor in zip(one["errors"], floors[one["seed"]], strict=True)]
        for one in found.get(name, [])
        if one["seed"] in floors
    ]
    return [list(column) for column in zip(*each, strict=True)]


def _step_row(own: list[Result]) -> list[str]:
    first = own[0]
    kind = "" if first["sparse"] else ", whole tables"
    update = [_mean(own, "update_ms", 1), _mean(own, "state_mib", 2)] if first["sparse"] else ["-", "-"]
    return [
        METHODS[first["method"]][0].partition(",")[0] + kind,
        f"{first['rows']:,}",
        f"{first['table_mib']:.1f}",
        spread([one["ms"] for one in own]),
        _mean(own, "peak_mib", 2),
        *update,
    ]


def _mean(own: list[Result], key: str, digits: int) -> str:
    return f"{statistics.mean(one[key] for one in own):.{digits}f}"


def figures(results: list[Result], config: ColdStartConfig, folder: Path) -> list[Path]:
    """Draw differences from biases over ratings seen, and time and memory of a meta-step over rows."""
    path, found = folder / "coldstart.png", by_cell(results)
    with figure(path, columns=3, size=(11.5, 3.6)) as axes:
        errors, time, memory = axes[0]
        for place, (name, (title, color)) in enumerate(METHODS.items()):
            if differences := differences_of(found, name):
                _draw_errors(errors, differences, 0.1 * (place - 3), color, title)
            for kind, style in (("rows", "-"), ("dense", "--")):
                own = [one for one in results if one["cell"].startswith(f"{kind}/{name}/")]
                _draw_sizes(time, own, "ms", color, style)
                _draw_sizes(memory, own, "peak_mib", color, style)
        floor = zip(*(one["errors"] for one in found[FLOOR]), strict=True)
        labels = [
            f"{seen}\n{statistics.mean(own):.4f}" for seen, own in zip(config.shots, floor, strict=True)
        ]
        errors.set_xticks(range(len(labels)), labels)
        errors.axhline(0, color=MUTED, linewidth=1.2)
        errors.set(
            xlabel="Ratings of the student that are seen; RMSE of biases",
            ylabel="Thousandths of RMSE above biases",
        )
        errors.set_title("New students of InstEval, range of seeds")
        time.set(ylabel="CPU time (ms)", title="A meta-gradient; dashed: whole tables")
        memory.set(ylabel="Peak memory (MiB)", title="A meta-gradient; dashed: whole tables")
        for axis in (time, memory):
            scale = {"xscale": "log", "yscale": "log"} if axis.lines else {}
            axis.set(xlabel="Rows of the table of lecturers", **scale)
        for axis in axes[0]:
            axis.grid(axis="y")
        legend_below(errors, columns=6)
    return [path]


def _draw_errors(axis: Any, differences: list[list[float]], shift: float, color: str, title: str) -> None:
    """Draw the mean of each column, and the range of seeds; columns are moved aside, so that none hides another."""
    x = [place + shift for place in range(len(differences))]
    axis.vlines(
        x, [min(own) for own in differences], [max(own) for own in differences], color=color, alpha=0.35
    )
    axis.plot(
        x, [statistics.mean(own) for own in differences], color=color, marker="o", markersize=4, label=title
    )


def _draw_sizes(axis: Any, own: list[Result], key: str, color: str, style: str) -> None:
    sizes = sorted({one["rows"] for one in own})
    means = [statistics.mean(one[key] for one in own if one["rows"] == size) for size in sizes]
    if sizes:
        axis.plot(sizes, means, color=color, linestyle=style, marker="o", markersize=4)
