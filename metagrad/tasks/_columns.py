"""Tables as columns of numbers and names."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from metagrad.tasks._data_root import find_path

Columns = dict[str, np.ndarray]

MISSING = {"", "na", "nan", "null", "none"}  # of a file, whatever the case


def read_columns(call: str, table: Any) -> Columns:
    """Return the columns of a table: a path of a CSV file, a mapping or a data frame.

    Raises:
        ValueError: The file is not there or not such a table, columns differ in length, or there are no rows.
        TypeError: It is something else.
    """
    if isinstance(table, (str, os.PathLike)):
        columns = read_csv(call, table)
    elif isinstance(table, Mapping):
        columns = {str(name): np.asarray(column) for name, column in table.items()}
    elif hasattr(table, "columns"):
        columns = {str(name): np.asarray(table[name]) for name in table.columns}
    else:
        raise TypeError(
            f"{call}: table must be the path of a CSV file, a dict of columns or a data frame, "
            f"got a {type(table).__name__}."
        )
    lengths = {name: column.shape for name, column in columns.items()}
    if len(set(lengths.values())) != 1 or len(next(iter(lengths.values()))) != 1:
        raise ValueError(f"{call}: the columns of table must be of one length, [rows], got {lengths}.")
    if not len(next(iter(columns.values()))):
        raise ValueError(f"{call}: table has no rows.")
    return {name: _plain(column) for name, column in columns.items()}


def read_csv(call: str, path: str | os.PathLike[str]) -> Columns:
    """Return the columns of a CSV file, which begins with their names; blank lines are left out."""
    found = find_path(call, path)
    try:
        with found.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            lines = [(reader.line_num, fields) for fields in reader if fields]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{call}: {found} is not a CSV file in UTF-8: {error}.") from error
    header, *rows = [fields for _, fields in lines] or [[]]
    names = [name for name in header if name]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"{call}: {found} must begin with the names of its columns, each once, got {header}."
        )
    for number, fields in lines:
        if len(fields) != len(header):
            raise ValueError(
                f"{call}: line {number} of {found} must have {len(header)} fields, got {len(fields)}."
            )
    return {name: _parsed([row[k] for row in rows]) for k, name in enumerate(header)}


def column_of(call: str, argument: str, columns: Columns, name: str) -> np.ndarray:
    """Return a column without missing values.

    Raises:
        ValueError: There is no column of that name, or values are missing.
    """
    if name not in columns:
        raise ValueError(
            f"{call}: {argument}={name!r} is none of the columns {', '.join(map(repr, columns))}."
        )
    column = columns[name]
    if column.dtype.kind == "f" and (missing := int((~np.isfinite(column)).sum())):
        raise ValueError(
            f"{call}: {missing} of {len(column)} rows have no finite value in {argument}={name!r}. Leave these rows "
            "out, or fill them."
        )
    return column


def _plain(column: np.ndarray) -> np.ndarray:
    """Return numbers as int64 or float64, and everything else as text."""
    if column.dtype.kind in "biu":
        return column.astype(np.int64)
    return column.astype(np.float64) if column.dtype.kind == "f" else column.astype(str)


def _parsed(fields: list[str]) -> np.ndarray:
    gaps = [field.strip().lower() in MISSING for field in fields]
    if not any(gaps) and _all(int, fields):
        return np.array([int(field) for field in fields])
    given = [field for field, gap in zip(fields, gaps, strict=True) if not gap]
    if given and _all(float, given):
        return np.array([np.nan if gap else float(field) for field, gap in zip(fields, gaps, strict=True)])
    return np.array(fields)


def _all(parse: type, fields: Iterable[str]) -> bool:
    try:
        for field in fields:
            parse(field)
    except ValueError:
        return False
    return True
