"""Shapes, copies and types of :class:`~metagrad.sparse.tables.RowSparse`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metagrad.sparse.kernels.rows import scatter_rows
from metagrad.sparse.tables.arithmetic import add_into, as_rows, counted, unknown, write
from metagrad.sparse.tables.row_sparse import Kept, RowSparse, wrap


def view(x: RowSparse, size: Sequence[int]) -> RowSparse:
    """Give another shape, in which rows are still whole."""
    known = -math.prod(size) if -1 in size else 1
    shape = tuple(x.numel() // known if n == -1 else n for n in size)
    num_rows = math.prod(x.shape[: x.row_ndim])
    for k in range(1, len(shape) + 1):
        if math.prod(shape[:k]) == num_rows:
            break
    else:
        raise unknown(f"view(x, {shape}) of shape {tuple(x.shape)}", "it would cut rows into pieces")
    if shape[k:] == x.shape[x.row_ndim :]:
        return wrap(x._kept, shape)
    return wrap(Kept(x.rows, x._kept.values.reshape(-1, *shape[k:]), writable=False), shape)


def cut(
    x: RowSparse, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> RowSparse:
    """Take a slice: within rows, or of the rows of one table."""
    dim, size = dim % x.ndim, x.shape[dim % x.ndim]
    start, end, step = slice(start, end, step).indices(size)
    shape = (*x.shape[:dim], len(range(start, end, step)), *x.shape[dim + 1 :])
    if dim >= x.row_ndim:
        within = [slice(None)] * (dim - x.row_ndim + 1)
        values = x._kept.values[(*within, slice(start, end, step))]
        return wrap(Kept(x.rows, values, writable=False), shape)
    if dim or x.row_ndim > 1 or step != 1:
        raise unknown(f"slice(x, dim={dim}, step={step})", "only one table is cut, in steps of 1")
    inside = (x.rows >= start) & (x.rows < end)
    return wrap(Kept(x.rows[inside] - start, x._kept.values[inside], writable=False), shape)


def put_back(x: RowSparse, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> RowSparse:
    """Put a slice into a tensor of zeros: the derivative of a slice."""
    dim %= x.ndim
    if dim >= x.row_ndim:
        inner = (len(x.rows), *sizes[x.row_ndim :])
        values = torch.ops.aten.slice_backward(x._kept.values, inner, dim - x.row_ndim + 1, start, end, step)
        return wrap(Kept(x.rows, values), sizes)
    if dim or x.row_ndim > 1 or step != 1:
        raise unknown(f"slice_backward(x, dim={dim}, step={step})", "only one table is cut, in steps of 1")
    return wrap(Kept(x.rows + start, x._kept.values.clone()), sizes)


def permute(x: RowSparse, dims: Sequence[int]) -> RowSparse:
    """Order the tables of a stack anew."""
    k, dims = x.row_ndim, [d % x.ndim for d in dims]
    if dims[k:] != list(range(k, x.ndim)):
        raise unknown(f"permute(x, {dims})", "rows must stay whole")
    places = torch.unravel_index(x.rows, x.shape[:k])
    rows = counted([places[d] for d in dims[:k]], [x.shape[d] for d in dims[:k]])
    result = scatter_rows(x.values, rows, [x.shape[d] for d in dims])
    result._kept.writable = False
    return result


def alias(x: RowSparse) -> RowSparse:
    """Make another tensor of the same rows and values."""
    return wrap(x._kept, x.shape)


def clone(x: RowSparse, *, memory_format: torch.memory_format | None = None) -> RowSparse:
    """Copy the values."""
    return wrap(Kept(x.rows, x._kept.values.clone()), x.shape)


def to_copy(
    x: RowSparse, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **layout: Any
) -> RowSparse:
    """Convert dtype or device."""
    device = device or x.device
    return wrap(Kept(x.rows.to(device), x._kept.values.to(device, dtype, copy=True)), x.shape)


def zeros_like(x: RowSparse, *, dtype: torch.dtype | None = None, **layout: Any) -> RowSparse:
    """Make a tensor of no rows."""
    return wrap(
        Kept(x.rows[:0], x._kept.values.new_zeros((0, *x._kept.values.shape[1:]), dtype=dtype)), x.shape
    )


def new_empty_strided(x: RowSparse, size: Sequence[int], stride: Sequence[int], **how: Any) -> RowSparse:
    """Make what a gradient is copied into on its way into ``.grad``."""
    if tuple(size) != tuple(x.shape):
        raise unknown(f"new_empty_strided(x, {tuple(size)})", "only a tensor of the same shape is made")
    return zeros_like(x, **how)


def copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Write one into the other; a strided target is zero in the rows that are not kept."""
    if isinstance(target, RowSparse):
        return write(target, as_rows(source, target))
    return add_into(target.zero_(), source)
