"""Averages of row-sparse gradients by an all-gather of row indices and values."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from metagrad.core.tree import widened
from metagrad.sparse.kernels.products import coalesced
from metagrad.sparse.tables.row_sparse import RowSparse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Part(NamedTuple):
    """Flat row indices ``[R]`` over the leading ``row_ndim`` dimensions of a table, and values ``[R, ...]``."""

    rows: Tensor
    values: Tensor
    row_ndim: int


def average(
    call: str, tables: Mapping[str, Tensor], coo: Collection[str], share: float, group: ProcessGroup
) -> int:
    """Replace the gradients of tables with the sum over ranks of gradient times share.

    The gradients become :class:`RowSparse`, or COO for the names in ``coo``.

    Returns:
        The all-gathered bytes of this rank.
    """
    if not tables:
        return 0
    parts = [part_of(p.grad) if share and p.grad is not None else None for p in tables.values()]
    own = torch.tensor([[len(p.rows), p.row_ndim] if p else [0, 0] for p in parts])
    own = own.to(next(iter(tables.values())).device)
    counts = torch.stack(_gathered(own, group)).cpu()  # [N, tables, 2]
    nbytes = own.nbytes
    for number, ((name, table), part) in enumerate(zip(tables.items(), parts, strict=True)):
        row_ndim = _row_ndim(call, name, counts[:, number, 1])
        rows, values = _padded(part, table, row_ndim, int(counts[:, number, 0].max()), share)
        nbytes += rows.nbytes + values.nbytes
        every = (_gathered(rows, group), _gathered(values, group)) if len(rows) else ([rows], [values])
        mean = _added(*every, counts[:, number, 0].tolist(), table)
        table.grad = mean.to_coo() if name in coo else mean
    return nbytes


def part_of(gradient: Tensor) -> Part:
    """Return the rows and values of a gradient. Duplicate rows of a COO tensor are summed."""
    if isinstance(gradient, RowSparse):
        return Part(gradient.rows, gradient.values, gradient.row_ndim)
    gradient = coalesced(gradient)
    rows, *deeper = gradient.indices()
    for ids, size in zip(deeper, gradient.shape[1 : 1 + len(deeper)], strict=True):
        rows = rows * size + ids
    return Part(rows, gradient.values(), gradient.sparse_dim())


def _row_ndim(call: str, name: str, counted: Tensor) -> int:
    """Return the number of row dimensions. Raise `ValueError` if ranks with rows differ."""
    found = sorted(set(counted.tolist()) - {0})
    if len(found) > 1:
        raise ValueError(
            f"{call}: the gradient of {name} has rows of {found} dimensions in different processes."
        )
    return found[0]


def _padded(
    part: Part | None, table: Tensor, row_ndim: int, most: int, share: float
) -> tuple[Tensor, Tensor]:
    """Return the rows and the values times the share, padded to ``most`` rows."""
    few = math.prod(table.shape[:row_ndim]) <= torch.iinfo(torch.int32).max
    rows = torch.zeros(most, dtype=torch.int32 if few else torch.int64, device=table.device)
    values = table.new_zeros(most, *table.shape[row_ndim:])
    if part is not None:
        rows[: len(part.rows)] = part.rows
        values[: len(part.rows)] = part.values * share
    return rows, values


def _gathered(own: Tensor, group: ProcessGroup) -> list[Tensor]:
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everyone, own, group=group)
    return everyone


def _added(rows: list[Tensor], values: list[Tensor], counts: list[int], table: Tensor) -> RowSparse:
    """Sum the rows in the order of the ranks, so that the result is bitwise identical on all ranks."""
    kept = [of_process[:count] for of_process, count in zip(rows, counts, strict=False)]
    distinct, places = torch.unique(torch.cat(kept).long(), return_inverse=True)
    total = widened(table.new_zeros(len(distinct), *values[0].shape[1:]))
    for place, own in zip(places.split_with_sizes([len(k) for k in kept]), values, strict=True):
        total.index_add_(0, place, widened(own[: len(place)]))
    return RowSparse(distinct, total.to(table.dtype), table.shape)
