"""Row-sparse tensors, averaged by an all-gather of rows and their values: bytes by the rows, not by the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from metagrad.core.tree import widened
from metagrad.sparse.kernels.accumulation import coalesced
from metagrad.sparse.tables.row_sparse import RowSparse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


class Part(NamedTuple):
    """Rows ``[R]`` of a table, counted through its leading dimensions, and values ``[R, ...]``."""

    rows: Tensor
    values: Tensor
    row_ndim: int


class Gathering(NamedTuple):
    """An all-gather under way: padded rows and values of every process, how many are real, and what to wait for."""

    rows: list[Tensor]
    values: list[Tensor]
    counts: list[int]
    shape: torch.Size
    works: list[Work]

    @property
    def nbytes(self) -> int:
        """Bytes that each process contributes."""
        return self.rows[0].nbytes + self.values[0].nbytes


def part_of(gradient: Tensor) -> Part:
    """Return rows and values of a gradient; duplicates of a COO tensor are added up."""
    if isinstance(gradient, RowSparse):
        return Part(gradient.rows, gradient.values, gradient.row_ndim)
    gradient = coalesced(gradient)
    rows, *deeper = gradient.indices()
    for ids, size in zip(deeper, gradient.shape[1 : 1 + len(deeper)], strict=True):
        rows = rows * size + ids
    return Part(rows, gradient.values(), gradient.sparse_dim())


def exchange_counts(parts: Sequence[Part | None], device: torch.device, group: ProcessGroup) -> Tensor:
    """Return how many rows each process has of each table, and of how many dimensions they count: [N, tables, 2]."""
    own = [[0, 0] if part is None else [len(part.rows), part.row_ndim] for part in parts]
    mine = torch.tensor(own, device=device)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    return torch.stack(gathered).cpu()


def start(
    call: str,
    name: str,
    part: Part | None,
    like: Tensor,
    share: float,
    counts: Tensor,
    group: ProcessGroup,
) -> Gathering:
    """Begin to gather the rows of a table, and values times the share of a process.

    Args:
        call: In errors.
        name: Of the table, in errors.
        part: What this process has; None is nothing.
        like: The table.
        share: What values are multiplied by.
        counts: How many rows the processes have, and of how many dimensions they count, [N, 2].
        group: The processes.
    """
    row_ndim = int(counts[:, 1].max())
    if bool(((counts[:, 1] != row_ndim) & (counts[:, 1] != 0)).any()):
        raise ValueError(
            f"{call}: the gradient of {name} has rows of {sorted(set(counts[:, 1].tolist()))} "
            "dimensions in different processes."
        )
    most = int(counts[:, 0].max())
    few = math.prod(like.shape[:row_ndim]) <= torch.iinfo(torch.int32).max
    rows = torch.zeros(most, dtype=torch.int32 if few else torch.int64, device=like.device)
    values = like.new_zeros(most, *like.shape[row_ndim:])
    if part is not None:
        rows[: len(part.rows)] = part.rows
        values[: len(part.rows)] = part.values * share
    all_rows, all_values = ([torch.empty_like(own) for _ in range(group.size())] for own in (rows, values))
    works = [
        dist.all_gather(everyone, own, group=group, async_op=True)
        for everyone, own in ((all_rows, rows), (all_values, values))
        if most
    ]
    return Gathering(
        all_rows, all_values, counts[:, 0].tolist(), like.shape, [w for w in works if w is not None]
    )


def finish(gathering: Gathering) -> RowSparse:
    """Wait for the rows, and add them up process by process, so that all have the same bits."""
    for work in gathering.works:
        work.wait()
    kept = [rows[:count] for rows, count in zip(gathering.rows, gathering.counts, strict=True)]
    rows, places = torch.unique(torch.cat(kept).long(), return_inverse=True)
    first = gathering.values[0]
    total = widened(first.new_zeros(len(rows), *first.shape[1:]))
    for place, values in zip(places.split_with_sizes(gathering.counts), gathering.values, strict=True):
        total.index_add_(0, place, widened(values[: len(place)]))
    return RowSparse(rows, total.to(first.dtype), gathering.shape)
