"""The metrics of a run as JSON Lines, one object per logged step; names are `group/name(unit)`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


class JsonLines:
    """Append rows to a file, flushed one by one.

    Floats are written as `repr` does, which loses nothing.

    Args:
        path: The file.
        until: Keep rows with `step` up to this one and drop the rest, as a resumed run must; 0 starts afresh.
    """

    def __init__(self, path: Path, *, until: int = 0) -> None:
        kept = [row for row in read_rows(path) if row["step"] <= until]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, path)
        self._file = path.open("a")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row and hand it to the operating system."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until every row is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a file; a line cut off by a crash ends it, a missing file has none."""
    return list(_rows(path)) if path.exists() else []


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


def series(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one metric."""
    pairs = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in pairs], [value for _, value in pairs]
