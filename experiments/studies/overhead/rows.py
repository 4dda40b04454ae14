"""What was measured as rows of numbers: bytes, seconds, and their ratios within a cell."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from experiments.studies.overhead.methods import GRADIENT

Row = dict[str, Any]
MIB = 2**20
Values = Callable[[Row], float | None]


def rows_of(cell: dict[str, Any]) -> list[Row]:
    """Return the rows of a cell, with ratios to the first way and to the gradient, of the same inner steps.

    Ratios of seconds are medians over rounds, each within a round; with the lowest and the highest.
    """
    request, measured = cell["request"], cell["rows"]
    found = {(row["steps"], row["quantity"], row["remedy"]): row for row in measured}
    head = {"model": request["model"], "axis": cell["axis"]}
    head |= dict(zip(("depth", "width", "batch"), request["size"], strict=True))
    return [
        head
        | {
            name: row[name]
            for name in ("steps", "quantity", "remedy", "held", "peak", "error", "first", "note")
        }
        | {"seconds": statistics.median(row["seconds"]) if row["seconds"] else None}
        | _compared("ways", row, found[row["steps"], row["quantity"], ""])
        | _compared("gradients", row, found[row["steps"], GRADIENT, ""])
        for row in measured
    ]


def _compared(name: str, row: Row, base: Row) -> Row:
    """Return what a row takes in units of another: its peak, and its seconds."""
    keys = (f"peak/{name}", f"seconds/{name}", f"seconds/{name}/lowest", f"seconds/{name}/highest")
    if row["note"] or base["note"]:
        return dict.fromkeys(keys)
    ratios = [a / b for a, b in zip(row["seconds"], base["seconds"], strict=True)]
    values = (row["peak"] / base["peak"], statistics.median(ratios), min(ratios), max(ratios))
    return dict(zip(keys, values, strict=True))


def chosen(rows: Iterable[Row], **values: Any) -> list[Row]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def unique(rows: Iterable[Row], *names: str) -> list[tuple[Any, ...]]:
    """Return the different values of some columns, in order."""
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def as_csv(rows: Sequence[Row]) -> str:
    """Return all rows with a header."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def markdown(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return a table whose first column is text and whose others are numbers."""
    lines = [f"| {' | '.join(row)} |" for row in (header, *body)]
    return [lines[0], f"| --- |{' ---: |' * (len(header) - 1)}", *lines[1:]]
