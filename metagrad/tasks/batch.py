"""Batches of tasks, each with support and query examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from metagrad.core.tree import tree_leaves, tree_map

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PADDING = -100  # the label of examples that are none; losses over classes ignore it by default


class Examples(NamedTuple):
    """Hold the inputs and targets of a batch of tasks.

    Tasks of unequal length are padded at their end: x with zeros, y with the label -100, which
    `F.cross_entropy` and `F.nll_loss` ignore, so that the loss of a padded task is that of the task alone.

    Args:
        x: Inputs, [tasks, examples, ...]; or a dict or tuple of the arguments of a model, tensors [tasks, ...].
        y: Targets, [tasks, examples, ...]: labels or real values; or a nesting of tensors [tasks, ...].

    Examples:
        >>> import torch
        >>> examples = Examples(x=torch.zeros(4, 10, 1), y=torch.zeros(4, 10, dtype=torch.int64))
        >>> moved = examples.to(dtype=torch.float64)
        >>> moved.x.dtype, moved.y.dtype
        (torch.float64, torch.int64)
        >>> Examples(x=torch.zeros(1, 3, 1), y=torch.tensor([[0, 1, -100]])).mask
        tensor([[ True,  True, False]])
    """

    x: Any
    y: Any

    @property
    def mask(self) -> Tensor:
        """Which examples are real and no padding, bool, of the shape of y, which must be one tensor."""
        if self.y.is_floating_point():
            return torch.ones_like(self.y, dtype=torch.bool)
        return self.y != PADDING

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Examples:
        """Return the examples on a device and in a floating-point type.

        Args:
            device: Where both tensors go; None leaves them where they are.
            dtype: Data type of the floating-point tensors; integer ones (labels, ids) keep theirs.

        Returns:
            New examples; a tensor that needs no change is not copied, and the copy of one in pinned memory
            does not wait.
        """

        def moved(part: object) -> object:
            if not isinstance(part, Tensor):
                return part
            dtype_of_part = dtype if part.is_floating_point() else None
            return part.to(device=device, dtype=dtype_of_part, non_blocking=part.is_pinned())

        return Examples(*tree_map(moved, tuple(self)))


class Batch(NamedTuple):
    """Hold a batch of tasks: the examples each adapts to, and those it is evaluated on.

    Args:
        support: The examples a task adapts to, each tensor [tasks, shots, ...].
        query: The examples its adapted parameters are evaluated on, each tensor [tasks, queries, ...].

    `len(batch)` is 2, as for any pair; the number of tasks is `batch.num_tasks`.

    Examples:
        >>> import torch
        >>> examples = Examples(x=torch.zeros(4, 10, 1), y=torch.zeros(4, 10, 1))
        >>> batch = Batch(support=examples, query=examples)
        >>> batch.num_tasks
        4
    """

    support: Examples
    query: Examples

    @property
    def num_tasks(self) -> int:
        """The length of the leading axis of every tensor."""
        return next(leaf for leaf in tree_leaves(self.support.x) if isinstance(leaf, Tensor)).shape[0]

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Batch:
        """Return the batch on a device and in a floating-point type; see `Examples.to`."""
        return Batch(*(examples.to(device=device, dtype=dtype) for examples in self))

    def select(self, tasks: slice) -> Batch:
        """Return some of the tasks; the tensors share memory with those of the batch."""

        def selected(part: object) -> object:
            return part[tasks] if isinstance(part, Tensor) else part

        return Batch(*(Examples(*tree_map(selected, tuple(examples))) for examples in self))

    def shard(self, group: ProcessGroup | None = None) -> Batch:
        """Return the share of this process: consecutive tasks, as many as every other process has, or one more.

        The loss of a share is a mean over its tasks. Gradients that are averaged with the numbers of tasks as
        weights, ``metagrad.distributed.average_gradients(maml, weight=share.num_tasks)``, are those of the whole
        batch. All processes must draw the same batch, by generators in the same state.

        Args:
            group: The processes; None is the default group, or, where there is none, this process alone, whose share
                is the whole batch.

        Raises:
            ValueError: There are fewer tasks than processes.

        Example:
            >>> batch = metagrad.tasks.Sinusoid().sample(4)
            >>> batch.shard().num_tasks
            4
        """
        rank, size = process_of(group)
        if self.num_tasks < size:
            raise ValueError(
                f"Batch.shard(): {self.num_tasks} tasks for {size} processes would leave some without a task. Draw "
                "at least as many tasks as there are processes."
            )
        return self.select(share_of(self.num_tasks, rank, size))


def process_of(group: ProcessGroup | None) -> tuple[int, int]:
    """Return the rank of this process in a group, or in the default group, and how many processes there are."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return (0, 1) if group is None else (group.rank(), group.size())


def share_of(count: int, rank: int, size: int) -> slice:
    """Return the share of a process: consecutive ones; the first processes have one more where it does not divide.

    Examples:
        >>> [share_of(5, rank, 3) for rank in range(3)]
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    fewest, more = divmod(count, size)
    start = rank * fewest + min(rank, more)
    return slice(start, start + fewest + (rank < more))


@runtime_checkable
class TaskDistribution(Protocol):
    """Anything that draws batches of tasks.

    Two calls with generators in the same state return the same batch, and a call that is given a
    generator leaves torch's global random state alone.
    """

    def sample(self, num_tasks: int, *, generator: torch.Generator | None = None) -> Batch:
        """Draw tasks.

        Args:
            num_tasks: Length of the leading axis of every tensor of the batch.
            generator: Source of the random numbers, on the device of the tasks; None is torch's global one.

        Returns:
            The batch.
        """
        ...
