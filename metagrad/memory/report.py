"""Records of phases and the table of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from metagrad.memory.phases import Path, label

MAX_ROWS = 60
_HEAD_ROWS = 20
_COLUMNS = ("phase", "before", "after", "peak", "peak delta", "graph", "at peak", "seconds")


@dataclass(frozen=True)
class Record:
    """What one phase instance did to memory. All sizes are bytes.

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

    Without `last`, more than 60 records show as the first 20 and the last 40.
    """
    if not records:
        return "no phase was recorded"
    head, tail = _shown(len(records), last)
    hidden = len(records) - head - tail
    kept = records[:head] + records[head + hidden :]
    lines = _align([_COLUMNS, *(_row(record) for record in kept)])
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
    return (name, *(format_bytes(size) for size in sizes), f"{record.seconds:.3f}")


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]
