"""What MAML asks of its arguments, its batches and its losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from metagrad.autograd.compile.compiled import CompileOptions
from metagrad.core.budget import Memory, checked_memory
from metagrad.core.transforms import is_on_the_tape, is_transformed
from metagrad.core.tree import tree_leaves
from metagrad.meta.structured import Nested, Structured, arguments
from metagrad.optim.rules import Params


class ExamplesLike(Protocol):
    """Inputs and targets with a leading task axis, such as :class:`metagrad.tasks.Examples`."""

    @property
    def x(self) -> Any:
        """Inputs ``[tasks, examples, ...]``, or a dict or a tuple of the arguments of the model."""
        ...

    @property
    def y(self) -> Any:
        """Targets ``[tasks, examples, ...]``."""
        ...


class BatchLike(Protocol):
    """Tasks to adapt on and to be judged on, such as :class:`metagrad.tasks.Batch`."""

    @property
    def support(self) -> ExamplesLike:
        """What a task is adapted on."""
        ...

    @property
    def query(self) -> ExamplesLike:
        """What the adapted model is judged on."""
        ...


def check_steps(call: str, steps: object) -> None:
    """Refuse a number of steps that is none."""
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise TypeError(f"{call}: steps must be an int, got {type(steps).__name__}.")
    if steps < 0:
        raise ValueError(f"{call}: steps must be 0 or more, got {steps}.")


def check_arguments(model: object, steps: int, order: int, task_chunk: int | None) -> None:
    """Refuse arguments of MAML that mean nothing."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"MAML(model, ...): model must be a torch.nn.Module, got {type(model).__name__}.")
    check_steps("MAML(..., steps)", steps)
    if order not in (1, 2):
        raise ValueError(f"MAML(..., order): expected 1 (first-order MAML) or 2, got {order!r}.")
    if task_chunk is not None and (not isinstance(task_chunk, int) or task_chunk < 1):
        raise ValueError(
            f"MAML(..., task_chunk): expected None (all tasks together) or an int of 1 or more, got {task_chunk!r}."
        )


def check_adapted(params: Params) -> None:
    """Refuse a model of which nothing can be adapted."""
    if not params:
        raise ValueError(
            "MAML(model, ...): no parameter of the model requires grad, so nothing can be adapted."
        )


def check_ends(truncate: int | None, tolerance: float | None) -> None:
    """Refuse numbers of steps and norms that mean nothing."""
    if truncate is not None and (not isinstance(truncate, int) or isinstance(truncate, bool) or truncate < 1):
        raise ValueError(
            f"MAML(..., truncate): expected None (all steps) or an int of 1 or more, got {truncate!r}. "
            "For none at all, pass order=1."
        )
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"MAML(..., tolerance): expected None or a norm of at least 0, got {tolerance!r}.")


def check_memory(
    memory: Memory | Literal["block"], options: CompileOptions | None, sparse: Sequence[str]
) -> None:
    """Refuse what cannot be kept, at all or beside other arguments."""
    if memory != "block":
        checked_memory("MAML(...)", memory)
    elif sparse:
        raise ValueError('MAML(..., memory="block"): tables cannot be replaced by rows within a block.')
    if options is not None and options.whole and memory != "full":
        raise ValueError(f'MAML(..., compile="whole"): one graph keeps everything, got memory={memory!r}.')


def refuse_transforms(params: list[Tensor]) -> None:
    """Refuse torch.func transforms in which gradients of the parameters cannot be taken on the tape."""
    if is_transformed() and not is_on_the_tape(params):
        raise RuntimeError(
            "MAML(batch): of torch.func, reverse mode (grad, vjp, jacrev) with respect to all parameters that are "
            "adapted is taken, as in grad(lambda p: functional_call(maml, p, (batch,)).loss)(params). Instead of "
            "vmap, call it batch by batch; instead of jvp, or for a part of the parameters, differentiate "
            "maml(batch).loss by torch.autograd.grad."
        )


class Pair(NamedTuple):
    """Inputs and targets of all tasks, taken apart."""

    x: Nested
    y: Nested


def read_batch(batch: BatchLike | Sequence[Any] | Mapping[str, Any]) -> tuple[Pair, Pair]:
    """Return support and query examples of a batch in any of its forms; refuse what does not fit together."""
    support, query = _two(batch, ("support", "query"), "MAML(batch): the batch")
    parts = {
        "support": _read(support, "MAML(batch)", "support"),
        "query": _read(query, "MAML(batch)", "query"),
    }
    _check_tasks("MAML(batch)", parts)
    return parts["support"], parts["query"]


def read_support(support: ExamplesLike | Sequence[Any] | Mapping[str, Any]) -> Pair:
    """Return the examples to adapt to, likewise."""
    pair = _read(support, "MAML.adapt(support)", "support")
    _check_tasks("MAML.adapt(support)", {"support": pair})
    return pair


def _two(value: Any, names: tuple[str, str], what: str) -> tuple[Any, Any]:
    """Return the two parts of a pair: its attributes, the entries of a dict, or the items of a tuple or a list."""
    if all(hasattr(value, name) for name in names):
        return getattr(value, names[0]), getattr(value, names[1])
    if isinstance(value, Mapping) and set(value) == set(names):
        return value[names[0]], value[names[1]]
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return value[0], value[1]
    first, second = names
    raise TypeError(
        f"{what} must be a pair ({first}, {second}), a dict with these two keys, or an object with these attributes, "
        f"got {_described(value)}."
    )


def _described(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)}"
    return f"a {type(value).__name__}{f' of {len(value)}' if isinstance(value, (tuple, list)) else ''}"


def _read(examples: Any, call: str, name: str) -> Pair:
    x, y = _two(examples, ("x", "y"), f"{call}: {name}")
    return Pair(arguments(x, f"{call}: {name}.x"), arguments(y, f"{call}: {name}.y"))


def _check_tasks(call: str, parts: dict[str, Pair]) -> None:
    """Refuse examples that are none, or that do not fit together."""
    sizes = {
        f"{name}.{field}": _sizes(call, f"{name}.{field}", getattr(parts[name], field))
        for name in parts
        for field in ("x", "y")
    }
    shapes = {what: shape for of_one in sizes.values() for what, shape in of_one.items()}
    if len({shape[0] for shape in shapes.values()}) > 1:
        raise ValueError(f"{call}: every part must have the same number of tasks in front, got {shapes}.")
    for name, pair in parts.items():
        if isinstance(pair.x, Tensor) and isinstance(pair.y, Tensor) and pair.x.shape[1] != pair.y.shape[1]:
            raise ValueError(
                f"{call}: {name}.x and {name}.y must have the same number of examples, got "
                f"{tuple(pair.x.shape)} and {tuple(pair.y.shape)}."
            )


def _sizes(call: str, name: str, value: Nested) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in inputs or targets, by their names."""
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
