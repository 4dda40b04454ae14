"""The memory report of a run: `memory.txt` to read, `memory.jsonl` to compute with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from experiments.run.files import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import metagrad as mg

MIB = 2**20
TEXT, ROWS = "memory.txt", "memory.jsonl"


def write(folder: Path, tracker: mg.MemoryTracker) -> None:
    """Write the table and the verdict of a tracker, and its records."""
    write_text(folder / TEXT, f"{tracker.table()}\n\n{tracker.verdict()}\n")
    write_text(folder / ROWS, "".join(json.dumps(record.as_dict()) + "\n" for record in tracker.records()))


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """Return curves in MiB: peaks of inner steps, for each outer step; peaks of outer steps, and what they leave.

    Args:
        rows: The records of a run.
    """
    inner: dict[str, dict[int, float]] = {}
    outer: dict[str, dict[int, float]] = {"peak": {}, "left": {}}
    for row in rows:
        if row["name"] == "outer" and row["depth"] == 0:
            outer["peak"][row["index"]], outer["left"][row["index"]] = row["peak"] / MIB, row["after"] / MIB
        elif row["name"] == "inner" and row["depth"] == 1:
            inner.setdefault(f"outer {row['outer']}", {})[row["index"]] = row["peak"] / MIB
    found = {"inner step": inner, "outer step": outer}
    return {x: curves for x, curves in found.items() if any(curves.values())}


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run, none if it tracked no step."""
    path = folder / ROWS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
