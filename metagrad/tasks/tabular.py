"""Tasks made of the rows of a table. One column names the task of each row."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from metagrad.core._torch import from_numpy
from metagrad.core.checks import check_choice, check_type, is_mapping
from metagrad.core.tree import tree_map
from metagrad.tasks._checks import check_counts, check_float_dtype, check_generator
from metagrad.tasks._columns import Table, read_table
from metagrad.tasks._groups import Groups, choose_split, split_name
from metagrad.tasks.batch import Batch, Examples

if TYPE_CHECKING:
    from torch import Tensor


Inputs = str | Sequence[str] | Mapping[str, str | Sequence[str]]


class Tabular:
    r"""Predict a column of a table from other columns. Rows with the same value in a third column form a task.

    The task column says which rows belong together, for example the user of a rating or the subject of a
    measurement. A task of a batch is a random value of this column with `shots + queries` random rows that have the
    value. Values have equal probability, and rows are drawn without replacement. Tasks are drawn independently, so a
    batch may contain a task twice.

    **Types.** Entries of a mapping or a data frame keep their type. The fields of a CSV file are text, without the
    white space around them, whatever they look like: the ids `007`, `7` and `1_1` are three tasks.

    | use of a column | allowed entries |
    | --- | --- |
    | in a list in `x`, or as `y` | numbers, dates (in days since 1970-01-01), or text such as `-1.5e3` |
    | as `task_column`, as `x` by its name, or as `y` with `classify=True` | integers, floats, dates, or text |
    | declared in `column_types` | values of that type, or text that is parsed as that type |

    A value is missing if it is None, NaN, empty, or one of the words NA, N/A, NaN, NaT, null and None in any case.
    In a column that is declared as text only empty fields are missing.

    Args:
        table: The path of a CSV file, a mapping from names to columns, or a data frame. The path may be relative to
            `$METAGRAD_DATA`.
        task_column: The column whose values are the tasks.
        x: Inputs of the model. A list of columns gives a floating-point tensor [tasks, rows, columns]. The name of
            one column gives [tasks, rows]: text is numbered in sorted order, numbers stay as they are. A mapping
            from argument names of the model to either of these gives a dict of tensors.
        y: The column to predict, floating-point [tasks, rows, 1].
        shots: Number of support rows of a task.
        queries: Number of query rows of a task.
        classify: True if y holds classes. They are numbered in sorted order, int64 [tasks, rows].
        standardize: True to shift and scale the columns in lists to mean 0 and variance 1 over the rows of the
            training tasks. This includes y if it is a number.
        tasks: Values of the task column to use, or lists of values by the name of the split. None uses all.
        split: The split that tasks are drawn from. Without lists in `tasks`, 64, 16 and 20 % of the tasks form
            `"train"`, `"validation"` and `"test"`, which are the same in every call.
        on_small: `"raise"` raises an error if a task has too few rows, `"skip"` leaves the task out.
        missing: `"raise"` raises an error if a value is missing in a column that is used, `"skip"` leaves the row
            out.
        column_types: Types of columns by name: `"integer"`, `"float"`, `"date"` (such as `2024-03-01`) or `"text"`.
        device: Device of the table. None means torch's default device.
        dtype: Floating-point type. None means torch's default type.

    Attributes:
        tasks: Values of the task column that tasks are drawn from.
        skipped: Values of the task column that were left out because they have too few rows.
        num_missing: Number of rows that were left out because a value is missing.
        categories: Sorted values of each column that is numbered. Number k stands for `categories[name][k]`.

    Raises:
        ValueError: A column does not exist, has gaps or the wrong type, or a task does not exist or is too small.
        TypeError: `table` is of another type.

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
        missing: str = "raise",
        column_types: Mapping[str, str] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_counts("Tabular", {"shots": shots, "queries": queries})
        check_type("Tabular(..., task_column)", task_column, str)
        check_type("Tabular(..., x)", x, str, list, tuple, Mapping)
        check_type("Tabular(..., y)", y, str)
        check_choice("Tabular(on_small)", on_small, ("raise", "skip"))
        check_choice("Tabular(missing)", missing, ("raise", "skip"))
        self.task_column = task_column
        self.shots = shots
        self.queries = queries
        self.classify = classify
        self.split = split
        self.device: torch.device = torch.get_default_device() if device is None else torch.device(device)
        self.dtype: torch.dtype = torch.get_default_dtype() if dtype is None else dtype
        check_float_dtype("Tabular", self.dtype)
        columns = read_table("Tabular", table)
        columns.declare(column_types)
        used = [("task_column", task_column), ("y", y), *(("x", name) for name in _names_in(x))]
        self.num_missing: int = columns.keep_complete(used, missing)
        self.categories: dict[str, list[Any]] = {}
        known, codes = np.unique(columns.ids("task_column", task_column), return_inverse=True)
        names = known.tolist()
        self._choose_tasks(names, codes, tasks, on_small)
        rows = self._training_rows(names, codes, tasks) if standardize else None
        self._x = self._inputs(columns, x, rows)
        if classify:
            self._y = self._numbered(y, columns.ids("y", y))
        else:
            self._y = self._numbers(columns, "y", [y], rows)

    def __repr__(self) -> str:
        return f"<{self.protocol_description}>"

    @property
    def protocol_description(self) -> str:
        """Description of the tasks. Print it next to a result, so that others can compare it."""
        split = "" if self.split is None else f" of the {self.split} split"
        return (
            f"Tabular tasks by {self.task_column!r}, {self.shots} support and {self.queries} query rows, "
            f"{len(self.tasks)} tasks{split}"
        )

    def sample(self, num_tasks: int, *, generator: torch.Generator | None = None) -> Batch:
        """Draw tasks.

        Args:
            num_tasks: Number of tasks.
            generator: Source of random numbers on the device of the tasks. None means torch's global generator.

        Returns:
            A batch of `shots` support rows and `queries` query rows per task. No row is in both support and query.

        Raises:
            ValueError: num_tasks is below one, or the generator is on another device.
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
        """Return which rows give mean and variance: the rows of the training tasks, if tasks are split."""
        has_training = self.split is not None and (
            not is_mapping(wanted) or "train" in map(split_name, wanted)
        )
        split = "train" if has_training else self.split
        training = set(choose_split("Tabular", "tasks", names, wanted, split))
        return np.array([name in training for name in names])[codes]

    def _inputs(self, table: Table, x: Inputs, rows: np.ndarray | None) -> Tensor | dict[str, Tensor]:
        if isinstance(x, Mapping):
            return {name: self._input(table, part, rows) for name, part in x.items()}
        return self._input(table, x, rows)

    def _input(self, table: Table, names: str | Sequence[str], rows: np.ndarray | None) -> Tensor:
        if not isinstance(names, str):
            return self._numbers(table, "x", names, rows)
        values = table.ids("x", names)
        return self._numbered(names, values) if values.dtype.kind == "O" else self._tensor(values)

    def _numbers(self, table: Table, argument: str, names: Sequence[str], rows: np.ndarray | None) -> Tensor:
        """Return columns of numbers. With `rows`, they are scaled to mean 0 and variance 1 over these rows."""
        values = np.stack([table.numbers(argument, name) for name in names], 1)
        if rows is not None:
            spread = values[rows].std(0)
            values = (values - values[rows].mean(0)) / np.where(spread > 0, spread, 1)
        return self._tensor(values)

    def _numbered(self, name: str, column: np.ndarray) -> Tensor:
        """Return the position of each value among the sorted values."""
        values, codes = np.unique(column, return_inverse=True)
        self.categories[name] = values.tolist()
        return self._tensor(np.ravel(codes))

    def _tensor(self, column: np.ndarray) -> Tensor:
        values = from_numpy(column)
        return values.to(device=self.device, dtype=self.dtype if values.is_floating_point() else None)


def _names_in(x: Inputs) -> list[str]:
    """Return the names of the input columns. Raise `ValueError` if `x` has no columns."""
    names: list[str] = []
    for part in x.values() if isinstance(x, Mapping) else [x]:
        names += [part] if isinstance(part, str) else list(part)
        if not part:
            raise ValueError(f"Tabular: x must name at least one column, got {x!r}.")
    return names
