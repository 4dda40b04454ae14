"""Records of phases, the table of them, and the verdict: one sentence on what a run's memory does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

from metagrad.memory.phases import Path, Phase, label

MAX_ROWS = 60
_HEAD_ROWS = 20
_COLUMNS = ("phase", "before", "after", "peak", "peak delta", "graph", "at peak", "seconds")
_RANKS = "peak by rank"
_MAX_RANKS = 4

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
            too does. `None` where it is not measured ("rss").
        at_peak: bytes alive at the run's peak that this very phase allocated, nested phases excluded, so that
            the records of a run add up to its peak less what was made outside of every phase ("allocator":
            before its rounding). `None` where it is not measured.
        seconds: wall time on the host. CUDA is not synchronized.
        device: the device measured, e.g. "cuda:0".
        method: "storage" (relative to the opening), "allocator" or "rss" (both absolute).
        ranks: the peak of this phase in each process of a run, by rank, `None` where one did not enter it; empty
            where there is one process alone.
    """

    path: Path
    before: int
    after: int
    peak: int
    graph: int | None
    at_peak: int | None
    seconds: float
    device: str
    method: str
    ranks: tuple[int | None, ...] = ()

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
        lists = {"path": [list(step) for step in self.path], "ranks": list(self.ranks)}
        return {**asdict(self), **derived, **lists}


def with_ranks(processes: Sequence[Sequence[Record]]) -> list[Record]:
    """Return the records of the first process, each with the peaks of the same phase in all of them.

    Phases are the same if they have one path; of those that do, the first is the same as the first, and so on.
    """
    peaks = [{key: record.peak for key, record in _counted(records)} for records in processes]
    return [
        replace(record, ranks=tuple(of_process.get(key) for of_process in peaks))
        for key, record in _counted(processes[0])
    ]


def _counted(records: Sequence[Record]) -> Iterator[tuple[tuple[Path, int], Record]]:
    """Yield records with their paths, and how many of that path came before."""
    seen: Counter[Path] = Counter()
    for record in records:
        yield (record.path, seen[record.path]), record
        seen[record.path] += 1


def format_bytes(nbytes: int | None) -> str:
    """Return a size for people, in powers of 1024; "-" for what was not measured."""
    if nbytes is None:
        return "-"
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def table(records: list[Record], last: int | None = None) -> str:
    """Return the records as aligned text, one row each, indented by nesting; rows left out are stated.

    Of several processes the last column has the peak of each, by rank; of more than four, the least and the most.
    Without `last`, more than 60 records show as the first 20 and the last 40.
    """
    if not records:
        return "no phase was recorded"
    head, tail = _shown(len(records), last)
    hidden = len(records) - head - tail
    kept = records[:head] + records[head + hidden :]
    columns = (*_COLUMNS, _RANKS) if any(record.ranks for record in kept) else _COLUMNS
    lines = _align([columns, *(_row(record)[: len(columns)] for record in kept)])
    if hidden:
        lines.insert(1 + head, _elision(records[head : head + hidden]))
    return "\n".join([*lines, _footer(records[0])])


def _shown(num_records: int, last: int | None) -> tuple[int, int]:
    if last is not None:
        return 0, min(last, num_records)
    if num_records <= MAX_ROWS:
        return num_records, 0
    return _HEAD_ROWS, MAX_ROWS - _HEAD_ROWS


def _elision(hidden: list[Record]) -> str:
    first, final = label(hidden[0].path), label(hidden[-1].path)
    between = f"{first} to {final}" if len(hidden) > 1 else first
    rows = "row" if len(hidden) == 1 else "rows"
    return f"... {len(hidden)} {rows} not shown ({between}); table(last=n) shows the last n"


def _footer(record: Record) -> str:
    origin = "since the tracker was opened" if record.method == "storage" else "in all"
    return f"{record.device}, measured by {record.method}: bytes {origin}"


def _row(record: Record) -> tuple[str, ...]:
    sizes = (record.before, record.after, record.peak, record.peak_delta, record.graph, record.at_peak)
    name = "  " * record.depth + label(record.path[-1:])
    return (name, *(format_bytes(size) for size in sizes), f"{record.seconds:.3f}", _by_rank(record.ranks))


def _by_rank(peaks: Sequence[int | None]) -> str:
    known = [peak for peak in peaks if peak is not None]
    if len(peaks) <= _MAX_RANKS:
        return ", ".join(map(format_bytes, peaks))
    return f"{format_bytes(min(known))} to {format_bytes(max(known))}, rank {peaks.index(max(known))}"


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
    """Bytes from one step to the next: all of them, and those the graph holds (`None`: not measured)."""

    total: int
    graph: int | None


def verdict(phases: list[Phase], holder: str, peak: int) -> str:
    """Return the sentence; `holder` says in words which phase the run's `peak` (bytes) is due to."""
    parts = (_on_inner(phases), _on_outer(phases), f"the peak is {format_bytes(peak)}, {holder}")
    return "; ".join(parts) + "."


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
    return [_growth(p.after - p.before, p.held_before, p.held_after) for p in inner]


def outer_growth(phases: list[Phase]) -> list[Growth]:
    """Return the growth from the end of each outer step to the end of the next."""
    return [_between(first, second) for first, second in pairwise(p for p in phases if p.name == "outer")]


def _between(first: Phase, second: Phase) -> Growth:
    return _growth(second.after - first.after, first.held_after, second.held_after)


def _growth(total: int, held_before: int | None, held_after: int | None) -> Growth:
    if held_before is None or held_after is None:
        return Growth(total, None)
    # The graph may also take hold of what was there before: that is no growth.
    return Growth(total, min(max(held_after - held_before, 0), max(total, 0)))


def _on_inner(phases: list[Phase]) -> str:
    growths = inner_growth(phases)
    if not growths:
        return "No inner step was recorded"
    typical = _typical(growths)
    least, most = min(g.total for g in growths), max(g.total for g in growths)
    spread = "" if least == most else f" (median; {format_bytes(least)} to {format_bytes(most)})"
    if typical.total <= 0:
        return f"Inner steps do not add memory: {format_bytes(typical.total)} each{spread}"
    return f"Each inner step adds {format_bytes(typical.total)}{spread}, {_held_by(typical)}"


def _on_outer(phases: list[Phase]) -> str:
    growths = outer_growth(phases)
    if not growths:
        num_outer = sum(phase.name == "outer" for phase in phases)
        seen = "one outer step was recorded" if num_outer else "no outer step was recorded"
        return f"{seen}, so it is unknown whether it was freed"
    typical = _typical(growths)
    use = median_low(phase.peak - phase.before for phase in phases if phase.name == "outer")
    if typical.total > _LEAK_SHARE * use:
        held_by = _held_by(typical)
        return f"leaked: each outer step leaves {format_bytes(typical.total)} more than the last, {held_by}"
    return f"freed: each outer step leaves {format_bytes(max(typical.total, 0))} more than the last"


def _typical(growths: list[Growth]) -> Growth:
    """Return the growth of the median total."""
    return sorted(growths, key=lambda growth: growth.total)[(len(growths) - 1) // 2]


def _held_by(growth: Growth) -> str:
    if growth.graph is None:
        return "held by graph or state, which this method cannot tell"
    state = growth.total - growth.graph
    if not state:
        return "held by the graph"
    if not growth.graph:
        return "held by state"
    parts = {"the graph": growth.graph, "state": state}
    first, second = sorted(parts, key=lambda part: -parts[part])
    return f"held by {first} ({format_bytes(parts[first])}) and {second} ({format_bytes(parts[second])})"
