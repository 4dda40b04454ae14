"""What a cold start comes to: errors by the ratings seen, and what a meta-step takes by the rows of its tables."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from experiments.plots.style import BLUE, GREEN, MUTED, ORANGE, PURPLE, VERMILION, figure, legend_below
from experiments.study import by_cell, spread
from experiments.table_report import markdown

if TYPE_CHECKING:
    from pathlib import Path

    from experiments.coldstart.schema import ColdStartConfig
    from experiments.study import Result

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
        *markdown([["method", *map(str, config.shots)], *_error_rows(found)]),
    ]
    steps = [own for name, own in found.items() if "ms" in own[0]]
    if steps:
        lines += [
            "",
            f"A meta-step of {config.rows.students} students on synthetic ratings, with vectors of "
            f"{config.rows.width}: CPU time and peak memory of the meta-gradient, beyond the tables; and apart, "
            "those of SparseAdam, whose state has the rows touched so far.",
            "",
            *markdown([STEP_HEADER, *map(_step_row, steps)]),
        ]
    return "\n".join([*lines, ""])


STEP_HEADER = ["method", "rows", "tables (MiB)", "ms", "MiB", "SparseAdam: ms", "MiB"]


def _error_rows(found: dict[str, list[Result]]) -> list[list[str]]:
    rows = []
    for name, (title, _) in METHODS.items():
        if name in found:
            columns = zip(*(one["errors"] for one in found[name]), strict=True)
            rows.append([title, *(f"{statistics.mean(column):.4f}" for column in columns)])
            if name != FLOOR and (differences := differences_of(found, name)):
                rows.append(["", *(spread(column) for column in differences)])
    return rows


def differences_of(found: dict[str, list[Result]], name: str) -> list[list[float]]:
    """Return by how many thousandths a method errs more than biases, of each seed, by how many ratings are seen."""
    floors = {one["seed"]: one["errors"] for one in found.get(FLOOR, [])}
    each = [
        [1000 * (own - floor) for own, floor in zip(one["errors"], floors[one["seed"]], strict=True)]
        for one in found[name]
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
    """Draw errors over ratings seen, and time and memory of a meta-step over rows."""
    path, found = folder / "coldstart.png", by_cell(results)
    with figure(path, columns=3, size=(11.5, 3.6)) as axes:
        errors, time, memory = axes[0]
        for name, (title, color) in METHODS.items():
            if name in found:
                _draw_errors(errors, found, name, title, color, config.shots)
            for kind, style in (("rows", "-"), ("dense", "--")):
                own = [one for one in results if one["cell"].startswith(f"{kind}/{name}/")]
                _draw_sizes(time, own, "ms", color, style)
                _draw_sizes(memory, own, "peak_mib", color, style)
        errors.set(
            xlabel="Ratings of the student that are seen",
            ylabel="RMSE",
            title="InstEval, new students",
        )
        errors.set_xticks(range(len(config.shots)), list(map(str, config.shots)))
        time.set(ylabel="CPU time of a meta-gradient (ms)", title="Time, by rows of the table")
        memory.set(ylabel="Peak of a meta-gradient (MiB)", title="Memory, dashed with whole tables")
        for axis in (time, memory):
            scale = {"xscale": "log", "yscale": "log"} if axis.lines else {}
            axis.set(xlabel="Rows", **scale)
        for axis in axes[0]:
            axis.grid(axis="y")
        legend_below(errors, columns=6)
    return [path]


def _draw_errors(
    axis: Any, found: dict[str, list[Result]], name: str, title: str, color: str, shots: list[int]
) -> None:
    means = [statistics.mean(column) for column in zip(*(one["errors"] for one in found[name]), strict=True)]
    axis.plot(range(len(shots)), means, color=color, marker="o", markersize=4, label=title)


def _draw_sizes(axis: Any, own: list[Result], key: str, color: str, style: str) -> None:
    sizes = sorted({one["rows"] for one in own})
    means = [statistics.mean(one[key] for one in own if one["rows"] == size) for size in sizes]
    if sizes:
        axis.plot(sizes, means, color=color, linestyle=style, marker="o", markersize=4)
