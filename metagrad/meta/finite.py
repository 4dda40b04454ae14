"""Losses that are NaN or infinite: named by task and step, or their tasks left out and counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from metagrad.core.tree import tree_map
from metagrad.meta.batching import Tasks

Nonfinite = Literal["raise", "skip"]

Results: TypeAlias = tuple[Any, ...]
"""What became of tasks: a tree of tensors ``[tasks, ...]``, and constants."""


def check_nonfinite(policy: object) -> None:
    """Refuse a policy that is none."""
    if policy not in get_args(Nonfinite):
        raise ValueError(f'MAML(..., nonfinite): expected "raise" or "skip", got {policy!r}.')


def refuse_nonfinite(losses: Tensor, steps: int) -> None:
    """Raise for the first task and step whose loss, of ``[tasks, steps (and the query)]``, is NaN or infinite."""
    losses = losses.detach()
    if math.isfinite(losses.sum().item()):
        return
    finite = torch.isfinite(losses)
    if finite.all():
        return
    task, step = (int(i) for i in (~finite).nonzero()[0])
    where = f"at inner step {step}" if step < steps else "on its query examples, after the last step"
    raise FloatingPointError(
        f"MAML: the loss of task {task} is {losses[task, step].item()} {where} (tasks and steps count from 0; "
        f"{int((~finite).any(1).sum())} of {len(losses)} tasks are affected). Lower the inner learning rate, or "
        'look at the data of that task; with nonfinite="skip" such tasks are left out and counted.'
    )


def without_nonfinite(
    compute: Callable[[Tasks, Tensor], Results],
    losses_in: Callable[[Results], Tensor],
    tasks: Tasks,
    model: nn.Module,
    steps: int,
) -> tuple[Results, Tensor]:
    """Compute tasks, and again without those whose losses are not finite.

    They are not merely left out of a mean: zero times infinity is NaN, in each gradient that they share.

    Args:
        compute: Returns the results of tasks, given them and their numbers in the batch.
        losses_in: Returns the losses in results, ``[tasks, steps (and the query)]``.
        tasks: The tasks of the batch.
        model: The model, whose buffers each computation must find as the first did.
        steps: How many inner steps are taken.

    Returns:
        The results of all tasks, which for one that was left out are what it came to, without a gradient; and the
        numbers of the others, ``[kept]``, int64.

    Raises:
        FloatingPointError: No task would be left.
    """
    kept = torch.arange(tasks.count, device=tasks.device)
    buffers = Buffers(model)
    first = results = compute(tasks, kept)
    while not bool((finite := torch.isfinite(losses_in(results).detach()).all(1)).all()):
        if not bool(finite.any()):
            refuse_nonfinite(losses_in(results), steps)
        buffers.restore()
        kept = kept[finite]
        results = compute(tasks.select(kept), kept)
    if results is not first:
        results = tree_map(lambda every, some: _filled(every, some, kept), first, results)
    return results, kept


class Buffers:
    """The buffers of a model as they are, to be restored: running statistics, say."""

    def __init__(self, model: nn.Module) -> None:
        self._values = [(buffer, buffer.clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the values back."""
        for buffer, value in self._values:
            buffer.copy_(value)


def _filled(every: object, some: object, kept: Tensor) -> object:
    if not isinstance(every, Tensor) or not isinstance(some, Tensor):
        return some
    if some.shape[1:] != every.shape[1:]:  # rows of tables, filled up with the last of each
        some = torch.cat([some, some[:, -1:].expand(-1, every.shape[1] - some.shape[1], *some.shape[2:])], 1)
    return every.detach().index_copy(0, kept, some)
