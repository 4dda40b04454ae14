"""Batches of tasks: the accepted forms, and the tasks as one structure of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from metagrad.core.tree import Params, tree_flatten, tree_leaves, tree_map, tree_unflatten, widened
from metagrad.meta.objective.structured import Nested, Structured, arguments

ExamplesLike: TypeAlias = Any
"""Inputs and targets ``x`` and ``y`` with a task axis: attributes, the keys of a dict, or a pair."""

BatchLike: TypeAlias = Any
"""Support and query examples: the attributes ``support`` and ``query``, the keys of a dict, or a pair."""


class Tasks(NamedTuple):
    """A meta-batch: tensors ``[tasks, examples, ...]`` or nested values of tensors. One task has no task axis."""

    support_x: Nested
    support_y: Nested
    query_x: Nested | None = None
    query_y: Nested | None = None
    rows: Params = {}  # noqa: RUF012
    """Indices of the rows that the tasks use, ``[tasks, R]``, for each table."""
    noise: Params = {}  # noqa: RUF012
    """Random numbers of the tasks, ``[tasks, ...]``, by name."""

    @property
    def count(self) -> int:
        """The number of tasks."""
        return num_tasks(self.support_x)

    @property
    def device(self) -> torch.device:
        """The device of the tasks."""
        return _first_tensor(self.support_x).device

    @property
    def inputs(self) -> list[Nested]:
        """The inputs of the support examples, and of the query examples if there are any."""
        return [x for x in (self.support_x, self.query_x) if x is not None]

    @property
    def targets(self) -> list[Nested]:
        """The targets of the support examples, and of the query examples if there are any."""
        return [y for y in (self.support_y, self.query_y) if y is not None]

    @property
    def are_tensors(self) -> bool:
        """Whether inputs and targets are single tensors."""
        x, y, query_x, query_y, *_ = map(type, self)
        return Structured not in (x, y, query_x, query_y)

    def split(self, size: int) -> Iterator[Tasks]:
        """Yield parts of at most ``size`` tasks. If ``size`` is 1, yield single tasks without a task axis."""
        if size >= self.count > 1:
            yield self
            return
        for i in range(0, self.count, size):
            yield self.select(i if size == 1 else slice(i, i + size))

    def select(self, index: int | slice | Tensor) -> Tasks:
        """Return the selected tasks. An int selects one task without a task axis."""
        return tree_map(lambda tensor: None if tensor is None else tensor[index], self)


def read_batch(batch: BatchLike, call: str = "MAML(batch)") -> Tasks:
    """Return the tasks of a batch in any accepted form. Raise if the parts do not fit together."""
    support, query = _two(batch, ("support", "query"), f"{call}: the batch")
    tasks = Tasks(*read_examples(support, call, "support"), *read_examples(query, call, "query"))
    _check_tasks(call, tasks)
    return tasks


def read_support(support: ExamplesLike, call: str = "MAML.adapt(support)") -> Tasks:
    """Return tasks that have only support examples."""
    if hasattr(support, "support"):
        raise TypeError(f"{call}: expected the support examples, got a whole batch. Pass batch.support.")
    tasks = Tasks(*read_examples(support, call, "support"))
    _check_tasks(call, tasks)
    return tasks


def _two(value: Any, names: tuple[str, str], what: str) -> tuple[Any, Any]:
    """Return the two parts of a pair: attributes, entries of a dict, or items of a tuple or a list."""
    if all(hasattr(value, name) for name in names):
        return getattr(value, names[0]), getattr(value, names[1])
    if isinstance(value, Mapping) and set(value) == set(names):
        return value[names[0]], value[names[1]]
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return value[0], value[1]
    first, second = names
    raise TypeError(
        f"{what} must be a pair ({first}, {second}), a dict with these two keys, or an object with these attributes, "
        f"got {_described(value)}. Stack single tasks into tensors [tasks, examples, ...]."
    )


def _described(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)}"
    return f"a {type(value).__name__}{f' of {len(value)}' if isinstance(value, (tuple, list)) else ''}"


def read_examples(examples: Any, call: str, name: str) -> tuple[Nested, Nested]:
    """Return inputs and targets in any accepted form."""
    x, y = _two(examples, ("x", "y"), f"{call}: {name}")
    return arguments(x, f"{call}: {name}.x"), arguments(y, f"{call}: {name}.y")


def _check_tasks(call: str, tasks: Tasks) -> None:
    """Raise if a part is empty, or sizes do not match."""
    if _are_alike(tasks):
        return
    pairs = {"support": tasks[:2], "query": tasks[2:4]}
    named = {
        f"{name}.{field}": part
        for name, pair in pairs.items()
        for field, part in zip("xy", pair, strict=True)
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part in named.items():
        shapes |= {} if part is None else _sizes(call, name, part)
    if len({shape[0] for shape in shapes.values()}) > 1:
        raise ValueError(
            f"{call}: every part must have the same number of tasks in front, got {shapes}. Shapes are [tasks, "
            "examples, ...]. For a single task, use x.unsqueeze(0)."
        )
    for name, (x, y) in pairs.items():
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape[1] != y.shape[1]:
            raise ValueError(
                f"{call}: {name}.x and {name}.y must have the same number of examples, got {tuple(x.shape)} and "
                f"{tuple(y.shape)}. Shapes are [tasks, examples, ...]. For a single task, use x.unsqueeze(0)."
            )


def check_task_axis(model: nn.Module, tasks: Tasks, call: str = "MAML(batch)") -> None:
    """Raise if the inputs look like the examples of a single task: ``[examples, features]`` for a linear layer."""
    x, first = tasks.support_x, next((m for m in model.modules() if m._parameters), None)
    if not isinstance(x, Tensor) or x.ndim != 2 or not isinstance(first, nn.Linear):
        return
    if x.is_floating_point() and all(part.shape[1:] == (first.in_features,) for part in tasks.inputs):  # type: ignore[union-attr]
        raise ValueError(
            f"{call}: support.x is {tuple(x.shape)}, [tasks, examples] without an axis for the {first.in_features} "
            "features of the first layer. If this is one task, put a task axis in front of every tensor, "
            "x.unsqueeze(0). If every task has one example, use x.unsqueeze(1)."
        )


def _are_alike(tasks: Tasks) -> bool:
    """Return whether all parts are tensors with matching sizes."""
    if not tasks.are_tensors:
        return False
    shapes = [part.shape for part in tasks[:4] if part is not None]  # type: ignore[union-attr]
    return (
        all(len(shape) > 1 and 0 not in shape[:2] and shape[0] == shapes[0][0] for shape in shapes)
        and shapes[0][1] == shapes[1][1]
        and (len(shapes) < 4 or shapes[2][1] == shapes[3][1])
    )


def _sizes(call: str, name: str, value: Nested) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in inputs or targets, by name."""
    if isinstance(value, Tensor) and value.ndim < 2:
        raise ValueError(f"{call}: {name} must be [tasks, examples, ...], got shape {tuple(value.shape)}.")
    sizes = {}
    for path, tensor in zip(
        value.paths if isinstance(value, Structured) else [""], tree_leaves(value), strict=True
    ):
        shape = sizes[name + path] = tuple(tensor.shape)
        if not shape:
            raise ValueError(
                f"{call}: {name}{path} must be [tasks, ...], got a tensor without axes. What all tasks share is a "
                "number, or a buffer of the model."
            )
        if 0 in shape[:2]:
            raise ValueError(
                f"{call}: {name}{path} is empty, its shape is {shape}; give a task and an example."
            )
    return sizes


