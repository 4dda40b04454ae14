"""Averages of gradients and buffers over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from metagrad.core.budget import Bytes, checked_bytes
from metagrad.core.checks import check_number
from metagrad.distributed import rows
from metagrad.distributed.exchange import (
    CALL,
    LAYOUTS,
    agreed,
    joined,
    named_tensors,
    note_average,
    weighted_sums,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Traffic(NamedTuple):
    r"""Communication of one rank for an average over N ranks.

    In a ring all-reduce of b bytes, each rank sends :math:`2 b (N - 1) / N` bytes. In a ring all-gather of b bytes
    per rank, each rank sends :math:`b (N - 1)` bytes.

    Attributes:
        processes: Number of ranks N.
        reduced: All-reduced bytes: dense tensors, weights and layouts.
        gathered: All-gathered bytes: row indices, values and counts. Ranks with fewer rows pad them.

    Example:
        >>> metagrad.distributed.Traffic(processes=4, reduced=1000, gathered=10).sent
        1530

    References:
        Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
    """

    processes: int
    reduced: int = 0
    gathered: int = 0

    @property
    def sent(self) -> int:
        """Bytes that this rank sends."""
        return 2 * self.reduced * (self.processes - 1) // self.processes + self.gathered * (
            self.processes - 1
        )


@torch.no_grad()
def average_gradients(
    params: nn.Module | Mapping[str, Tensor] | Iterable[Tensor],
    *,
    weight: float = 1.0,
    bucket: Bytes = "25MiB",
    group: ProcessGroup | None = None,
) -> Traffic:
    r"""Replace the gradient of each parameter with its mean over the ranks of a process group.

    .. math:: g \leftarrow \frac{\sum_r w_r g_r}{\sum_r w_r}

    Use the number of tasks or examples of each rank as its weight. Then the result is exactly the gradient of the
    mean over all tasks, also for unequal shares. The gradients are bitwise identical on all ranks afterwards.

    Dense gradients are reduced in flat buckets by dtype and device, concurrently. For row-sparse gradients
    (:class:`~metagrad.sparse.RowSparse` and sparse COO), ranks gather row indices and values, and the result is
    row-sparse. So the communication depends on the number of rows in the gradients, not on the size of the table.

    All ranks must call the function with the same parameters in the same order. A gradient that exists on only some
    ranks counts as zeros on the other ranks. A gradient that exists on no rank stays None. The parameters themselves
    are not compared. Initialize them from the same seed on all ranks. Without a process group, and with a single
    rank, nothing changes.

    Args:
        params: Module, mapping or iterable of tensors. The parameters of an algorithm include its learned
            hyperparameters.
        weight: Weight of this rank, such as its number of tasks. 0 excludes its gradients.
        bucket: Size of a bucket in bytes.
        group: Process group. None for the default group.

    Returns:
        The communication of this rank.

    Raises:
        ValueError: ``weight`` is negative or not finite, or 0 on every rank. A gradient has a graph, is sharded, or
            has different layouts on different ranks. All ranks raise the error.
        TypeError: A parameter is not a tensor.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.ones(4, 2)).square().mean().backward()
        >>> metagrad.distributed.average_gradients(model, weight=4).processes
        1

    References:
        Li et al., "PyTorch distributed: experiences on accelerating data parallel training", VLDB 2020, section 3.2
        (buckets).
    """
    named, limit = named_tensors(params), checked_bytes(CALL, "bucket", bucket)
    weight, group = check_number(f"{CALL}: weight", weight, least=0), joined(group)
    if group is None or not named:
        return Traffic(1 if group is None else group.size())
    total, layouts = agreed(named, weight, group)
    share = weight / total
    dense = [param for name, param in named.items() if layouts[name] == 0]
    tables = {name: param for name, param in named.items() if layouts[name] in (1, 2)}
    gathered = rows.average(CALL, tables, {name for name in tables if layouts[name] == 1}, share, group)
    for param, mean in zip(
        dense, weighted_sums([p.grad for p in dense], dense, share, limit, group), strict=True
    ):
        param.grad = mean
    for name, param in named.items():
        if layouts[name] is None:  # on a rank with weight 0
            param.grad = None
        note_average(param)
    reduced = sum(param.nbytes for param in dense) + 8 * (1 + len(LAYOUTS) * len(named))
    return Traffic(group.size(), reduced, gathered)


@torch.no_grad()
def average_buffers(module: nn.Module, *, weight: float = 1.0, group: ProcessGroup | None = None) -> None:
    r"""Replace each floating-point buffer with its mean over the ranks of a process group.

    :class:`metagrad.MAML` with ``norm=`` updates running statistics once per meta-batch, with the mean over tasks.
    With the number of tasks as weights, these become the running statistics of the whole meta-batch. Statistics that
    layers update in each task become the mean over ranks. Integer buffers, such as counters, do not change.

    Args:
        module: Module with the buffers, which are modified in place.
        weight: Weight of this rank, such as its number of tasks.
        group: Process group. None for the default group.

    Raises:
        ValueError: ``weight`` is negative or not finite, or 0 on every rank.

    Example:
        >>> metagrad.distributed.average_buffers(torch.nn.BatchNorm1d(3))  # one process: nothing changes
    """
    weight = check_number("average_buffers(module, weight)", weight, least=0)
    found = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    if (group := joined(group)) is None or not found:
        return
    total, _ = agreed({"": found[0].detach()}, weight, group)
    limit = checked_bytes("average_buffers(module)", "bucket", "25MiB")
    for buffer, mean in zip(found, weighted_sums(found, found, weight / total, limit, group), strict=True):
        buffer.copy_(mean)
