"""Tasks made of the rows of a table, of which a column says to which task a row belongs."""

from __future__ import annotations

import csv
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from metagrad.core._torch import from_numpy
from metagrad.core.checks import check_choice, is_mapping
from metagrad.core.tree import tree_map
from metagrad.tasks._checks import check_counts, check_float_dtype, check_generator
from metagrad.tasks._data_root import find_path
from metagrad.tasks._groups import Groups
from metagrad.tasks._splits import choose_split, split_name
from metagrad.tasks.batch import Batch, Examples

if TYPE_CHECKING:
    from torch import Tensor


Inputs = str | Sequence[str] | Mapping[str, str | Sequence[str]]


class Tabular:
    r"""Predict a column of a table from others, each task from a few rows that share a value of a third.

    The task column says which rows belong together: the user of a rating, the subject of a measurement. A task
    of a batch is one value of it, drawn with equal probability, and `shots + queries` of its rows, drawn without
    replacement. Tasks are drawn independently, so a batch may have one twice.

    Args:
        table: The path of a CSV file, also relative to `$METAGRAD_DATA`; a mapping from names to columns; or
            a data frame.
        task_column: The column whose values are the tasks.
        x: What a model gets. A list of columns of numbers makes [tasks, rows, columns] of floating type. The name of
            one column makes [tasks, rows]: ids, where it holds integers or text, which is numbered in sorted
            order. A mapping from the names of a model's arguments to such makes a dict of them.
        y: The column to predict: [tasks, rows, 1] of floating type, or classes.
        shots: Rows of a task to adapt to.
        queries: Rows of a task to be evaluated on.
        classify: Whether y are classes, [tasks, rows] int64, numbered in sorted order.
        standardize: Whether columns in lists, and y if it is a number, are shifted and scaled to mean 0 and
            variance 1 over the rows of the training tasks, or without a split of the tasks given.
        tasks: Values of the task column to use; or lists of them by the name of the split; None is all.
        split: The split that tasks are drawn from. Where nobody has split them, 64, 16 and 20 % are dealt out to
            `"train"`, `"validation"` and `"test"`, always the same ones.
        on_small: What becomes of tasks that have too few rows: `"raise"` names them, `"skip"` leaves them out.
        device: Where the table is kept and tasks are drawn; None is torch's default device.
        dtype: Floating-point type; None is torch's default type.

    Attributes:
        tasks: The values of the task column that tasks are drawn from.
        skipped: Those that were left out since they have too few rows.
        categories: The sorted values of each column that is numbered: number k stands for `categories[name][k]`.

    Raises:
        ValueError: For a column that is not there, has gaps or the wrong type, for tasks that are not there or too
            small.
        TypeError: For a table of another kind.

    Examples:
        >>> table = {"who": [1, 1, 1, 2, 2, 2], "age": [1, 2, 3, 1, 2, 3], "size": [3, 5, 7, 2, 3, 4]}
        >>> boys = Tabular(table, task_column="who", x=["age"], y="size", shots=2, queries=1)
        >>> batch = boys.sample(10, generator=torch.Generator().manual_seed(0))
        >>> batch.support.x.shape, batch.query.y.shape
        (torch.Size([10, 2, 1]), torch.Size([10, 1, 1]))
    """

    def __init__(
        self,
        table: str | os.PathLike[str] | Mapping[str, Any] | Any,
        task_column: str,
        x: Inputs,
        y: str,
        shots: int = 5,
        queries: int = 5,
        *,
        classify: bool = False,
        standardize: bool = False,
        tasks: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
        split: str | None = None,
        on_small: str = "raise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_counts("Tabular", {"shots": shots, "queries": queries})
        check_choice("Tabular(on_small)", on_small, ("raise", "skip"))
        self.task_column = task_column
        self.shots = shots
        self.queries = queries
        self.classify = classify
        self.split = split
        self.device: torch.device = torch.get_default_device() if device is None else torch.device(device)
        self.dtype: torch.dtype = torch.get_default_dtype() if dtype is None else dtype
        check_float_dtype("Tabular", self.dtype)
        columns = read_columns("Tabular", table)
        self.categories: dict[str, list[Any]] = {}
        known, codes = np.unique(
            column_of("Tabular", "task_column", columns, task_column), return_inverse=True
        )
        names = known.tolist()
        self._choose_tasks(names, codes, tasks, on_small)
        rows = self._training_rows(names, codes, tasks) if standardize else None
        self._x = self._inputs(columns, x, rows)
        self._y = self._targets(columns, y, rows)

    @property
    def protocol_description(self) -> str:
        """What a result must be printed with to be comparable."""
        split = "" if self.split is None else f" of the {self.split} split"
        return (
            f"Tabular tasks by {self.task_column!r}, {self.shots} support and {self.queries} query rows, "
            f"{len(self.tasks)} tasks{split}"
        )

    def sample(self, num_tasks: int, *, generator: torch.Generator | None = None) -> Batch:
        """Draw tasks.

        Args:
            num_tasks: Number of tasks.
            generator: Source of the random numbers, on the device of the tasks; None is torch's global one.

        Returns:
            A batch of `shots` support and `queries` query rows a task. No row is in both.

        Raises:
            ValueError: When num_tasks is below one, or the generator is on another device.
        """
        check_counts("Tabular.sample", {"num_tasks": num_tasks})
        check_generator("Tabular.sample", generator, self.device)
        tasks = torch.randint(len(self.tasks), (num_tasks,), generator=generator, device=self.device)
        rows = self._groups.draw_members(tasks, self.shots + self.queries, generator)
        return Batch(*(self._examples(part) for part in rows.split_with_sizes([self.shots, self.queries], 1)))

    def _examples(self, rows: Tensor) -> Examples:
        return Examples(tree_map(lambda column: column[rows], self._x), self._y[rows])

    def _choose_tasks(self, names: list[Hashable], codes: np.ndarray, wanted: Any, on_small: str) -> None:
        needed = self.shots + self.queries
        chosen = choose_split("Tabular", "tasks", names, wanted, self.split)
        counts = dict(zip(names, np.bincount(codes).tolist(), strict=True))
        self.skipped: list[Hashable] = [name for name in chosen if counts[name] < needed]
        self.tasks: list[Hashable] = [name for name in chosen if counts[name] >= needed]
        if (self.skipped and on_small == "raise") or not self.tasks:
            described = ", ".join(f"{name!r} has {counts[name]}" for name in self.skipped[:5])
            raise ValueError(
                f"Tabular: a task must have shots + queries = {needed} rows, and {len(self.skipped)} of "
                f"{len(chosen)} have fewer: {described}{', ...' if len(self.skipped) > 5 else ''}. Ask for fewer, "
                "choose others by tasks=, or pass on_small='skip'."
            )
        numbers = {name: number for number, name in enumerate(self.tasks)}
        of_names = np.array([numbers.get(name, -1) for name in names])
        self._groups = Groups(from_numpy(of_names[codes]), len(self.tasks), self.device)

    def _training_rows(self, names: list[Hashable], codes: np.ndarray, wanted: Any) -> np.ndarray:
        """Return which rows mean and variance are of: those of training tasks, as no others may be looked at."""
        has_training = self.split is not None and (
            not is_mapping(wanted) or "train" in map(split_name, wanted)
        )
        split = "train" if has_training else self.split
        training = set(choose_split("Tabular", "tasks", names, wanted, split))
        return np.array([name in training for name in names])[codes]

    def _inputs(self, columns: Columns, x: Inputs, rows: np.ndarray | None) -> Tensor | dict[str, Tensor]:
        if isinstance(x, Mapping):
            return {name: self._input(columns, part, rows) for name, part in x.items()}
        return self._input(columns, x, rows)

    def _input(self, columns: Columns, names: str | Sequence[str], rows: np.ndarray | None) -> Tensor:
        if isinstance(names, str):
            column = column_of("Tabular", "x", columns, names)
            return self._tensor(self._numbered(names, column) if column.dtype.kind == "U" else column)
        if not names:
            raise ValueError("Tabular: x must name a column at least, got an empty list.")
        numbers = [_numbers("x", name, column_of("Tabular", "x", columns, name)) for name in names]
        return self._tensor(_standardized(np.stack(numbers, 1), rows))

    def _targets(self, columns: Columns, y: str, rows: np.ndarray | None) -> Tensor:
        column = column_of("Tabular", "y", columns, y)
        if self.classify:
            return self._tensor(self._numbered(y, column))
        return self._tensor(_standardized(_numbers("y", y, column)[:, None], rows))

    def _numbered(self, name: str, column: np.ndarray) -> np.ndarray:
        values, codes = np.unique(column, return_inverse=True)
        self.categories[name] = values.tolist()
        return np.ravel(codes)

    def _tensor(self, column: np.ndarray) -> Tensor:
        values = from_numpy(column)
        return values.to(device=self.device, dtype=self.dtype if values.is_floating_point() else None)


def _numbers(argument: str, name: str, column: np.ndarray) -> np.ndarray:
    if column.dtype.kind == "U":
        remedy = (
            "pass classify=True for classes"
            if argument == "y"
            else f"pass x={{'argument': {name!r}}} for ids, or one-hot columns"
        )
        raise ValueError(f"Tabular: the column {argument}={name!r} is text, and must hold numbers; {remedy}.")
    return column.astype(np.float64)


def _standardized(values: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
    """Shift and scale columns to mean 0 and variance 1 over some of the rows; constant ones are shifted alone."""
    if rows is None:
        return values
    spread = values[rows].std(0)
    return (values - values[rows].mean(0)) / np.where(spread > 0, spread, 1)


Columns = dict[str, "np.ndarray[Any, Any]"]

MISSING = {"", "na", "nan", "null", "none"}  # of a file, whatever the case


def read_columns(call: str, table: Any) -> Columns:
    """Return the columns of a table: a path of a CSV file, a mapping or a data frame.

    Raises:
        ValueError: The file is not there or not such a table, columns differ in length, or there are no rows.
        TypeError: It is something else.
    """
    columns: Columns
    if isinstance(table, str) or hasattr(table, "__fspath__"):
        columns = read_csv(call, table)
    elif is_mapping(table):
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
