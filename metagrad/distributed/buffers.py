"""Buffers, averaged over the processes of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from metagrad.core.budget import Bytes, checked_bytes
from metagrad.distributed import buckets
from metagrad.distributed.agreement import Own, agree, checked_weight, joined
from metagrad.distributed.traffic import Traffic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CALL = "average_buffers(module)"


@torch.no_grad()
def average_buffers(
    module: nn.Module, *, weight: float = 1.0, bucket: Bytes = "25MiB", group: ProcessGroup | None = None
) -> Traffic:
    r"""Replace each floating-point buffer by its mean over the processes of a group.

    With the numbers of tasks as weights, running statistics that move towards the mean over tasks, once for each
    meta-batch, come out as those of the whole meta-batch: ``norm=`` of :class:`metagrad.MAML` moves them so. Those
    that layers move by themselves, one task after the other, come out as the mean of what they are in the processes.
    Buffers of integers, such as counters, stay as they are.

    Args:
        module: Whose buffers are averaged, in place.
        weight: Of this process: the number of tasks in its share.
        bucket: How many bytes are reduced at once.
        group: The processes; None is the default group.

    Returns:
        The bytes that it took.

    Raises:
        ValueError: ``weight`` is negative or not finite, or 0 in every process.

    Example:
        >>> metagrad.distributed.average_buffers(torch.nn.BatchNorm1d(3)).processes
        1
    """
    weight, limit = checked_weight(_CALL, weight), checked_bytes(_CALL, "bucket", bucket)
    group = joined(group)
    found = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    if group is None or not found:
        return Traffic(1 if group is None else group.size())
    agreed = agree(_CALL, {}, Own(weight), found[0].device, group)
    begun = [
        buckets.start(numbers, dict(enumerate(found)), found, weight / agreed.total, group)
        for numbers in buckets.buckets_of(found, limit)
    ]
    for one in begun:
        for number, mean in buckets.finish(one, found).items():
            found[number].copy_(mean)
    size = sum(one.flat.nbytes for one in begun)
    return Traffic(group.size(), dense=size, agreement=agreed.nbytes, buckets=len(begun))
