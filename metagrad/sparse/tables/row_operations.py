"""The operations that :class:`~metagrad.sparse.RowSparse` supports. Other operations raise ``TypeError``.

Users call ``FUNCTIONS``. torch would differentiate them with the whole table, so they use ``values`` and ordinary
autograd. torch calls ``OPERATIONS`` below autograd. They accumulate gradients, appear in torch's backward
formulas, and implement linear functions, whose formulas are correct.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.checks import refuse
from metagrad.core.tree import widened
from metagrad.sparse.kernels.products import index_sum
from metagrad.sparse.tables.row_sparse import (
    FUNCTIONS,
    OPERATIONS,
    RowSparse,
    RowStorage,
    gather_rows,
    scatter_rows,
    unknown,
    wrap,
    written_out,
)

aten: Any = torch.ops.aten
Handler = Callable[..., Any]


def _with_values(x: RowSparse, values: Tensor) -> RowSparse:
    shape = (*x.shape[: x.row_ndim], *values.shape[1:])
    return scatter_rows(values, x.rows, shape, unique=True)


def elementwise(function: Callable[[Tensor], Tensor]) -> Handler:
    """Return an elementwise function from a function that is zero at zero."""
    return lambda x: _with_values(x, function(x.values))


def multiply(x: Any, y: Any) -> RowSparse:
    """Multiply by a number, a dense tensor that broadcasts, or a RowSparse."""
    if not isinstance(x, RowSparse):
        x, y = y, x
    return _with_values(x, x.values * _at_rows("mul", y, x))


def divide(x: Any, y: Any, *, rounding_mode: str | None = None) -> RowSparse:
    """Divide by a number or a dense tensor. Rows that are not stored stay zero, even if the divisor is zero."""
    if isinstance(y, RowSparse) or rounding_mode is not None:
        raise unknown("div(x, y)", "a quotient of zeros, or a rounded one, has no sparse form")
    return _with_values(x, x.values / _at_rows("div", y, x))


def _at_rows(call: str, other: Any, x: RowSparse) -> Any:
    """Return the rows of a factor that ``x`` stores. They broadcast against the values of ``x``."""
    if not isinstance(other, Tensor) or other.ndim <= x.ndim - x.row_ndim:
        return other
    row_shape = x.shape[: x.row_ndim]
    if other.ndim < x.ndim:
        other = other.view(*[1] * (x.ndim - other.ndim), *other.shape)
    if other.ndim > x.ndim or torch.broadcast_shapes(other.shape[: x.row_ndim], row_shape) != row_shape:
        raise unknown(
            f"{call}(x, y) of shapes {tuple(x.shape)} and {tuple(other.shape)}", "it would repeat the rows"
        )
    if all(size == 1 for size in other.shape[: x.row_ndim]):
        return other.reshape(other.shape[x.row_ndim :])
    if other.shape[: x.row_ndim] != row_shape:
        other = other.expand(*row_shape, *other.shape[x.row_ndim :])
    return gather_rows(other, x.rows, x.row_ndim)


def raised(x: Any, exponent: Any) -> RowSparse:
    """Raise to a positive power."""
    if not isinstance(x, RowSparse) or not isinstance(exponent, (int, float)) or not exponent > 0:
        power = exponent if isinstance(exponent, (int, float)) else type(exponent).__name__
        raise unknown(f"pow(x, {power})", "only a power by a positive number is zero where x is")
    return _with_values(x, x.values**exponent)


def add(x: Any, y: Any, *, alpha: float = 1) -> Tensor:
    """Add two tensors. The sum with a dense tensor is dense."""
    if isinstance(x, RowSparse) and isinstance(y, RowSparse):
        return _merged(x, y, alpha)
    for number, other in ((x, y), (y, x)):
        if not isinstance(number, Tensor) or number.ndim == 0:
            if isinstance(number, (int, float)) and number == 0:
                return other * alpha if other is y else other
            raise unknown("add(x, y)", "a number added to every row makes all of them nonzero")
    if isinstance(y, RowSparse):
        return _onto(x, y, alpha)
    return _onto(y * alpha, x, 1)


def _merged(x: RowSparse, y: RowSparse, alpha: float) -> RowSparse:
    if x.shape != y.shape:
        refuse("add(x, y): y", f"the shape of x, {tuple(x.shape)}", tuple(y.shape))
    if x.rows is y.rows or torch.equal(x.rows, y.rows):
        return _with_values(x, torch.add(x.values, y.values, alpha=alpha))
    values = torch.cat([x.values, y.values * alpha])
    return scatter_rows(values, torch.cat([x.rows, y.rows]), x.shape)


def _onto(dense: Tensor, x: RowSparse, alpha: float) -> Tensor:
    shape = torch.broadcast_shapes(dense.shape, x.shape)
    if dense.ndim <= x.ndim - x.row_ndim or shape != x.shape:
        raise unknown(
            f"add(x, y) of shapes {tuple(dense.shape)} and {tuple(x.shape)}", "it would repeat the rows"
        )
    result = (
        dense.expand(shape)
        .to(torch.promote_types(dense.dtype, x.dtype))
        .clone(memory_format=torch.contiguous_format)
    )
    return add_into(result, x, alpha=alpha)


def add_into(target: Tensor, y: Any, *, alpha: float = 1) -> Tensor:
    """Add in place. A dense tensor changes only in the stored rows. A RowSparse gains the rows of the addend."""
    if isinstance(target, RowSparse):
        if not isinstance(y, Tensor):
            return write(target, add(target, y, alpha=alpha))
        return write(target, _merged(target, as_rows(y, target), alpha))
    if target.shape != y.shape:
        raise unknown(
            f"add_(x, y) of shapes {tuple(target.shape)} and {tuple(y.shape)}", "it would repeat the rows"
        )
    values = y.values.to(target.dtype)
    if y.row_ndim == 1:
        return target.index_add_(0, y.rows, values, alpha=alpha)
    places = torch.unravel_index(y.rows, y.shape[: y.row_ndim])
    return target.index_put_(places, values * alpha, accumulate=True)


def as_rows(y: Tensor, like: RowSparse) -> RowSparse:
    """Return a dense tensor as a RowSparse that stores every row, to add a dense gradient to a sparse ``.grad``."""
    if isinstance(y, RowSparse):
        return y
    values = written_out(y).expand(like.shape).reshape(-1, *like.shape[like.row_ndim :])
    rows = torch.arange(len(values), device=y.device)
    return scatter_rows(values, rows, like.shape, unique=True)


def write(target: RowSparse, new: Tensor) -> RowSparse:
    """Write other rows into a tensor and its aliases."""
    if not target.kept.writable:
        raise unknown("a write in place into a view of another shape", "the tensor viewed would not see it")
    assert isinstance(new, RowSparse)
    if new.dtype != target.dtype:
        new = _with_values(new, new.values.to(target.dtype))
    target.kept.rows, target.kept.values = new.rows, new.values
    return target


def in_place(function: Handler) -> Handler:
    """Return a function that writes its result into its first argument."""
    return lambda x, *args, **kwargs: write(x, function(x, *args, **kwargs))


def total(
    x: RowSparse, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Sum over dimensions. The sum over the rows of a table is dense."""
    dims, k = _dims("sum", x, dim), x.row_ndim
    values = widened(x.values) if dtype is None else x.values.to(dtype)
    within = [d - k + 1 for d in dims if d >= k]
    if within:
        values = values.sum(within, keepdim)
    over = [d for d in dims if d < k]
    result = _sum_over_rows(x, values, over) if over else _with_values(x, values)
    if keepdim and over:
        lead = [1 if d in over else x.shape[d] for d in range(k)]
        result = result.view(*lead, *values.shape[1:])
    return _cast(result, x.dtype if dtype is None else dtype)


