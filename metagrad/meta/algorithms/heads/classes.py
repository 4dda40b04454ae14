"""The classes of a batch of tasks: how many there are, and whether every task has support examples of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.core.structured import Nested, restored
from metagrad.meta.objective.task_loss import LabelBounds, LossFn, ignored_label
from metagrad.meta.objective.tasks import Tasks

PADDING = -100
"""The label of padding, which fills up tasks of fewer support examples."""


class Classes(NamedTuple):
    """The classes of a batch of tasks.

    Attributes:
        ways: The most classes of a task.
        differ: Whether a task has fewer.
        is_padded: Whether a support or a query example is padding.
    """

    ways: int
    differ: bool
    is_padded: bool

    @property
    def labels(self) -> LabelBounds:
        """The bounds of the labels."""
        return LabelBounds(0, self.ways - 1, self.is_padded)


def read_classes(call: str, tasks: Tasks, loss_fn: LossFn) -> Classes:
    """Read the classes; refuse invalid labels, and classes of which a task has no support example."""
    y = tasks.support_y
    if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype == torch.bool or y.ndim != 2:
        raise TypeError(
            f"{call}: support.y must be the classes of the support examples, integers [tasks, shots], got "
            f"{described(y)}."
        )
    y = y.long()
    is_padding = y == PADDING
    counts = torch.where(is_padding, -1, y).amax(1) + 1
    lowest, fewest, ways = torch.stack(
        [torch.where(is_padding, 0, y).min(), counts.min(), counts.max()]
    ).tolist()
    if lowest < 0:
        raise ValueError(
            f"{call}: classes must be 0 or more, or {PADDING} for padding, support.y has {lowest}. Relabel them."
        )
    if fewest == 0:
        raise ValueError(f"{call}: task {int(counts.argmin())} has no support example that is no padding.")
    present = one_hot(y, ways).any(1)
    lacking = ~present & (torch.arange(ways, device=y.device) < counts.unsqueeze(1))
    unknown, is_ignored = _queries(tasks.query_y, loss_fn, present)
    flags = torch.stack([lacking.any(), unknown.any(), is_padding.any() | is_ignored.any()]).tolist()
    if flags[0]:
        task, label = (int(i) for i in lacking.nonzero()[0])
        raise ValueError(
            f"{call}: a task needs support examples of each of its classes, from 0 on, but task {task} has none of "
            f"class {label} (both count from 0). Relabel its classes, or sample every class."
        )
    if flags[1]:
        task, example = (int(i) for i in unknown.nonzero()[0])
        assert isinstance(tasks.query_y, Tensor)
        raise ValueError(
            f"{call}: query example {example} of task {task} is of class {int(tasks.query_y[task, example])}, of "
            "which the task has no support example (all count from 0)."
        )
    return Classes(ways, fewest < ways, flags[2])


def _queries(y: Nested | None, loss_fn: LossFn, present: Tensor) -> tuple[Tensor, Tensor]:
    """Say which query labels are no class of their task, and which the loss ignores, where it takes labels."""
    ignored = ignored_label(loss_fn)
    if ignored is None or not isinstance(y, Tensor) or y.is_floating_point() or y.ndim != 2:
        return present.new_zeros(()), present.new_zeros(())
    y = y.long()
    is_known = (one_hot(y, present.shape[1]) & present.unsqueeze(1)).any(2)
    return ~is_known & (y != ignored), y == ignored


def one_hot(y: Tensor, ways: int) -> Tensor:
    """Return one-hot vectors ``[tasks, shots, ways]``, bool; zeros for padding."""
    return y.unsqueeze(-1) == torch.arange(ways, device=y.device)


def described(value: object) -> str:
    """Describe for an error what came instead of a tensor of some kind."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(restored(value)).__name__  # type: ignore[arg-type]
