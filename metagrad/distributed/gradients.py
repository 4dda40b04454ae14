"""Gradients and buffers, averaged over the processes of a group."""

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
    r"""The bytes that one process hands over, and sends, in an average over N processes.

    A ring all-reduce of b bytes sends :math:`2 b (N - 1) / N` from each process, a ring all-gather of b bytes from
    each sends :math:`b (N - 1)`.

    Attributes:
        processes: The number N.
        reduced: Bytes that are all-reduced: strided tensors, weights and layouts.
        gathered: Bytes that are all-gathered: rows, their values and how many there are. A process with fewer rows
            than another one pads them.

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
        """Bytes that this process sends."""
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
    r"""Replace the gradient of each parameter by its mean over the processes of a group.

    .. math:: g \leftarrow \frac{\sum_r w_r g_r}{\sum_r w_r}

    With the number of tasks (of examples) of each process as its weight this is the gradient of the mean over all of
    them, exactly, however unequal the shares are. Strided gradients are put into flat buckets by dtype and device, an
    all-reduce each, which run at the same time. Of row-sparse gradients (:class:`~metagrad.sparse.RowSparse`, sparse
    COO) rows and values are gathered, and the result is row-sparse again: what is sent depends on the rows that are
    touched, not on the table. Afterwards the gradients have the same bits in every process.

    All processes call it with the same parameters in the same order. A parameter without a gradient in some of them
    has zeros there; without one in any it keeps none. Parameters are not compared: let all processes begin with the
    same ones, by the same seed. Without a process group, or in one of a single process, nothing changes.

    Args:
        params: A module, whose parameters are meant (learned hyper-parameters of an algorithm among them), a mapping,
            or an iterable of tensors.
        weight: The weight of this process: the number of tasks in its share; 0 leaves its gradients out.
        bucket: How many bytes are reduced at once.
        group: The processes; None is the default group.

    Returns:
        The bytes that it took.

    Raises:
        ValueError: ``weight`` is negative or not finite, or 0 in every process. A gradient has a graph, is sharded,
            or has one layout in some processes and another one elsewhere. All processes raise the error.
        TypeError: A parameter is no tensor.

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
        if layouts[name] is None:  # of a process with weight 0
            param.grad = None
        note_average(param)
    reduced = sum(param.nbytes for param in dense) + 8 * (1 + len(LAYOUTS) * len(named))
    return Traffic(group.size(), reduced, gathered)


@torch.no_grad()
def average_buffers(module: nn.Module, *, weight: float = 1.0, group: ProcessGroup | None = None) -> None:
    r"""Replace each floating-point buffer by its mean over the processes of a group.

    With the numbers of tasks as weights, running statistics that move towards the mean over tasks, once for each
    meta-batch, become the running statistics of the whole meta-batch: ``norm=`` of :class:`metagrad.MAML` moves them
    so. Statistics that layers move by themselves, task by task, become the mean over the processes. Buffers of
    integers, such as counters, do not change.

    Args:
        module: The module with the buffers, which are averaged in place.
        weight: The weight of this process: the number of tasks in its share.
        group: The processes; None is the default group.

    Raises:
        ValueError: ``weight`` is negative or not finite, or 0 in every process.

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
