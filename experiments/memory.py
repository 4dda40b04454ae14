"""The memory report of a run: `memory.txt` to read, `memory.jsonl` to compute with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from experiments.files import write_text
from metagrad.memory.report import table, with_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import metagrad as mg
    from metagrad.memory import Record

TEXT, ROWS = "memory.txt", "memory.jsonl"


def write(folder: Path, tracker: mg.MemoryTracker, processes: Sequence[Sequence[Record]]) -> None:
    """Write the table and the verdict of a tracker, and its records; with the peaks of all processes of a run."""
    records = list(processes[0]) if len(processes) == 1 else with_ranks(processes)
    write_text(folder / TEXT, f"{table(records)}\n\n{tracker.verdict()}\n")
    write_text(folder / ROWS, "".join(json.dumps(record.as_dict()) + "\n" for record in records))


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run, none if it tracked no step."""
    path = folder / ROWS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