def _sum_over_rows(x: RowSparse, values: Tensor, dims: list[int]) -> Tensor:
    k = x.row_ndim
    kept = [d for d in range(k) if d not in dims]
    if not kept:
        return values.sum(0)
    places, lead = torch.unravel_index(x.rows, x.shape[:k]), [x.shape[d] for d in kept]
    rows = counted([places[d] for d in kept], lead)
    if k - 1 in kept:
        return scatter_rows(values, rows, (*lead, *values.shape[1:]))
    sums = index_sum(values, rows, math.prod(lead)).to(values.dtype)
    return sums.view(*lead, *values.shape[1:])


def _dims(call: str, x: RowSparse, dim: Any) -> list[int]:
    """Return dimensions in ascending order, counted from the start. None means all dimensions."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(x.ndim))
    return sorted(_counted_dims(call, x, [dim] if isinstance(dim, int) else dim))


def _counted_dims(call: str, x: RowSparse, dims: Sequence[int]) -> list[int]:
    """Return dimensions counted from the start."""
    found = [d % x.ndim for d in dims]
    if any(not -x.ndim <= d < x.ndim for d in dims) or len(set(found)) < len(found):
        raise ValueError(
            f"{call}(x, dim={tuple(dims)}): x is {tuple(x.shape)}, so dim must be from {-x.ndim} to {x.ndim - 1}, "
            "and none twice."
        )
    return found


def mean(x: RowSparse, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Average over dimensions, including rows that are not stored."""
    count = math.prod(x.shape[d] for d in _dims("mean", x, dim))
    sums = total(x, dim, keepdim, dtype=widened(x.values).dtype if dtype is None else dtype)
    return _cast(sums / count, x.dtype if dtype is None else dtype)


