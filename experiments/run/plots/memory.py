"""Memory of the first outer steps: bytes alive through every phase, and what each inner step adds."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from experiments.run import memory
from experiments.run.plots.style import BLUE, INK, MUTED, SKY, VERMILION, figure

if TYPE_CHECKING:
    from pathlib import Path

UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
MAX_SLOTS, MAX_NAMED = 60, 30


def memory_plot(folder: Path) -> Path:
    """Draw the records of a run's memory tracker."""
    phases = leaves(memory.read(folder))
    shown = fitting(phases)
    scale, unit = _unit(max(row["peak"] for row in shown))
    path = folder / "plots" / "memory.png"
    with figure(path, 1, 2, size=(10.5, 3.9), width_ratios=(3, 1)) as axes:
        _timeline(axes[0, 0], shown, scale, unit)
        _growth(axes[0, 1], phases)
    return path


def leaves(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the phases of outer steps that no other phase is inside of, in order."""
    parents = {_key(row["path"][:-1]) for row in rows}
    return [row for row in rows if row["outer"] is not None and _key(row["path"]) not in parents]


def fitting(phases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last outer steps that have room on the page together, at least one."""
    steps = sorted({row["outer"] for row in phases})
    kept = [[row for row in phases if row["outer"] >= first] for first in steps]
    return next((rows for rows in kept if len(rows) <= MAX_SLOTS), kept[-1])


def _key(path: list[list[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, path))


def _timeline(axis: Any, phases: list[dict[str, Any]], scale: int, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    for i, row in enumerate(phases):
        if row["name"] == "inner":
            label = (
                "Inner step" if row is next(other for other in phases if other["name"] == "inner") else None
            )
            axis.axvspan(i, i + 1, color=SKY, alpha=0.16, linewidth=0, zorder=0, label=label)
    edges = [row["before"] / scale for row in phases] + [phases[-1]["after"] / scale]
    axis.fill_between(range(len(edges)), edges, color=BLUE, alpha=0.25, linewidth=0)
    axis.plot(range(len(edges)), edges, color=BLUE, label="Alive at the phase's borders")
    peaks = [row["peak"] / scale for row in phases]
    axis.hlines(
        peaks, range(len(phases)), range(1, len(edges)), color=VERMILION, label="Peak within the phase"
    )
    axis.set(xlim=(0, len(phases)), ylabel=f"Memory ({unit})")
    axis.set_ylim(bottom=min(0, *edges))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axis.set_title(f"Memory through outer steps ({_origin(phases[0])})")
    axis.grid(axis="y")
    _name_phases(axis, phases)
    _separate_outer_steps(axis, phases)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=3)


def _name_phases(axis: Any, phases: list[dict[str, Any]]) -> None:
    ticks = [(i + 0.5, _short_name(row, phases)) for i, row in enumerate(phases)]
    axis.set_xticks([x for x, _ in ticks], [text for _, text in ticks], rotation=90, fontsize=8.5)
    axis.tick_params(axis="x", length=0)


def _short_name(row: dict[str, Any], phases: list[dict[str, Any]]) -> str:
    crowded = len(phases) > MAX_NAMED
    if row["name"] == "inner":
        return "" if crowded else f"inner {row['index']}"
    return "" if crowded and row["name"] == "query" else row["name"]


def _separate_outer_steps(axis: Any, phases: list[dict[str, Any]]) -> None:
    starts = [i for i, row in enumerate(phases) if i == 0 or row["outer"] != phases[i - 1]["outer"]]
    top = axis.get_ylim()[1]
    axis.set_ylim(top=top * 1.12)
    for i in starts:
        axis.axvline(i, color=MUTED, linewidth=0.8)
        axis.text(i + 0.15, top * 1.1, f"Outer step {phases[i]['outer']}", va="top", fontsize=8.5, color=INK)


def _growth(axis: Any, phases: list[dict[str, Any]]) -> None:
    added: dict[int, list[int]] = {}
    # Up to the next phase, before which a step lets go of what it only returned.
    for row, following in itertools.pairwise(phases):
        if row["name"] == "inner":
            added.setdefault(row["index"], []).append(following["before"] - row["before"])
    means = {step: sum(values) / len(values) for step, values in added.items()}
    scale, unit = _unit(max(map(abs, means.values()), default=0))
    axis.bar(list(means), [mean / scale for mean in means.values()], width=0.62, color=BLUE, alpha=0.8)
    axis.axhline(0, color=MUTED, linewidth=0.8)
    axis.set(xlabel="Inner step", ylabel=f"Memory added ({unit})", xlim=(-0.8, max(means, default=0) + 0.8))
    axis.set_title("Added by each inner step")
    axis.grid(axis="y")
    axis.set_xticks(range(0, max(means, default=0) + 1, len(means) // 10 + 1))


def _origin(row: dict[str, Any]) -> str:
    on_cpu = row["device"] == "cpu"
    return "tensors on the CPU, since tracking began" if on_cpu else f"allocator, {row['device']}"


def _unit(nbytes: float) -> tuple[int, str]:
    return next(((scale, unit) for scale, unit in UNITS if nbytes >= scale), (1, "B"))
