"""The mirror of a run in files of comma-separated values, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from experiments.run.files import write_text
from experiments.run.mirrors.mirror import Mirror

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from experiments.run.schema import Logger

FILE = "metrics.csv"


class CsvMirror(Mirror):
    """Write `metrics.csv`, one row for each logged step, and each table into a file of its own.

    A metric that is logged for the first time is a new column: the file is written again with it.

    Args:
        folder: The run folder.
        resumed_at: The step a continued run starts from, whose later rows are dropped; None of a new run.
    """

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        self._folder = folder
        self._rows = _rows_until(folder / FILE, resumed_at)
        self._columns = list(self._rows[0]) if self._rows else ["step"]
        self._rewrite()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row; metrics that are not logged at this step are empty."""
        row = {"step": step, **values}
        self._rows.append(row)
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns += new
            self._rewrite()
            return
        with (self._folder / FILE).open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table; `memory/phases` is the file `memory_phases.csv`."""
        write_text(self._folder / f"{name.replace('/', '_')}.csv", _text(list(rows[0]), rows))

    def curves(self, name: str, x: str, curves: Mapping[str, Mapping[int, float]]) -> None:
        """Write curves as a table of one column each."""
        points = sorted({point for curve in curves.values() for point in curve})
        self.table(name, [{x: i, **{k: curve.get(i) for k, curve in curves.items()}} for i in points])

    def _rewrite(self) -> None:
        write_text(self._folder / FILE, _text(self._columns, self._rows))


@contextmanager
def opened(
    config: Logger, folder: Path, settings: Mapping[str, Any], resumed_at: int | None
) -> Iterator[Mirror]:
    """Open the mirror of a run."""
    yield CsvMirror(folder, resumed_at)


def _rows_until(path: Path, step: int | None) -> list[dict[str, Any]]:
    if step is None or not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if int(row["step"]) <= step]


def _text(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