def num_tasks(value: Nested) -> int:
    """Return the length of the first axis."""
    return _first_tensor(value).shape[0]


def task_squares(values: Iterable[Tensor], num_axes: int) -> Tensor:
    """Return the sum of the squares of all elements. With ``num_axes=1``, return one sum for each task.

    Half precision is converted to float32, since squares overflow and underflow in float16.
    """
    wide = map(widened, values)
    return torch.stack([v.unsqueeze(-1).flatten(num_axes).square().sum(-1) for v in wide]).sum(0)


def _first_tensor(value: Nested) -> Tensor:
    return value if isinstance(value, Tensor) else tree_leaves(value)[0]


def concatenated(results: Sequence[Any]) -> Any:
    """Concatenate the results of parts of the tasks."""
    if len(results) == 1:
        return results[0]
    flat = [tree_flatten(result) for result in results]
    spec = flat[0][1]
    for number, (_, other) in enumerate(flat):
        if other != spec:
            raise ValueError(
                "MAML(batch): what the model returns must have the same structure and the same constants for every "
                f"task, but that of task {number} differs from that of task 0. Return what varies as a tensor."
            )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [None if column[0] is None else torch.cat(column) for column in columns]
    return tree_unflatten(joined, spec)


def stacked(results: Sequence[Any]) -> Any:
    """Stack the results of single tasks along a new task axis in front."""
    return concatenated([with_task_axis(result) for result in results])


def with_task_axis(result: Any) -> Any:
    """Put a task axis of length 1 in front of every tensor."""
    return tree_map(lambda tensor: tensor.unsqueeze(0), result)
