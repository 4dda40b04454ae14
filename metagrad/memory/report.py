"""Records of phases, their table, and the summary of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

from metagrad.memory.phases import AGAIN, Path, Phase, label

MAX_ROWS = 60
_HEAD_ROWS = 20
_COLUMNS = ("phase", "before", "after", "peak", "peak delta", "graph", "at peak", "seconds")

# The summary reports a leak if an outer step leaves more than this share of the bytes that it needs at its peak.
# A growing list of losses stays below this share.
_LEAK_SHARE = 0.01


@dataclass(frozen=True)
class Record:
    """Memory use of one phase, as measured by :class:`MemoryTracker`. All sizes are in bytes.

    Attributes:
        path: Names and numbers of the open phases, from the outermost to this phase, e.g.
            `(("outer", 3), ("inner", 0))`. The number is `None` for a phase without a number.
        before: Bytes in use on entry.
        after: Bytes in use on exit.
        peak: Maximum bytes in use during the phase, including nested phases.
        graph: Bytes that were saved for backward during the phase and are still held at its end, including nested
            phases. A storage counts once, even if an earlier phase also saved it. Leaf parameters and their views do
            not count.
        at_peak: Bytes that this phase allocated, without nested phases, and that were alive at the peak of the run.
            The sum over all records is the peak minus the bytes allocated outside of every phase. On CUDA these
            bytes are not rounded up to blocks.
        seconds: Wall time on the host in seconds. CUDA is not synchronized.
        device: Measured device, e.g. "cuda:0". Bytes on a CPU are relative to the opening of the tracker. Bytes on
            CUDA are absolute.
    """

    path: Path
    before: int
    after: int
    peak: int
    graph: int
    at_peak: int
    seconds: float
    device: str

    @property
    def name(self) -> str:
        """Name of the phase, "inner" for `inner(k)`."""
        return self.path[-1][0]

    @property
    def index(self) -> int | None:
        """Number of the phase, k for `inner(k)`, or `None`."""
        return self.path[-1][1]

    @property
    def depth(self) -> int:
        """Number of phases around this phase."""
        return len(self.path) - 1

    @property
    def outer(self) -> int | None:
        """Number of the outer step around this phase, or `None` outside of every outer step."""
        return next((index for name, index in self.path if name == "outer"), None)

    @property
    def peak_delta(self) -> int:
        """Peak minus the bytes in use on entry."""
        return self.peak - self.before

    def as_dict(self) -> dict[str, object]:
        """Return all attributes and properties as JSON types. The path is a list of `[name, index]`."""
        derived = {name: getattr(self, name) for name in ("name", "index", "depth", "outer", "peak_delta")}
        return {**asdict(self), **derived, "path": [list(step) for step in self.path]}


def format_bytes(nbytes: int) -> str:
    """Return a size as text, in powers of 1024."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def table(records: list[Record], last: int | None = None) -> str:
    """Return the records as aligned text with one row each, indented by nesting.

    Without `last`, only the first 20 and the last 40 of more than 60 records are shown. A line says how many rows are
    hidden.
    """
    if not records:
        return "no phase was recorded"
    head = 0 if last is not None else len(records) if len(records) <= MAX_ROWS else _HEAD_ROWS
    tail = min(last if last is not None else MAX_ROWS - head, len(records) - head)
    hidden = records[head : len(records) - tail]
    lines = _align([_COLUMNS, *map(_row, records[:head] + records[len(records) - tail :])])
    if hidden:
        first, final = label(hidden[0].path), label(hidden[-1].path)
        text = f"... {len(hidden)} not shown, {first} to {final}; table(last=n) shows the last n"
        lines.insert(1 + head, text)
    origin = "since the tracker was opened" if records[0].device == "cpu" else "in all"
    lines.append(f"{records[0].device}: bytes {origin}")
    if any(record.name.endswith(AGAIN) for record in records):
        lines.append("again: recomputed in the backward pass")
    return "\n".join(lines)


def _row(record: Record) -> tuple[str, ...]:
    sizes = (record.before, record.after, record.peak, record.peak_delta, record.graph, record.at_peak)
    name = "  " * record.depth + label(record.path[-1:])
    return (name, *map(format_bytes, sizes), f"{record.seconds:.3f}")


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]


class Growth(NamedTuple):
    """Growth of memory from one step to the next: all bytes, and the bytes that the graph holds."""

    total: int
    graph: int


def summary(phases: list[Phase], holder: str, peak: int) -> str:
    """Return the summary of a run. ``holder`` names the phase that allocated most of ``peak`` bytes."""
    lines = {
        "inner steps": _on_inner(phases),
        "recomputed": _on_recomputed(phases),
        "outer steps": _on_outer(phases),
        "peak": f"{format_bytes(peak)}, {holder}",
    }
    return "\n".join(f"{name + ':':12} {text}" for name, text in lines.items() if text)


def inner_growth(phases: list[Phase]) -> list[Growth]:
    """Return the growth over each pair of inner steps k, k + 1 of one parent. Without pairs, use each step."""
    inner = [phase for phase in phases if phase.name == "inner"]
    by_parent: dict[int, list[Phase]] = {}
    for phase in inner:
        by_parent.setdefault(id(phase.parent), []).append(phase)
    pairs = [
        (first, second)
        for siblings in by_parent.values()
        for first, second in pairwise(siblings)
        if first.index is not None and second.index == first.index + 1
    ]
    if pairs:
        return [_between(first, second) for first, second in pairs]
    return [_growth(p.after - p.before, p.held_after - p.held_before) for p in inner]


def outer_growth(phases: list[Phase]) -> list[Growth]:
    """Return the growth from the end of each outer step to the end of the next."""
    return [_between(first, second) for first, second in pairwise(p for p in phases if p.name == "outer")]


def _between(first: Phase, second: Phase) -> Growth:
    return _growth(second.after - first.after, second.held_after - first.held_after)


def _growth(total: int, graph: int) -> Growth:
    # The graph may also save a tensor that was allocated earlier. This is not growth.
    return Growth(total, min(max(graph, 0), max(total, 0)))


def _on_inner(phases: list[Phase]) -> str:
    growths = inner_growth(phases)
    return _described(_typical(growths)) if growths else "none"


def _on_recomputed(phases: list[Phase]) -> str:
    graphs = [phase.graph for phase in phases if phase.name == f"inner{AGAIN}"]
    if not graphs:
        return ""
    return f"{len(graphs)} in backward passes. The graph of a step holds {format_bytes(median_low(graphs))}"


def _on_outer(phases: list[Phase]) -> str:
    growths = outer_growth(phases)
    if not growths:
        return "fewer than two, so a leak would not show"
    typical = _typical(growths)
    use = median_low(phase.peak - phase.before for phase in phases if phase.name == "outer")
    return f"leak of {_described(typical)}" if typical.total > _LEAK_SHARE * use else "freed"


def _typical(growths: list[Growth]) -> Growth:
    """Return the growth with the median total."""
    return sorted(growths, key=lambda growth: growth.total)[(len(growths) - 1) // 2]


def _described(growth: Growth) -> str:
    return f"{format_bytes(growth.total)} each, {format_bytes(growth.graph)} of it in the autograd graph"
