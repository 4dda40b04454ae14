"""What was measured, as a table to read and as a bar chart."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from experiments.benchmarks.maml.methods import ANOTHER, BASELINE
from experiments.benchmarks.maml.runner import ROUNDING, Record, Records, ratios
from experiments.run.plots.style import BLUE, INK, MUTED, SKY, figure

MIB = 2**20
HEADER = f"{'':30}{'median ms':>10}{'faster':>9}  {'in the rounds':15}{'peak MiB':>10}{'of loop':>9}{'compile s':>14}"


def table(name: str, about: str, records: Records) -> str:
    """Format medians, ratios to the loop, peaks, compile times, and what did not run or is wrong."""
    return "\n".join([f"{name}: {about}", HEADER, *(_line(method, records) for method in records)])


def _line(method: str, records: Records) -> str:
    record, loop = records[method], records[BASELINE]
    if not record.rounds:
        return f"{method:30}{record.note}"
    found = ratios(record, loop)
    milliseconds = 1000 * statistics.median(answer["median"] for answer in record.rounds)
    spread = f"{found.lowest:.2f} to {found.highest:.2f}"
    return (
        f"{method:30}{milliseconds:10.1f}{found.faster:8.2f}x  {spread:15}{_peak(record, found.memory)}"
        f"{_compile(record):>14}{'   another gradient' if method == ANOTHER else _wrong(record)}"
    )


def _peak(record: Record, of_loop: float | None) -> str:
    if record.peak is None or of_loop is None:
        return f"{'':19}"
    mark = "*" if record.rounds[0]["peak_by"] == "compiler" else " "
    return f"{record.peak / MIB:9.2f}{mark}{of_loop:8.2f}x"


def _compile(record: Record) -> str:
    """Say what compiling took in the first process, and with what that left in the cache."""
    cold, *warm = record.compile_seconds
    if cold < 1:
        return ""
    return f"{cold:.1f}, {statistics.median(warm):.1f}" if warm else f"{cold:.1f}"


def _wrong(record: Record) -> str:
    error = record.error or 0.0
    return "" if error < ROUNDING else f"   wrong by {100 * error:.1g} %"


LEGEND = (
    "faster: the loop's time over the method's, the median over the rounds, and its range. compile s: of the first "
    "process, and of later ones, which find the compiler's cache. *: as XLA states it, else "
    "by torch's allocator."
)


def chart(path: Path, results: dict[str, Records]) -> None:
    """Draw how much faster than the loop each method is, and its peak memory, a row for each workload."""
    rows = {name: [m for m, record in records.items() if record.rounds] for name, records in results.items()}
    heights = [len(methods) + 1.5 for methods in rows.values()]
    size = (10.0, 0.24 * sum(heights) + 0.6)
    with figure(path, len(rows), 2, size=size, height_ratios=heights) as axes:
        for (speed, memory), (name, methods) in zip(axes, rows.items(), strict=True):
            found = [ratios(results[name][m], results[name][BASELINE]) for m in methods]
            _bars(speed, methods, [r.faster for r in found], BLUE)
            _bars(memory, methods, [r.memory or 0.0 for r in found], SKY)
            memory.set_yticklabels([])
            speed.set_title(f"{name}: times faster than the loop")
            memory.set_title("peak memory, of the loop's")


def _bars(axis: Any, labels: list[str], values: list[float], color: str) -> None:
    bars = axis.barh(range(len(labels)), values, color=color, height=0.7)
    axis.bar_label(
        bars, [f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in values], padding=3, color=INK
    )
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.axvline(1.0, color=MUTED, linewidth=0.8)
    axis.set_xlim(0, 1.15 * max(values))
    axis.grid(axis="x")
