"""The metrics of a run as JSON Lines, with one object per logged step and names of the form `group/name(unit)`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


class JsonLines:
    """Append rows to a file and flush after each row.

    Floats are written by `repr`, which is exact.

    Args:
        path: The file.
        until: Keep rows up to this `step` and drop later rows, for a resumed run. 0 starts an empty file.
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
    """Return the complete rows of a file. A line cut off by a crash ends the file, and a missing file has no rows."""
    return list(_rows(path)) if path.exists() else []


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for line in file:
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} is damaged: a line is no JSON.") from error


def series(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one metric."""
    pairs = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in pairs], [value for _, value in pairs]


def value_of(name: str, values: Mapping[str, float]) -> float:
    """Return the value of a metric, with or without the unit in its name.

    Raises:
        ValueError: There is no such metric. The message names all metrics.
    """
    found = [value for known, value in values.items() if name in (known, known.partition("(")[0])]
    if not found:
        known = ", ".join(key.partition("(")[0] for key in values if "_ci95" not in key and key != "step")
        raise ValueError(f"train: metric={name} is not measured; what is: {known}.")
    return found[0]


def last_values(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the last value of every metric."""
    return {name: value for row in rows for name, value in row.items()}


def check_metric(name: str, rows: list[dict[str, Any]]) -> None:
    """Raise `ValueError` for a metric that neither the first validation nor the end of the run has.

    Raises:
        ValueError: As `value_of`.
    """
    group = name.partition("/")[0]
    validated = {key: value for key, value in last_values(rows).items() if key.startswith("validation/")}
    tested = {key.replace("validation/", "test/"): value for key, value in validated.items()}
    if validated and group not in ("train", "optimizer"):
        value_of(name, {**validated, **tested})
