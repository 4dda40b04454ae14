"""Gradients, averaged over the processes of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from metagrad.core.budget import Bytes, checked_bytes, device_of
from metagrad.distributed import buckets, rows
from metagrad.distributed.agreement import Layout, agree, checked_weight, joined, named_tensors
from metagrad.distributed.traffic import Traffic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CALL = "average_gradients(params)"


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
        weight: Of this process: the number of tasks in its share; 0 leaves its gradients out.
        bucket: How many bytes are reduced at once.
        group: The processes; None is the default group.

    Returns:
        The bytes that it took.

    Raises:
        ValueError: A gradient has a graph, another layout, or different ones in different processes; ``weight`` is
            negative or not finite, or 0 in every process.
        TypeError: A parameter is no tensor.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> maml = metagrad.MAML(model, torch.nn.functional.mse_loss, inner=metagrad.optim.rules.sgd(lr=0.1), steps=1)
        >>> examples = torch.ones(4, 5, 2), torch.ones(4, 5, 1)  # of 4 tasks
        >>> batch = metagrad.tasks.Batch(*[metagrad.tasks.Examples(*examples)] * 2).shard()
        >>> maml(batch).loss.backward()
        >>> metagrad.distributed.average_gradients(maml, weight=batch.num_tasks).processes
        1

    References:
        Li et al., "PyTorch distributed: experiences on accelerating data parallel training", VLDB 2020, section 3.2
        (buckets).
    """
    named = named_tensors(_CALL, params)
    weight, limit = checked_weight(_CALL, weight), checked_bytes(_CALL, "bucket", bucket)
    group = joined(group)
    if group is None or not named:
        return Traffic(1 if group is None else group.size())
    device = device_of(list(named.values()))
    agreed = agree(_CALL, named, weight, device, group)
    layouts = dict(zip(named, agreed.layouts, strict=True))
    dense = [param for name, param in named.items() if layouts[name] is Layout.STRIDED]
    tables = {
        name: named[name] for name, layout in layouts.items() if layout in (Layout.COO, Layout.ROW_SPARSE)
    }
    begun = buckets.start([param.grad for param in dense], dense, agreed.share, limit, group)
    gathered, counts = _average_tables(tables, layouts, agreed.share, group)
    for one in begun:
        for number, mean in buckets.finish(one, dense).items():
            dense[number].grad = mean
    for name, layout in layouts.items():
        if layout is None:  # of a process with weight 0
            named[name].grad = None
    return Traffic(
        processes=group.size(),
        dense=sum(one.flat.nbytes for one in begun),
        rows=gathered,
        agreement=agreed.nbytes,
        counts=counts,
        buckets=len(begun),
    )


def _average_tables(
    tables: Mapping[str, Tensor], layouts: Mapping[str, Layout | None], share: float, group: ProcessGroup
) -> tuple[int, int]:
    """Average row-sparse gradients, and return the bytes of rows and values, and of their numbers."""
    if not tables:
        return 0, 0
    parts = [
        rows.part_of(param.grad) if share and param.grad is not None else None for param in tables.values()
    ]
    counts = rows.exchange_counts(parts, device_of(list(tables.values())), group)
    begun = [
        rows.start(name, part, param, share, counts[:, number], group)
        for number, ((name, param), part) in enumerate(zip(tables.items(), parts, strict=True))
    ]
    for (name, param), gathering in zip(tables.items(), begun, strict=True):
        mean = rows.finish(gathering)
        param.grad = mean.to_coo() if layouts[name] is Layout.COO else mean
    return sum(gathering.nbytes for gathering in begun), counts[0].nbytes
