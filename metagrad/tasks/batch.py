"""Batches of tasks, each with support and query examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from metagrad.core.tree import plain_dicts, tree_leaves, tree_map_only

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PADDING = -100  # label of padding, which losses over classes ignore by default


class Examples(NamedTuple):
    """The inputs and targets of a batch of tasks.

    Tasks of unequal length are padded at their end, x with zeros and y with the label -100. `F.cross_entropy` and
    `F.nll_loss` ignore this label, so padding does not change the loss of a task.

    Args:
        x: Inputs, [tasks, examples, ...], or a dict or tuple of the arguments of a model, tensors [tasks, ...].
        y: Labels or real values, [tasks, examples, ...], or a pytree of tensors [tasks, ...].

    Examples:
        >>> import torch
        >>> examples = Examples(x=torch.zeros(4, 10, 1), y=torch.zeros(4, 10, dtype=torch.int64))
        >>> moved = examples.to("cpu", torch.float64)
        >>> moved.x.dtype, moved.y.dtype
        (torch.float64, torch.int64)
        >>> Examples(x=torch.zeros(1, 3, 1), y=torch.tensor([[0, 1, -100]])).mask
        tensor([[ True,  True, False]])
    """

    x: Any
    y: Any

    @property
    def mask(self) -> Tensor:
        """True for examples, False for padding, bool in the shape of y. y must be one tensor."""
        if self.y.is_floating_point():
            return torch.ones_like(self.y, dtype=torch.bool)
        return self.y != PADDING

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Examples:
        """Return the examples on a device and in a floating-point type, as `Tensor.to` does.

        Args:
            device: Device of the result. None keeps the device of each tensor. A dtype in place of the device is
                also accepted.
            dtype: Type of the floating-point tensors of the result. Labels and ids keep their integer type.
            non_blocking: True to copy asynchronously if possible. Tensors in pinned memory are always copied
                asynchronously.

        Returns:
            New examples. A tensor that needs no change is not copied.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        where = device

        def moved(part: Tensor) -> Tensor:
            dtype_of_part = dtype if part.is_floating_point() else None
            return part.to(where, dtype_of_part, non_blocking=non_blocking or part.is_pinned())

        return Examples(*tree_map_only(Tensor, moved, plain_dicts(tuple(self))))


class Batch(NamedTuple):
    """A batch of tasks: examples to adapt to, and examples to evaluate the adapted parameters on.

    `len(batch)` is 2, as for any pair. The number of tasks is `batch.num_tasks`.

    Args:
        support: Examples to adapt to, each tensor [tasks, shots, ...].
        query: Examples to evaluate on, each tensor [tasks, queries, ...].

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
        """Length of the first axis of every tensor."""
        leaves = tree_leaves(plain_dicts(self.support[0]))
        return next(leaf for leaf in leaves if isinstance(leaf, Tensor)).shape[0]

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Batch:
        """Return the batch on a device and in a floating-point type. See `Examples.to`."""
        # A DataLoader makes lists of pairs.
        return Batch(*(Examples(*pair).to(device, dtype, non_blocking=non_blocking) for pair in self))

    def select(self, tasks: slice) -> Batch:
        """Return the selected tasks. The tensors are views of the tensors of the batch."""
        parts = (plain_dicts(tuple(examples)) for examples in self)
        return Batch(*(Examples(*tree_map_only(Tensor, lambda t: t[tasks], part)) for part in parts))

    def shard(self, group: ProcessGroup | None = None) -> Batch:
        """Return the share of this rank: consecutive tasks. The shares of two ranks differ by at most one task.

        The loss of a share is a mean over its tasks. Weight the gradients by the numbers of tasks to obtain the
        gradient of the whole batch: ``metagrad.distributed.average_gradients(maml, weight=share.num_tasks)``. All
        ranks must draw the same batch, from generators in the same state.

        Args:
            group: Process group. None means the default group. Without a process group the share is the whole batch.

        Raises:
            ValueError: There are fewer tasks than ranks.

        Example:
            >>> batch = metagrad.tasks.Sinusoid().sample(4)
            >>> batch.shard().num_tasks
            4
        """
        rank, size = rank_in(group)
        if self.num_tasks < size:
            raise ValueError(
                f"Batch.shard(): {self.num_tasks} tasks for {size} processes would leave some without a task. Draw "
                "at least as many tasks as there are processes."
            )
        return self.select(share_of(self.num_tasks, rank, size))


def rank_in(group: ProcessGroup | None) -> tuple[int, int]:
    """Return the rank of this process in a group, or in the default group, and the size of the group."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return (0, 1) if group is None else (group.rank(), group.size())


def share_of(count: int, rank: int, size: int) -> slice:
    """Return the share of a rank: consecutive items.

    If the number of items is not divisible, the first ranks have one more item.

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

    Two calls with generators in the same state return the same batch. A call with a generator does not change
    torch's global random state.
    """

    def sample(self, num_tasks: int, *, generator: torch.Generator | None = None) -> Batch:
        """Draw tasks.

        Args:
            num_tasks: Length of the first axis of every tensor of the batch.
            generator: Source of random numbers on the device of the tasks. None means torch's global generator.

        Returns:
            The batch.
        """
        ...
