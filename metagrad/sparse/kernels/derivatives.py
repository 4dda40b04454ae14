r"""The derivative rules: two families, each closed under differentiation, so every order costs what the first does.

.. math::
    \partial\, \mathrm{SpMM} / \partial\, \mathrm{values} &= \mathrm{SDDMM}, &
    \partial\, \mathrm{SpMM} / \partial\, \mathrm{dense} &= \mathrm{SpMM\ of\ the\ transpose}, &
    \partial\, \mathrm{SDDMM} &= \mathrm{SpMM} \\
    \mathrm{gather}^* &= \mathrm{segment\_sum}, & \mathrm{segment\_sum}^* &= \mathrm{gather}

Every rule is bilinear or linear, so its tangent is itself. Batches fold into the width of the dense operand where the
values are shared, and into a block-diagonal pattern where they are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.sparse.kernels import products as kernels
from metagrad.sparse.kernels.tangents import Bilinear, Kernel, nestable
from metagrad.sparse.pattern import Pattern, Segments


def matmul(pattern: Pattern, values: Tensor, dense: Tensor, *, transposed: bool = False) -> Tensor:
    """Multiply sparse matrices by dense ones: values [..., nnz], dense [..., m, K] to [..., n, K].

    With ``transposed`` the matrix on the left is the transpose: dense [..., n, K] to [..., m, K].
    """
    rows = pattern.shape[1] if transposed else pattern.shape[0]
    if values.ndim == 1 and dense.ndim == 2:
        return _SpMM.apply(pattern, transposed, values, dense)
    batch = torch.broadcast_shapes(values.shape[:-1], dense.shape[:-2])
    width = dense.shape[-1]
    if values.ndim == 1:
        wide = dense.flatten(0, -3).movedim(0, 1).flatten(1)  # [m, B * K]
        out = _SpMM.apply(pattern, transposed, values, wide)
        return out.reshape(rows, batch.numel(), width).movedim(1, 0).reshape(*batch, rows, width)
    values = values.expand(*batch, pattern.nnz).flatten()
    out = _SpMM.apply(pattern.repeat(batch.numel()), transposed, values, _stacked(dense, batch))
    return out.reshape(*batch, rows, width)


def sample(pattern: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """Compute ``a[..., row, :] . b[..., col, :]`` at every entry: [..., n, K] and [..., m, K] to [..., nnz]."""
    if a.ndim == 2 and b.ndim == 2:
        return _SDDMM.apply(pattern, a, b)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    values = _SDDMM.apply(pattern.repeat(batch.numel()), _stacked(a, batch), _stacked(b, batch))
    return values.reshape(*batch, pattern.nnz)


def gather(x: Tensor, segments: Segments) -> Tensor:
    """Give each entry the row of its segment: x [num_segments, ...] to [entries, ...]."""
    return _Gather.apply(segments, x)


def segment_sum(values: Tensor, segments: Segments) -> Tensor:
    """Add the rows that share a segment: values [entries, ...] to [num_segments, ...]."""
    return _SegmentSum.apply(segments, values)


class _SpMM(Bilinear):
    """values [nnz], dense [m, K] (or [n, K] when transposed)."""

    @staticmethod
    def forward(pattern: Pattern, transposed: bool, values: Tensor, dense: Tensor) -> Tensor:
        if transposed:
            return kernels.matmul(pattern.t(), values[pattern.csc_order], dense)
        return kernels.matmul(pattern, values, dense)

    @staticmethod
    def backward(ctx, grad):
        values, dense = ctx.saved_tensors
        pattern, transposed = ctx.structure
        d_values = d_dense = None
        if ctx.needs_input_grad[2]:
            d_values = sample(pattern, dense, grad) if transposed else sample(pattern, grad, dense)
        if ctx.needs_input_grad[3]:
            d_dense = matmul(pattern, values, grad, transposed=not transposed)
        return None, None, d_values, d_dense

    @staticmethod
    def vmap(info, in_dims, pattern, transposed, values, dense):
        values, dense = _batch_first(values, in_dims[2]), _batch_first(dense, in_dims[3])
        return matmul(pattern, values, dense, transposed=transposed), 0


class _SDDMM(Bilinear):
    """a [n, K], b [m, K] to values [nnz]."""

    @staticmethod
    def forward(pattern: Pattern, a: Tensor, b: Tensor) -> Tensor:
        return kernels.sample(pattern, a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        (pattern,) = ctx.structure
        d_a = matmul(pattern, grad, b) if ctx.needs_input_grad[1] else None
        d_b = matmul(pattern, grad, a, transposed=True) if ctx.needs_input_grad[2] else None
        return None, d_a, d_b

    @staticmethod
    def vmap(info, in_dims, pattern, a, b):
        return sample(pattern, _batch_first(a, in_dims[1]), _batch_first(b, in_dims[2])), 0


class _OnSegments(Kernel):
    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.segments = inputs[0]


class _Gather(_OnSegments):
    """x [num_segments, ...] to [entries, ...]."""

    @staticmethod
    def forward(segments: Segments, x: Tensor) -> Tensor:
        return x.index_select(0, segments.ids)

    @staticmethod
    def backward(ctx, grad):
        return None, segment_sum(grad, ctx.segments)

    @staticmethod
    @nestable
    def jvp(ctx, _segments, d_x):
        return gather(d_x, ctx.segments)

    @staticmethod
    def vmap(info, in_dims, segments, x):
        return gather(x.movedim(in_dims[1], 1), segments), 1


class _SegmentSum(_OnSegments):
    """values [entries, ...] to [num_segments, ...]."""

    @staticmethod
    def forward(segments: Segments, values: Tensor) -> Tensor:
        return kernels.segment_sum(values, segments)

    @staticmethod
    def backward(ctx, grad):
        return None, gather(grad, ctx.segments)

    @staticmethod
    @nestable
    def jvp(ctx, _segments, d_values):
        return segment_sum(d_values, ctx.segments)

    @staticmethod
    def vmap(info, in_dims, segments, values):
        return segment_sum(values.movedim(in_dims[1], 1), segments), 1


def _stacked(x: Tensor, batch: torch.Size) -> Tensor:
    """Put the matrices of a batch on top of each other: [..., n, K] to [B * n, K]."""
    return x.expand(*batch, *x.shape[-2:]).flatten(0, -2)


def _batch_first(x: Tensor, dim: int | None) -> Tensor:
    return x if dim is None else x.movedim(dim, 0)
