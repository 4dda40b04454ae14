r"""Two families of functions that are closed under differentiation. Derivatives of every order cost the same.

.. math::
    \partial\, \mathrm{SpMM} / \partial\, \mathrm{values} &= \mathrm{SDDMM}, &
    \partial\, \mathrm{SpMM} / \partial\, \mathrm{dense} &= \mathrm{SpMM\ of\ the\ transpose}, &
    \partial\, \mathrm{SDDMM} &= \mathrm{SpMM} \\
    \mathrm{gather}^* &= \mathrm{segment\_sum}, & \mathrm{segment\_sum}^* &= \mathrm{gather}

Every rule is linear in each operand, so its tangent uses the same rule. If a batch shares the values, it is
folded into the width of the dense operand. Otherwise the batch becomes a block-diagonal pattern.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from metagrad.core import _torch
from metagrad.core._torch import Function
from metagrad.sparse.kernels import products as kernels
from metagrad.sparse.pattern import Pattern, Segments

Result = TypeVar("Result")


def nestable(jvp: Callable[..., Result]) -> Callable[..., Result]:
    """Return a ``jvp`` of an ``autograd.Function`` that forward mode can differentiate.

    torch 2.13 calls ``jvp`` with forward mode switched off. ``jacfwd(jacfwd(f))`` then omits every term that
    depends on the tangent, without an error (pytorch issue 197867). This decorator switches forward mode on
    again. The rule must pass saved tensors through :func:`primal`: they have tangents on the same level, and
    would call the rule again.
    """

    @functools.wraps(jvp)
    def nested(ctx: object, *tangents: Tensor | None) -> Result:
        with _torch.forward_mode(True):
            return jvp(ctx, *(primal(t) if isinstance(t, Tensor) else t for t in tangents))

    return nested


def primal(x: Tensor) -> Tensor:
    """Return a tensor without its tangent on the innermost level. Tangents of outer levels stay."""
    return unpack_dual(x).primal


class Kernel(Function):
    """A Function whose arguments are passed by position.

    torch binds arguments by name at each ``apply``, which took 40 % of the time of a small lookup. This class binds
    them only under ``torch.func``, and reads the signature once.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "forward" in vars(cls):
            cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply the rule."""
        if _torch.functorch_is_active():
            return super().apply(*args)
        return super(Function, cls).apply(*_torch.unwrap_dead_wrappers(args))  # type: ignore[reportAttributeAccessIssue]


class Bilinear(Kernel):
    """A rule ``apply(*structure, first, second)`` that is linear in each of its last two arguments.

    A subclass defines ``forward``, ``backward`` and ``vmap``. The tangent follows from the rule.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        cls.jvp = staticmethod(nestable(functools.partial(_bilinear_tangent, cls)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the operands."""
        ctx.structure, operands = inputs[:-2], inputs[-2:]
        ctx.save_for_backward(*operands)
        ctx.save_for_forward(*operands)


def _bilinear_tangent(rule: type[Bilinear], ctx: Any, *tangents: Tensor | None) -> Tensor:
    """Differentiate a bilinear rule in forward mode."""
    *_, d_first, d_second = tangents
    first, second = map(primal, ctx.saved_tensors)
    if d_second is None:
        return rule.apply(*ctx.structure, d_first, second)
    if d_first is None:
        return rule.apply(*ctx.structure, first, d_second)
    return rule.apply(*ctx.structure, d_first, second) + rule.apply(*ctx.structure, first, d_second)


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
    """Return the row of the segment of each entry: x [num_segments, ...] to [entries, ...]."""
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
    """Stack the matrices of a batch: [..., n, K] to [B * n, K]."""
    return x.expand(*batch, *x.shape[-2:]).flatten(0, -2)


def _batch_first(x: Tensor, dim: int | None) -> Tensor:
    return x if dim is None else x.movedim(dim, 0)
