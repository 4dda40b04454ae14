"""What MAML asks of its arguments, its batches and its losses."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from metagrad.autograd.budget import Memory, checked_memory
from metagrad.autograd.compiled import Compile, checked_compile
from metagrad.meta.programs import Programs
from metagrad.meta.whole import WholePrograms


class ExamplesLike(Protocol):
    """Inputs and targets with a leading task axis, such as :class:`metagrad.tasks.Examples`."""

    @property
    def x(self) -> Tensor:
        """Inputs ``[tasks, examples, ...]``."""
        ...

    @property
    def y(self) -> Tensor:
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


def check_arguments(model: object, steps: int, order: int, memory: Memory, task_chunk: int | None) -> None:
    """Refuse arguments of MAML that mean nothing."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"MAML(model, ...): model must be a torch.nn.Module, got {type(model).__name__}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "MAML(model, ...): no parameter of the model requires grad, so nothing can be adapted."
        )
    check_steps("MAML(..., steps)", steps)
    if order not in (1, 2):
        raise ValueError(f"MAML(..., order): expected 1 (first-order MAML) or 2, got {order!r}.")
    checked_memory("MAML(...)", memory)
    if task_chunk is not None and (not isinstance(task_chunk, int) or task_chunk < 1):
        raise ValueError(
            f"MAML(..., task_chunk): expected None (all tasks together) or an int of 1 or more, got {task_chunk!r}."
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


def check_compile(compile: Compile, memory: Memory) -> Programs | None:
    """Refuse options that mean nothing; return what is to be compiled."""
    options = checked_compile("MAML(...)", compile)
    if options is None:
        return None
    if options.whole and memory != "full":
        raise ValueError(f'MAML(..., compile="whole"): one graph keeps everything, got memory={memory!r}.')
    return WholePrograms(options) if options.whole else Programs(options)


def check_batch(call: str, parts: dict[str, ExamplesLike]) -> None:
    """Refuse a batch that is empty, or whose parts do not fit together."""
    sizes = {}
    for name, examples in parts.items():
        for field in ("x", "y"):
            tensor = getattr(examples, field)
            shape = tuple(tensor.shape)
            if len(shape) < 2:
                raise ValueError(f"{call}: {name}.{field} must be [tasks, examples, ...], got shape {shape}.")
            if 0 in shape[:2]:
                raise ValueError(
                    f"{call}: {name}.{field} is empty, its shape is {shape}; give a task and an example."
                )
            sizes[f"{name}.{field}"] = shape
    if len({shape[0] for shape in sizes.values()}) > 1:
        raise ValueError(f"{call}: every part must have the same number of tasks in front, got {sizes}.")
    for name in parts:
        if sizes[f"{name}.x"][1] != sizes[f"{name}.y"][1]:
            raise ValueError(
                f"{call}: {name}.x and {name}.y must have the same number of examples, got "
                f"{sizes[f'{name}.x']} and {sizes[f'{name}.y']}."
            )
