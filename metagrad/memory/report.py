"""Records of phases, the table of them, and the summary: one sentence on what a run's memory does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

from metagrad.memory.phases import AGAIN, Path, Phase, label

MAX_ROWS = 60
_HEAD_ROWS = 20
_COLUMNS = ("phase", "before", "after", "peak", "peak delta", "graph", "at peak", "seconds")

# Less than this share of what an outer step takes at its peak, left from one outer step to the next (a list
# of losses), is not called a leak. The bytes are stated either way.
_LEAK_SHARE = 0.01


@dataclass(frozen=True)
class Record:
    """What one phase did to memory, as :class:`MemoryTracker` saw it. All sizes are bytes.

    Attributes:
        path: the open phases from the outermost to this one, e.g. `(("outer", 3), ("inner", 0))`; a phase
            without a number has `None`.
        before: bytes in use on entry.
        after: bytes in use on exit.
        peak: the maximum in between, nested phases included.
        graph: bytes saved for backward during the phase (nested phases included) and still held at its end. A
            storage counts once; leaf parameters and views of them do not count; what an earlier phase saved
            too does.
        at_peak: bytes alive at the run's peak that this very phase allocated, nested phases excluded, so that
            the records of a run add up to its peak less what was made outside of every phase (on CUDA
            before its rounding).
        seconds: wall time on the host. CUDA is not synchronized.
        device: the device measured, e.g. "cuda:0". On a CPU bytes count from the opening, on CUDA they are absolute.
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
        """The innermost name, "inner" for `inner(k)`."""
        return self.path[-1][0]

    @property
    def index(self) -> int | None:
        """The innermost number, k for `inner(k)`, or `None`."""
        return self.path[-1][1]

    @property
    def depth(self) -> int:
        """The number of phases around this one."""
        return len(self.path) - 1

    @property
    def outer(self) -> int | None:
        """The outer step this belongs to, or `None` outside of every outer step."""
        return next((index for name, index in self.path if name == "outer"), None)

    @property
    def peak_delta(self) -> int:
        """The bytes by which the peak exceeds what was in use on entry."""
        return self.peak - self.before

    def as_dict(self) -> dict[str, object]:
        """Return all of it, properties included, as JSON types; the path as a list of `[name, index]`."""
        derived = {name: getattr(self, name) for name in ("name", "index", "depth", "outer", "peak_delta")}
        return {**asdict(self), **derived, "path": [list(step) for step in self.path]}


def format_bytes(nbytes: int) -> str:
    """Return a size for people, in powers of 1024."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def table(records: list[Record], last: int | None = None) -> str:
    """Return the records as aligned text, one row each, indented by nesting; rows left out are stated.

    Without `last`, more than 60 records show as the first 20 and the last 40.
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
    """Bytes from one step to the next: all of them, and those the graph holds."""

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
    """Return the growth over each pair of inner steps k, k + 1 of one parent; without pairs, each step."""
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
    # The graph may also take hold of what was there before: that is no growth.
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
    """Return the growth of the median total."""
    return sorted(growths, key=lambda growth: growth.total)[(len(growths) - 1) // 2]


def _described(growth: Growth) -> str:
    return f"{format_bytes(growth.total)} each, {format_bytes(growth.graph)} of it in the autograd graph"
