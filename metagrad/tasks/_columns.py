"""The columns of a table: one parser for CSV files, mappings and data frames.

A column holds integers, floats, dates or text. Typed entries keep their type. The fields of a CSV file are text.
Text is stripped. A text column is parsed only if the column is used as numbers or if its type is declared. In both
cases every entry must match the pattern of the type. Ids such as ``007`` and ``1_11`` therefore stay as they are
written.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import os
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
from torch import Tensor

from metagrad.core.checks import check_choice, is_list_or_tuple, is_mapping, refuse
from metagrad.tasks._data_root import find_path

MISSING = {
    "",
    "na",
    "n/a",
    "<na>",
    "nan",
    "nat",
    "null",
    "none",
}  # in lower case, only "" in a column declared as text

Array = np.ndarray[Any, Any]


class Kind(NamedTuple):
    """A type of columns.

    Args:
        example: Description of an entry in error messages.
        dtype: Type of the array.
        types: Python types of its entries.
        pattern: Pattern of the text that can be parsed.
        parse: Maps text of this pattern to an entry.
    """

    example: str
    dtype: str
    types: tuple[type, ...]
    pattern: re.Pattern[str]
    parse: Callable[[str], Any]


_INTEGERS = (int, np.integer, np.bool_)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_DAY = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?)?", re.ASCII)
_DAY_EXAMPLE = "a date such as 2024-03-01"

KINDS = {
    "integer": Kind("an integer of 64 bits", "int64", _INTEGERS, re.compile(r"[+-]?\d{1,19}", re.ASCII), int),
    "float": Kind("a number", "float64", (float, np.floating, *_INTEGERS), _NUMBER, float),
    "date": Kind(_DAY_EXAMPLE, "datetime64[us]", (datetime.date, np.datetime64), _DAY, np.datetime64),
    "text": Kind("text", "object", (str,), re.compile(""), str),
}


class Column(NamedTuple):
    """The values of a column.

    Args:
        kind: A key of `KINDS`.
        values: int64, float64, datetime64 or object, [rows]. The entry of a row without a value is arbitrary.
        missing: True where a row has no value, [rows] bool.
    """

    kind: str
    values: Array
    missing: Array


class Table:
    """Columns of one length, which are parsed when they are used.

    Args:
        call: Name of the caller in error messages.
        columns: Entries of each column by its name, [rows].
        row: Returns how errors name a row.
    """

    def __init__(
        self, call: str, columns: Mapping[str, Array], row: Callable[[int], str] = "row {}".format
    ) -> None:
        self.call, self.columns, self.row = call, columns, row
        self.declared: Mapping[str, str] = {}
        self.kept: Array | slice = slice(None)  # the rows that are returned
        self._columns: dict[str, Column] = {}

    def declare(self, kinds: Mapping[str, str] | None) -> None:
        """Set the types of columns by their names."""
        for name, kind in (kinds or {}).items():
            self._check_name("column_types", name)
            check_choice(f"{self.call}(column_types[{name!r}])", kind, KINDS)
        self.declared = kinds or {}

    def keep_complete(self, used: Iterable[tuple[str, str]], missing: str) -> int:
        """Keep the rows that have a value in all columns that are used. Return the number of rows left out.

        Args:
            used: Pairs of an argument, for errors, and the name of a column.
            missing: `"raise"` raises `ValueError` for the first gap, `"skip"` leaves out rows with gaps.
        """
        complete = np.array(True)
        for argument, name in used:
            gaps = self._column(argument, name).missing
            if gaps.any() and missing == "raise":
                raise ValueError(
                    f"{self.call}: {argument}={name!r} has no value in {self.row(int(gaps.argmax()))}, and in "
                    f"{gaps.sum()} of {len(gaps)} rows. Fill the gaps, or leave these rows out by missing='skip'."
                )
            complete = complete & ~gaps
        self.kept = np.flatnonzero(complete)
        if not len(self.kept):
            raise ValueError(f"{self.call}: no row of table has a value in every column that is used.")
        return complete.size - len(self.kept)

    def numbers(self, argument: str, name: str) -> Array:
        """Return a column as float64, [rows]. A date is its number of days since 1970-01-01."""
        kind, values, missing = self._column(argument, name)
        if kind == "date":
            return ((values - np.datetime64(0, "s")) / np.timedelta64(1, "D"))[self.kept]
        if kind == "text":
            values = self._converted(argument, name, "float").values
        finite = missing | np.isfinite(values.astype(np.float64))
        if not finite.all():
            self._raise(argument, name, "a finite number", int(finite.argmin()))
        return values[self.kept].astype(np.float64)

    def ids(self, argument: str, name: str) -> Array:
        """Return a column as int64, float64 or text, [rows]. A date is text in ISO 8601."""
        kind, values, _ = self._column(argument, name)
        values = values[self.kept]
        return np.datetime_as_string(values, unit="auto").astype(object) if kind == "date" else values

    def _check_name(self, argument: str, name: object) -> None:
        if name not in self.columns:
            raise ValueError(
                f"{self.call}: {argument}={name!r} is none of the columns {', '.join(map(repr, self.columns))}."
            )

    def _column(self, argument: str, name: str) -> Column:
        self._check_name(argument, name)
        if name not in self._columns:
            self._columns[name] = self._converted(argument, name, self.declared.get(name))
        return self._columns[name]

    def _converted(self, argument: str, name: str, wanted: str | None) -> Column:
        """Return a column in a type, or in the type that its entries have."""
        given = self.columns[name]
        if given.dtype.kind in "biufM" and given.dtype != np.uint64:
            kind = {"f": "float", "M": "date"}.get(given.dtype.kind, "integer")
            if wanted not in (None, kind):
                self._raise(argument, name, KINDS[wanted].example, 0)
            return Column(kind, given if kind == "date" else given.astype(KINDS[kind].dtype), given != given)
        entries = [entry.strip() if isinstance(entry, str) else entry for entry in given.tolist()]
        words = {""} if self.declared.get(name) == "text" else MISSING
        missing = np.array([is_missing(entry, words) for entry in entries])
        present = np.flatnonzero(~missing)
        types = {type(entries[row]) for row in present}
        kind = wanted or _kind_of(types) or _kind_of({type(entries[present[0]])}) or "text"
        is_text = _kind_of(types) == "text"
        values = np.full(len(entries), "" if kind == "text" else 0, KINDS[kind].dtype)
        for row in present.tolist():
            if not _put(values, row, KINDS[kind], entries[row], is_text):
                self._raise(argument, name, KINDS[kind].example, row)
        return Column(kind, values, missing)

    def _raise(self, argument: str, name: str, expected: str, row: int) -> NoReturn:
        entry = self.columns[name][row : row + 1].tolist()[0]
        hint = {"x": f" For ids pass x={{'argument': {name!r}}}.", "y": " For classes pass classify=True."}
        raise ValueError(
            f"{self.call}: {argument}={name!r} must hold {expected} in each row, got {entry!r} in {self.row(row)}."
            f"{hint.get(argument, '') if isinstance(entry, str) else ''}"
        )


def is_missing(entry: Any, words: Container[str] = ("",)) -> bool:
    """Return whether an entry is None, NaN, NaT, the NA of pandas, or text that is one of some words."""
    if isinstance(entry, str):
        return entry.strip().lower() in words
    if isinstance(entry, (float, np.floating, np.datetime64)):
        return bool(entry != entry)
    return entry is None or type(entry).__name__ in ("NAType", "NaTType")


def _kind_of(types: Collection[type]) -> str | None:
    """Return the name of the first kind of column that accepts all these types, or None."""
    return next((name for name, kind in KINDS.items() if all(issubclass(t, kind.types) for t in types)), None)


def _put(values: Array, row: int, kind: Kind, entry: Any, is_text: bool) -> bool:
    """Store an entry in an array. Return whether the entry has the type, or is text that can be parsed."""
    with contextlib.suppress(ValueError, OverflowError):  # no such day, or too large for int64
        if is_text and kind.dtype != "object":
            entry = kind.parse(entry) if kind.pattern.fullmatch(entry) else None
        if isinstance(entry, kind.types) and getattr(entry, "tzinfo", None) is None:
            values[row] = entry
            return True
    return False


def read_table(call: str, table: Any) -> Table:
    """Return the columns of a table: the path of a CSV file, a mapping or a data frame.

    Raises:
        ValueError: The file does not exist or is not a table, columns differ in length, or there are no rows.
        TypeError: `table` is something else.
    """
    if isinstance(table, (str, os.PathLike)):
        return read_csv(call, table)
    names = table if is_mapping(table) else getattr(table, "columns", None)
    if names is None:
        raise TypeError(
            f"{call}: table must be the path of a CSV file, a dict of columns or a data frame, got "
            f"{type(table).__name__}."
        )
    names = list(names)
    _check_names(call, "table", [str(name) for name in names])
    columns = {str(name): _array(table[name]) for name in names}
    shapes = {name: column.shape for name, column in columns.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 1:
        raise ValueError(f"{call}: the columns of table must be of one length, [rows], got {shapes}.")
    if not len(next(iter(columns.values()))):
        raise ValueError(f"{call}: table has no rows.")
    return Table(call, columns)


def read_csv(call: str, path: str | os.PathLike[str]) -> Table:
    """Return the columns of a CSV file in UTF-8. Its first line has their names. Blank lines are left out."""
    found = find_path(call, path)
    try:
        with found.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            lines = [
                (reader.line_num, fields) for fields in reader if len(fields) > 1 or "".join(fields).strip()
            ]
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise ValueError(f"{call}: {found} is not a CSV file in UTF-8: {error}.") from error
    header = [name.strip() for name in lines[0][1]] if lines else []
    _check_names(call, str(found), [name for name in header if name])
    if len(lines) == 1:
        raise ValueError(f"{call}: {found} has no rows.")
    for number, fields in lines:
        if len(fields) != len(header):
            refuse(f"{call}: line {number} of {found}", f"{len(header)} fields", len(fields))
    columns = {name: _array([fields[k] for _, fields in lines[1:]]) for k, name in enumerate(header) if name}
    return Table(call, columns, lambda row: f"line {lines[row + 1][0]} of {found}")


def _array(column: Any) -> Array:
    if isinstance(column, Tensor):
        return column.detach().cpu().numpy()
    return np.fromiter(column, object) if is_list_or_tuple(column) else np.asarray(column)


def _check_names(call: str, where: str, names: list[str]) -> None:
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{call}: {where} must have columns with different names, got {names}.")
