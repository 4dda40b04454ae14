"""The one thing a meta-learner asks of its tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from metagrad.tasks.batch import Batch


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
