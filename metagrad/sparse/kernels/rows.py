"""To gather rows and to scatter them: two operations whose derivatives are each other, at every order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from metagrad.core import _torch
from metagrad.sparse.kernels.accumulation import index_sum
from metagrad.sparse.kernels.tangents import nestable
from metagrad.sparse.tables.row_sparse import HOLE, Kept, Rows, RowSparse, check_range, wrap


def gather_rows(
    table: Tensor, ids: Tensor, row_ndim: int = 1, *, unique: bool = False, holes: bool = False
) -> Tensor:
    r"""Gather rows, :math:`y_i = T_{\mathrm{ids}_i}`; the derivative is :func:`scatter_rows`, at every order.

    Args:
        table: ``[V, D...]``, strided or :class:`RowSparse`.
        ids: int64, of any shape; in a stack of tables, counted through all of them.
        row_ndim: How many of the first dimensions of ``table`` count rows.
        unique: ``ids`` is 1-d, ascending and without duplicates.
        holes: ``ids`` may hold :data:`HOLE`.

    Returns:
        ``[*ids.shape, D...]``.
    """
    return _Gather.apply(table, ids, row_ndim, unique, holes)


def scatter_rows(
    source: Tensor, ids: Tensor, shape: Sequence[int], *, unique: bool = False, holes: bool = False
) -> RowSparse:
    r"""Add rows up, :math:`X_r = \sum_{i:\, \mathrm{ids}_i = r} s_i`; the derivative is :func:`gather_rows`.

    Args:
        source: ``[*ids.shape, D...]``.
        ids: int64, of any shape.
        shape: The shape of the result, ``[V, D...]``.
        unique: ``ids`` is 1-d, ascending and without duplicates.
        holes: ``ids`` may hold :data:`HOLE`.
    """
    return _Scatter.apply(source, ids, tuple(shape), unique, holes)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(table, ids, row_ndim, unique, holes):
        with _torch.without_torch_function():
            flat = ids.reshape(-1)
            check_range("embedding(ids, table): ids", flat, table.shape[:row_ndim], holes)
            if isinstance(table, Rows):
                found = table._kept.values.detach() if ids is table.rows else look_up(table, flat)
            else:
                found = take(table, flat, row_ndim, holes)
            return found.view(*ids.shape, *found.shape[1:])

    @staticmethod
    def setup_context(ctx, inputs, output):
        table, ids, *ctx.how = inputs
        ctx.shape = tuple(table.shape)
        ctx.save_for_backward(ids)
        ctx.save_for_forward(ids)

    @staticmethod
    def backward(ctx, cotangent):
        _, unique, holes = ctx.how
        return _Scatter.apply(cotangent, *ctx.saved_tensors, ctx.shape, unique, holes), None, None, None, None

    @staticmethod
    @nestable
    def jvp(ctx, tangent, *_):
        return _Gather.apply(tangent, *ctx.saved_tensors, *ctx.how)

    @staticmethod
    def vmap(info, in_dims, table, ids, row_ndim, unique, holes):
        if in_dims[0] is None:
            return _Gather.apply(table, ids.movedim(in_dims[1], 0), row_ndim, False, holes), 0
        table = _batched(table, in_dims[0], info.batch_size)
        ids = _counted_through(ids, in_dims[1], info.batch_size, table.shape[1 : 1 + row_ndim], holes)
        return _Gather.apply(table, ids, row_ndim + 1, unique, holes), 0


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(source, ids, shape, unique, holes):
        with _torch.without_torch_function():
            width = source.shape[ids.ndim :]
            rows, values = ids.reshape(-1), written_out(source.detach()).reshape(ids.numel(), *width)
            if not unique:
                rows, values = _summed(rows, values, holes)
            return wrap(Kept(rows, values), shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        source, ids, ctx.shape, *ctx.how = inputs
        ctx.row_ndim = len(ctx.shape) - (source.ndim - ids.ndim)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.save_for_forward(ids)

    @staticmethod
    def backward(ctx, cotangent):
        if cotangent is None:
            return None, None, None, None, None
        return _Gather.apply(cotangent, *ctx.saved_tensors, ctx.row_ndim, *ctx.how), None, None, None, None

    @staticmethod
    @nestable
    def jvp(ctx, tangent, *_):
        return _Scatter.apply(tangent, *ctx.saved_tensors, ctx.shape, *ctx.how)

    @staticmethod
    def vmap(info, in_dims, source, ids, shape, unique, holes):
        size = info.batch_size
        row_shape = shape[
            : len(shape) - (source.ndim - ids.ndim) + (in_dims[0] is not None) - (in_dims[1] is not None)
        ]
        ids = _counted_through(ids, in_dims[1], size, row_shape, holes)
        source = _batched(source, in_dims[0], size)
        return _Scatter.apply(source, ids, (size, *shape), unique, holes), 0


def _counted_through(
    ids: Tensor, batch_dim: int | None, size: int, row_shape: Sequence[int], holes: bool
) -> Tensor:
    """Count the rows of a batch of tables through all of them."""
    num_rows = math.prod(row_shape)
    ids = _batched(ids, batch_dim, size)
    first = torch.arange(size, device=ids.device).mul_(num_rows).view(-1, *[1] * (ids.ndim - 1))
    return torch.where(ids == HOLE, HOLE, ids + first) if holes else ids + first


def _batched(tensor: Tensor, batch_dim: int | None, size: int) -> Tensor:
    if batch_dim is None:
        return tensor.expand(size, *tensor.shape)
    return tensor.movedim(batch_dim, 0) if batch_dim else tensor


def take(table: Tensor, ids: Tensor, row_ndim: int, holes: bool) -> Tensor:
    """Gather rows ``[N]`` from a strided table, below the tape."""
    row_shape = table.shape[:row_ndim]
    absent = ids == HOLE if holes else None
    if absent is not None:
        ids = ids.masked_fill(absent, 0)
    found = table.index_select(0, ids) if row_ndim == 1 else table[torch.unravel_index(ids, row_shape)]
    if absent is not None:
        found = found.masked_fill_(absent.view(-1, *[1] * (found.ndim - 1)), 0)
    return found


def look_up(table: Rows, ids: Tensor) -> Tensor:
    """Gather rows ``[N]``, kept or not, below the tape."""
    rows, values = table._kept.rows, table._kept.values
    found = table._elsewhere(ids)
    if not len(rows):
        return found
    place = torch.searchsorted(rows, ids).clamp_(max=len(rows) - 1)
    hit = (rows[place] == ids).view(-1, *[1] * (values.ndim - 1))
    return torch.where(hit, values.index_select(0, place), found)


def written_out(tensor: Tensor) -> Tensor:
    """Give memory to the zeros without memory that torch's formulas return; operations below the tape read it."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor


def _summed(ids: Tensor, source: Tensor, holes: bool) -> tuple[Tensor, Tensor]:
    rows, place = torch.unique(ids, return_inverse=True)
    values = index_sum(source, place, len(rows)).to(source.dtype)
    if holes and len(rows) and rows[0] == HOLE:
        return rows[1:], values[1:]
    return rows, values