def vector_norm(
    x: RowSparse, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute the norm of all elements. Rows that are not stored do not change it."""
    if dim is not None or keepdim or not isinstance(ord, (int, float)) or ord < 0:
        raise unknown(f"norm(x, {ord}, dim={dim})", "only the norm of all elements, of order 0 or more, is")
    if not x.values.numel():
        return x.values.sum(dtype=dtype)
    return linalg.vector_norm(x.values, ord, dtype=dtype)


def norm(
    x: RowSparse,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``torch.norm`` of all elements."""
    if out is not None:
        raise unknown("norm(x, out=)", "it returns a new tensor")
    return vector_norm(x, 2 if p in (None, "fro") else p, dim, keepdim, dtype=dtype)


def extremum(function: Callable[[Tensor], Tensor]) -> Handler:
    """Return the maximum or minimum of all elements, including zeros of rows that are not stored."""

    def apply(x: RowSparse, *how: Any, **more: Any) -> Tensor:
        if how or more:
            raise unknown("max(x, ...) or min(x, ...)", "only that of all elements is")
        values = x.values.flatten()
        return function(values if values.numel() == x.numel() else torch.cat([values, values.new_zeros(1)]))

    return apply


def index_select(x: RowSparse, dim: int, index: Tensor) -> Tensor:
    """Select rows, stored or not. The result is dense."""
    if _counted_dims("index_select", x, [dim]) != [0] or x.row_ndim != 1:
        raise unknown(f"index_select(x, {dim}, index)", "only the rows of one table are selected, by dim=0")
    return gather_rows(x, index)


def counted(places: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the row numbers of positions in a stack of tables: the inverse of ``torch.unravel_index``."""
    rows = torch.zeros_like(places[0])
    for place, size in zip(places, shape, strict=True):
        rows = rows * size + place
    return rows


def view(x: RowSparse, size: Sequence[int]) -> RowSparse:
    """Return a view with another shape, in which rows stay whole."""
    known = -math.prod(size) if -1 in size else 1
    shape = tuple(x.numel() // known if n == -1 else n for n in size)
    num_rows = math.prod(x.shape[: x.row_ndim])
    for k in range(1, len(shape) + 1):
        if math.prod(shape[:k]) == num_rows:
            break
    else:
        raise unknown(f"view(x, {shape}) of shape {tuple(x.shape)}", "it would cut rows into pieces")
    if shape[k:] == x.shape[x.row_ndim :]:
        return wrap(x.kept, shape)
    return wrap(RowStorage(x.rows, x.kept.values.reshape(-1, *shape[k:]), writable=False), shape)


def cut(
    x: RowSparse, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> RowSparse:
    """Return a slice within rows, or of the rows of one table."""
    (dim,) = _counted_dims("slice", x, [dim])
    start, end, step = slice(start, end, step).indices(x.shape[dim])
    shape = (*x.shape[:dim], len(range(start, end, step)), *x.shape[dim + 1 :])
    if dim >= x.row_ndim:
        within = [slice(None)] * (dim - x.row_ndim + 1)
        values = x.kept.values[(*within, slice(start, end, step))]
        return wrap(RowStorage(x.rows, values, writable=False), shape)
    if dim or x.row_ndim > 1 or step != 1:
        raise unknown(f"slice(x, dim={dim}, step={step})", "only one table is cut, in steps of 1")
    inside = (x.rows >= start) & (x.rows < end)
    return wrap(RowStorage(x.rows[inside] - start, x.kept.values[inside], writable=False), shape)


def put_back(x: RowSparse, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> RowSparse:
    """Write a slice into a tensor of zeros: the derivative of :func:`cut`."""
    dim %= x.ndim
    if dim >= x.row_ndim:
        inner = (len(x.rows), *sizes[x.row_ndim :])
        values = torch.ops.aten.slice_backward(x.kept.values, inner, dim - x.row_ndim + 1, start, end, step)
        return wrap(RowStorage(x.rows, values), sizes)
    if dim or x.row_ndim > 1 or step != 1:
        raise unknown(f"slice_backward(x, dim={dim}, step={step})", "only one table is cut, in steps of 1")
    return wrap(RowStorage(x.rows + start, x.kept.values.clone()), sizes)


def permute(x: RowSparse, dims: Sequence[int]) -> RowSparse:
    """Permute the tables of a stack."""
    k, dims = x.row_ndim, _counted_dims("permute", x, dims)
    if dims[k:] != list(range(k, x.ndim)):
        raise unknown(f"permute(x, {dims})", "rows must stay whole")
    places = torch.unravel_index(x.rows, x.shape[:k])
    rows = counted([places[d] for d in dims[:k]], [x.shape[d] for d in dims[:k]])
    result = scatter_rows(x.values, rows, [x.shape[d] for d in dims])
    result.kept.writable = False
    return result


def alias(x: RowSparse) -> RowSparse:
    """Return a tensor that shares the rows and values of ``x``."""
    return wrap(x.kept, x.shape)


def clone(x: RowSparse, *, memory_format: torch.memory_format | None = None) -> RowSparse:
    """Return a tensor with a copy of the values."""
    return wrap(RowStorage(x.rows, x.kept.values.clone()), x.shape)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor. ``Tensor.to`` is not available for operations that torch calls in a backward pass."""
    if x.dtype == dtype:
        return x
    return to_copy(x, dtype=dtype) if isinstance(x, RowSparse) else x.to(dtype)


def to_copy(
    x: RowSparse, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **layout: Any
) -> RowSparse:
    """Convert the dtype or the device."""
    device = device or x.device
    return wrap(RowStorage(x.rows.to(device), x.kept.values.to(device, dtype, copy=True)), x.shape)


def zeros_like(x: RowSparse, *, dtype: torch.dtype | None = None, **layout: Any) -> RowSparse:
    """Return a tensor without rows."""
    return wrap(
        RowStorage(x.rows[:0], x.kept.values.new_zeros((0, *x.kept.values.shape[1:]), dtype=dtype)), x.shape
    )


def new_empty_strided(x: RowSparse, size: Sequence[int], stride: Sequence[int], **how: Any) -> RowSparse:
    """Return a tensor without rows, into which torch then copies a gradient for ``.grad``."""
    if tuple(size) != tuple(x.shape):
        raise unknown(f"new_empty_strided(x, {tuple(size)})", "only a tensor of the same shape is made")
    return zeros_like(x, **how)


def copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Write a tensor into another. A dense target becomes zero in rows that are not stored."""
    if isinstance(target, RowSparse):
        return write(target, as_rows(source, target))
    return add_into(target.zero_(), source)


def _named(handler: Handler, *names: str) -> dict[Any, Handler]:
    """Return a handler for every function of torch with one of these names."""
    places = (torch, Tensor)
    return {getattr(place, name): handler for name in names for place in places if hasattr(place, name)}


OPERATIONS |= {
    aten.add: add,
    aten.add_: add_into,
    aten.sub: lambda x, y, alpha=1: add(x, y, alpha=-alpha),
    aten.sub_: lambda x, y, alpha=1: add_into(x, y, alpha=-alpha),
    aten.rsub: lambda x, y, alpha=1: add(y, x, alpha=-alpha),
    aten.mul: multiply,
    aten.mul_: in_place(multiply),
    aten.div: divide,
    aten.div_: in_place(divide),
    aten.neg: elementwise(torch.neg),
    aten.neg_: in_place(elementwise(torch.neg)),
    aten.abs: elementwise(torch.abs),
    aten.sgn: elementwise(torch.sgn),
    aten.pow: raised,
    aten.sum: total,
    aten.mean: mean,
    aten.linalg_vector_norm: vector_norm,
    aten.index_select: index_select,
    aten.is_same_size: lambda x, y: x.shape == y.shape,
    aten._has_same_storage_numel: lambda x, y: x.shape == y.shape,
    aten.view: view,
    aten.slice: cut,
    aten.slice_backward: put_back,
    aten.permute: permute,
    aten.detach: alias,
    aten.alias: alias,
    aten.clone: clone,
    aten._to_copy: to_copy,
    aten.zeros_like: zeros_like,
    aten.new_empty_strided: new_empty_strided,
    aten.zero_: in_place(zeros_like),
    aten.copy_: copy_into,
}


FUNCTIONS |= {
    **_named(multiply, "mul", "multiply", "__mul__", "__rmul__"),
    **_named(divide, "div", "divide", "true_divide", "__truediv__"),
    **_named(raised, "pow", "__pow__"),
    **_named((lambda x: raised(x, 2)), "square"),
    **_named(elementwise(torch.abs), "abs", "absolute", "__abs__"),
    **_named(elementwise(torch.sign), "sign", "sgn"),
    **_named(total, "sum"),
    **_named(mean, "mean"),
    **_named(norm, "norm"),
    linalg.vector_norm: vector_norm,
    **_named(extremum(torch.max), "max"),
    **_named(extremum(torch.min), "min"),
    **_named(index_select, "index_select"),
}
