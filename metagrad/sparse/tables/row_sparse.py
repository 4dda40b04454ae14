"""Row-sparse tensors, such as the gradient of an embedding table. Most of their rows are zero.

Everything is composed from two operations: gather rows from a table, and scatter rows into a table. Each
operation is the derivative of the other. So the cost of a gradient of any order depends only on its rows, not
on the size of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from metagrad.core import _torch
from metagrad.core._torch import Context, TensorSubclass, VmapInfo
from metagrad.core.checks import check_type, is_integer, is_sequence, refuse
from metagrad.sparse.checks import check_floating
from metagrad.sparse.kernels.derivatives import Kernel, nestable
from metagrad.sparse.kernels.products import index_sum
from metagrad.sparse.policy import count_densified

HOLE = torch.iinfo(torch.int64).min
"""An id that belongs to no row. Gathering it gives zeros, and values scattered to it are dropped."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Functions of torch that `row_operations` replaces, because torch would differentiate them with the whole table."""

OPERATIONS: dict[Any, Callable[..., Any]] = {}
"""Operations that torch calls below autograd, from `row_operations`. Other operations raise ``TypeError``."""


Operation: TypeAlias = Callable[..., Tensor]


def _operator(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda self, other: function(self, other)


class RowSparse(TensorSubclass):
    r"""A tensor that is zero except in some rows, such as the gradient of an embedding table.

    .. math:: X_{r_i} = v_i, \qquad X_j = 0 \text{ for } j \notin r

    It accumulates in ``.grad``. ``torch.autograd.grad`` returns it, and it can be differentiated at every order.
    Linear arithmetic, products, positive powers, sums and norms use only stored rows. ``dense - lr * x`` is dense.
    ``dense.add_(x, alpha=-lr)`` changes only the stored rows. Other operations raise, because their result is dense.

    ``torch.optim.SGD``, ``Adagrad``, ``SparseAdam`` and ``torch.amp.GradScaler`` read it as a sparse gradient.

    Args:
        rows: Numbers of the stored rows, ``[R]``, int64, ascending, without duplicates. Row ``v`` of table ``t`` in a
            stack of tables ``[tables, V, ...]`` has the number ``t * V + v``.
        values: Values of the rows, ``[R, D...]``.
        shape: Shape of the tensor, ``[V, D...]``, or ``[tables, V, D...]`` for a stack.

    Raises:
        ValueError: Shapes do not match, or rows are out of range, unsorted or duplicated.
        TypeError: ``rows`` is not int64. Later, an operation is not supported.

    Note:
        Inside a ``torch.func`` transform the gradient is hidden in a wrapper of torch, without ``rows`` and
        ``values``. Functions of it use torch's derivative formulas, which are correct or raise an error. The
        derivative of a product with a dense tensor is dense.

    Example:
        >>> from metagrad.sparse.tables.row_sparse import RowSparse
        >>> x = RowSparse(torch.tensor([0, 2]), torch.ones(2, 2), (3, 2))
        >>> (2 * x).to_dense().tolist()
        [[2.0, 2.0], [0.0, 0.0], [2.0, 2.0]]
        >>> x + x
        RowSparse(rows=tensor([0, 2]), shape=(3, 2), values=
        tensor([[2., 2.],
                [2., 2.]]))

    References:
        Sparse gradients as values of the differentiated language: Maclaurin, "Modeling, inference and
        optimization with composable differentiable procedures", Harvard, 2016, chapter 4.
    """

    kept: RowStorage  # without an autograd graph
    if not TYPE_CHECKING:
        is_sparse = True  # for torch.optim

    @property
    def rows(self) -> Tensor:
        """Numbers of the stored rows, ``[R]``, int64, ascending."""
        return self.kept.rows

    @property
    def values(self) -> Tensor:
        """Values of the stored rows, ``[R, D...]``, differentiable. Do not write into them."""
        if _torch.has_torch_function(self):
            return handle_torch_function(_VALUES, (self,), self)
        return gather_rows(self, self.rows, self.row_ndim, unique=True)

    @property
    def row_ndim(self) -> int:
        """Number of leading dimensions that count rows: 1, or more for a stack of tables."""
        return self.ndim - self.kept.values.ndim + 1

    # torch's operators turn a TypeError into NotImplemented. Python then raises another message, or returns False for
    # ==. torch's functions raise our error.
    __add__: ClassVar[Operation] = _operator(torch.add)
    __radd__: ClassVar[Operation] = _operator(torch.add)
    __sub__: ClassVar[Operation] = _operator(torch.sub)
    __rsub__: ClassVar[Operation] = _operator(torch.rsub)
    __mul__: ClassVar[Operation] = _operator(torch.mul)
    __rmul__: ClassVar[Operation] = _operator(torch.mul)
    __truediv__: ClassVar[Operation] = _operator(torch.div)
    __rtruediv__: ClassVar[Operation] = _operator(lambda self, other: torch.reciprocal(self) * other)
    __pow__: ClassVar[Operation] = _operator(torch.pow)
    __eq__: ClassVar[Operation] = _operator(torch.eq)
    __ne__: ClassVar[Operation] = _operator(torch.ne)
    __hash__: ClassVar[Callable[[Tensor], int]] = Tensor.__hash__

    def __new__(cls, rows: Tensor, values: Tensor, shape: Sequence[int]) -> RowSparse:  # noqa: D102
        call = "RowSparse(rows, values, shape)"
        _check_parts(call, rows, values, shape)
        remedy = " Call RowSparse.from_rows(rows, values, shape), which sorts them and adds duplicates up."
        check_ascending(call, rows, remedy)
        return scatter_rows(values, rows, shape, unique=True)

    @staticmethod
    def from_rows(rows: Tensor, values: Tensor, shape: Sequence[int]) -> RowSparse:
        """Return the :class:`RowSparse` of rows in any order. Duplicates are added, differentiably.

        Args:
            rows: ``[N]``, int64.
            values: ``[N, D...]``.
            shape: Shape of the result, ``[V, D...]``.

        Raises:
            ValueError: Shapes do not match, or rows are out of range.
            TypeError: ``rows`` is not int64.

        Example:
            >>> from metagrad.sparse.tables.row_sparse import RowSparse
            >>> x = RowSparse.from_rows(torch.tensor([2, 0, 2]), torch.ones(3, 1), (3, 1))
            >>> x.rows.tolist(), x.values.tolist()
            ([0, 2], [[1.0], [2.0]])
        """
        _check_parts("RowSparse.from_rows(rows, values, shape)", rows, values, shape)
        return scatter_rows(values, rows, shape)

    def to_dense(self) -> Tensor:
        """Return the dense tensor, differentiably."""
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        count_densified(dense.nbytes)
        return dense + self

    def to_coo(self) -> Tensor:
        """Return a hybrid COO tensor for optimizers of ``torch.optim``. It is *detached*."""
        with _torch.without_torch_function_of_subclasses():
            indices = torch.stack(torch.unravel_index(self.rows, self.shape[: self.row_ndim]))
            return _torch.sparse_coo_tensor(
                indices, self.kept.values, self.shape, is_coalesced=True, check_invariants=False
            )

    def coalesce(self) -> Tensor:
        """Return :meth:`to_coo`, which is how optimizers of ``torch.optim`` read a sparse gradient."""
        return self.to_coo()

    def _values(self) -> Tensor:
        """Return the stored values themselves, which ``torch.amp.GradScaler`` scales in place."""
        return self.kept.values

    def __reduce_ex__(self, protocol: Any) -> tuple[type[RowSparse], tuple[Tensor, Tensor, tuple[int, ...]]]:
        return RowSparse, (self.rows, self.kept.values, tuple(self.shape))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        kept, shape = self.kept, tuple(self.shape)
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"RowSparse(rows={kept.rows}, shape={shape}{grad}, values=\n{kept.values})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with _torch.without_torch_function_of_subclasses():
            handler = FUNCTIONS.get(func)
            if handler is not None:
                _refuse_out(func.__name__, kwargs)
            return (handler or func)(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = OPERATIONS.get(func.overloadpacket)
        if handler is None:
            raise unknown(f"{func.overloadpacket.__name__}(...)", "it is not known to keep to the rows")
        _refuse_out(func.overloadpacket.__name__, kwargs)
        with torch.no_grad():
            return handler(*args, **kwargs or {})


_VALUES: Callable[[RowSparse], Tensor] = vars(RowSparse)["values"].fget


class RowStorage:
    """Rows and values. A tensor and its detached aliases share them, so that all see in-place writes."""

    def __init__(self, rows: Tensor, values: Tensor, *, writable: bool = True) -> None:
        self.rows = rows
        self.values = values
        self.writable = writable


def wrap(kept: RowStorage, shape: Sequence[int]) -> RowSparse:
    """Return a tensor of rows and values, without checks and without an autograd graph."""
    result: RowSparse = _torch.make_wrapper_subclass(
        RowSparse, tuple(shape), dtype=kept.values.dtype, device=kept.values.device
    )
    result.kept = kept
    return result


def unknown(call: str, reason: str) -> TypeError:
    """Return the error of an operation that is not supported."""
    return TypeError(
        f"{call}: not an operation on RowSparse: {reason}. Work on its .values (those of the kept rows), or make "
        "it dense by .to_dense(), or a COO tensor by .to_coo(). As a gradient it goes into mg.optim.SparseAdam, "
        "torch.optim.Adagrad or torch.optim.SGD."
    )


def _refuse_out(name: str, kwargs: Mapping[str, Any] | None) -> None:
    if kwargs and kwargs.get("out") is not None:
        raise unknown(f"{name}(..., out)", "it writes into a tensor that is given")


def check_range(name: str, ids: Tensor, row_shape: Sequence[int], holes: bool = False) -> None:
    """Raise ``ValueError`` if an id is out of range, on a CPU."""
    # Reading values would stall an accelerator. Its kernels check the range.
    if ids.device.type != "cpu":
        return
    num_rows = math.prod(row_shape)
    present = ids[ids != HOLE] if holes else ids
    if not len(present):
        return
    low, high = (int(bound) for bound in torch.aminmax(present))
    if low < 0 or high >= num_rows:
        raise ValueError(
            f"{name} must be from 0 to {num_rows - 1}, for there are {num_rows} rows, got "
            f"{low if low < 0 else high}."
        )


def check_ascending(call: str, rows: Tensor, remedy: str = "") -> None:
    """Raise ``ValueError`` unless rows are sorted and without duplicates."""
    if bool((rows[1:] <= rows[:-1]).any()):
        raise ValueError(f"{call}: rows must ascend without duplicates.{remedy}")


def check_int64(call: str, rows: Tensor) -> None:
    """Raise ``TypeError`` unless rows are int64."""
    check_type(f"{call}: rows", rows, Tensor)
    if rows.dtype != torch.int64:
        raise TypeError(f"{call}: rows must be int64, got {rows.dtype}. Call rows.long().")


def _check_parts(call: str, rows: Tensor, values: Tensor, shape: Sequence[int]) -> None:
    check_int64(call, rows)
    check_floating(call, "values", values)
    if not is_sequence(shape) or not all(map(is_integer, shape)):
        raise TypeError(f"{call}: shape must be a sequence of ints, got {shape!r}.")
    shape, width = tuple(shape), tuple(values.shape[1:])
    if rows.ndim != 1 or values.ndim < 1 or len(rows) != len(values):
        raise ValueError(
            f"{call}: rows must be 1-d, one for each of values' rows, got shapes {tuple(rows.shape)} and "
            f"{tuple(values.shape)}."
        )
    row_ndim = len(shape) - len(width)
    if row_ndim < 1 or shape[row_ndim:] != width:
        refuse(f"{call}: shape", f"[V, ...] with rows of shape {width}, as values has", shape)
    check_range(f"{call}: rows", rows, shape[:row_ndim])


def gather_rows(
    table: Tensor, ids: Tensor, row_ndim: int = 1, *, unique: bool = False, holes: bool = False
) -> Tensor:
    r"""Gather rows, :math:`y_i = T_{\mathrm{ids}_i}`. The derivative is :func:`scatter_rows`.

    Args:
        table: ``[V, D...]``, dense or :class:`RowSparse`.
        ids: Row numbers, int64, of any shape. In a stack of tables they count through all tables.
        row_ndim: Number of leading dimensions of ``table`` that count rows.
        unique: True if ``ids`` is 1-d, ascending and without duplicates.
        holes: True if ``ids`` may contain :data:`HOLE`.

    Returns:
        ``[*ids.shape, D...]``.
    """
    return _GatherRows.apply(table, ids, Places(), row_ndim, unique, holes)


def scatter_rows(
    source: Tensor, ids: Tensor, shape: Sequence[int], *, unique: bool = False, holes: bool = False
) -> RowSparse:
    r"""Sum rows, :math:`X_r = \sum_{i:\, \mathrm{ids}_i = r} s_i`. The derivative is :func:`gather_rows`.

    Args:
        source: ``[*ids.shape, D...]``.
        ids: Row numbers, int64, of any shape.
        shape: Shape of the result, ``[V, D...]``.
        unique: True if ``ids`` is 1-d, ascending and without duplicates.
        holes: True if ``ids`` may contain :data:`HOLE`.
    """
    return _ScatterRows.apply(source, ids, Places(), tuple(shape), unique, holes)


class Places:
    """Positions of the ids of a lookup among its rows, which derivatives of every order share."""

    _is_checked = False
    _distinct: tuple[Tensor, Tensor] | None = None  # the rows, and the place of each id among them

    def check(self, ids: Tensor, row_shape: Sequence[int], holes: bool) -> None:
        """Raise ``ValueError`` if an id is out of range."""
        if not self._is_checked:
            check_range("embedding(ids, table): ids", ids, row_shape, holes)
            self._is_checked = True

    def look_up(self, table: RowSparse, ids: Tensor) -> Tensor:
        """Gather rows ``[N]``, stored or not, without an autograd graph."""
        if self._distinct is not None and self._distinct[0] is table.kept.rows:
            return table.kept.values.index_select(0, self._distinct[1])
        return look_up(table, ids)

    def summed(self, ids: Tensor, source: Tensor, holes: bool) -> tuple[Tensor, Tensor]:
        """Return the distinct rows and the sum of the vectors of each row, ``[R, D...]``."""
        rows, place = self._distinct = self._distinct or _torch.distinct_and_places(ids)
        values = index_sum(source, place, len(rows)).to(source.dtype)
        if holes and len(rows) and rows[0] == HOLE:
            return rows[1:], values[1:]
        return rows, values


_Inputs: TypeAlias = tuple[Tensor, Tensor, Places, Any, bool, bool]
_Gradients: TypeAlias = tuple[Tensor | None, None, None, None, None, None]


class _RowsContext(Context, Protocol):
    """The saved arguments of a gather or a scatter."""

    places: Places
    shape: tuple[int, ...]  # of the table
    row_ndim: int
    how: list[bool]


class _GatherRows(Kernel):
    @staticmethod
    def forward(
        table: Tensor, ids: Tensor, places: Places, row_ndim: int, unique: bool, holes: bool
    ) -> Tensor:
        with _torch.without_torch_function():
            if isinstance(table, RowSparse) and ids is table.rows:
                return table.kept.values.detach()
            flat = ids.reshape(-1)
            places.check(flat, table.shape[:row_ndim], holes)
            found = (
                places.look_up(table, flat)
                if isinstance(table, RowSparse)
                else take(table, flat, row_ndim, holes)
            )
            return found.view(*ids.shape, *found.shape[1:])

    @staticmethod
    def setup_context(ctx: _RowsContext, inputs: _Inputs, output: Tensor) -> None:
        table, ids, ctx.places, ctx.row_ndim, *ctx.how = inputs
        ctx.shape = tuple(table.shape)
        ctx.save_for_backward(ids)
        ctx.save_for_forward(ids)

    @staticmethod
    def backward(ctx: _RowsContext, cotangent: Tensor) -> _Gradients:
        source = _ScatterRows.apply(cotangent, *ctx.saved_tensors, ctx.places, ctx.shape, *ctx.how)
        return source, None, None, None, None, None

    @staticmethod
    @nestable
    def jvp(ctx: _RowsContext, tangent: Tensor, *_: None) -> Tensor:
        return _GatherRows.apply(tangent, *ctx.saved_tensors, ctx.places, ctx.row_ndim, *ctx.how)

    @staticmethod
    def vmap(
        info: VmapInfo,
        in_dims: Sequence[int | None],
        table: Tensor,
        ids: Tensor,
        places: Places,
        row_ndim: int,
        unique: bool,
        holes: bool,
    ) -> tuple[Tensor, int]:
        if in_dims[0] is None:
            return gather_rows(table, _batched(ids, in_dims[1], info.batch_size), row_ndim, holes=holes), 0
        table = _batched(table, in_dims[0], info.batch_size)
        ids = _counted_through(ids, in_dims[1], info.batch_size, table.shape[1 : 1 + row_ndim], holes)
        return gather_rows(table, ids, row_ndim + 1, unique=unique, holes=holes), 0


class _ScatterRows(Kernel):
    @staticmethod
    def forward(
        source: Tensor, ids: Tensor, places: Places, shape: tuple[int, ...], unique: bool, holes: bool
    ) -> RowSparse:
        with _torch.without_torch_function():
            width = source.shape[ids.ndim :]
            values = written_out(source.detach()).reshape(ids.numel(), *width)
            rows, values = (ids, values) if unique else places.summed(ids.reshape(-1), values, holes)
            return wrap(RowStorage(rows, values), shape)

    @staticmethod
    def setup_context(ctx: _RowsContext, inputs: _Inputs, output: RowSparse) -> None:
        source, ids, ctx.places, ctx.shape, *ctx.how = inputs
        ctx.row_ndim = len(ctx.shape) - (source.ndim - ids.ndim)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.save_for_forward(ids)

    @staticmethod
    def backward(ctx: _RowsContext, cotangent: Tensor | None) -> _Gradients:
        if cotangent is None:
            return None, None, None, None, None, None
        table = _GatherRows.apply(cotangent, *ctx.saved_tensors, ctx.places, ctx.row_ndim, *ctx.how)
        return table, None, None, None, None, None

    @staticmethod
    @nestable
    def jvp(ctx: _RowsContext, tangent: Tensor, *_: None) -> RowSparse:
        return _ScatterRows.apply(tangent, *ctx.saved_tensors, ctx.places, ctx.shape, *ctx.how)

    @staticmethod
    def vmap(
        info: VmapInfo,
        in_dims: Sequence[int | None],
        source: Tensor,
        ids: Tensor,
        places: Places,
        shape: tuple[int, ...],
        unique: bool,
        holes: bool,
    ) -> tuple[RowSparse, int]:
        size = info.batch_size
        row_shape = shape[
            : len(shape) - (source.ndim - ids.ndim) + (in_dims[0] is not None) - (in_dims[1] is not None)
        ]
        ids = _counted_through(ids, in_dims[1], size, row_shape, holes)
        source = _batched(source, in_dims[0], size)
        return scatter_rows(source, ids, (size, *shape), unique=unique, holes=holes), 0


def _counted_through(
    ids: Tensor, batch_dim: int | None, size: int, row_shape: Sequence[int], holes: bool
) -> Tensor:
    """Return row numbers that count through all tables of a batch."""
    num_rows = math.prod(row_shape)
    ids = _batched(ids, batch_dim, size)
    first = torch.arange(size, device=ids.device).mul_(num_rows).view(-1, *[1] * (ids.ndim - 1))
    return torch.where(ids == HOLE, HOLE, ids + first) if holes else ids + first


def _batched(tensor: Tensor, batch_dim: int | None, size: int) -> Tensor:
    if batch_dim is None:
        return tensor.expand(size, *tensor.shape)
    return tensor.movedim(batch_dim, 0) if batch_dim else tensor


def take(table: Tensor, ids: Tensor, row_ndim: int, holes: bool) -> Tensor:
    """Gather rows ``[N]`` from a dense table, without an autograd graph."""
    row_shape = table.shape[:row_ndim]
    absent = ids == HOLE if holes else None
    if absent is not None:
        ids = ids.masked_fill(absent, 0)
    found = table.index_select(0, ids) if row_ndim == 1 else table[torch.unravel_index(ids, row_shape)]
    if absent is not None:
        found = found.masked_fill_(absent.view(-1, *[1] * (found.ndim - 1)), 0)
    return found


def look_up(table: RowSparse, ids: Tensor) -> Tensor:
    """Gather rows ``[N]``, stored or not, without an autograd graph."""
    rows, values = table.kept.rows, table.kept.values
    found = values.new_zeros(len(ids), *values.shape[1:])
    if not len(rows):
        return found
    place = torch.searchsorted(rows.contiguous(), ids.contiguous()).clamp_(max=len(rows) - 1)
    hit = (rows[place] == ids).view(-1, *[1] * (values.ndim - 1))
    return torch.where(hit, values.index_select(0, place), found)


def written_out(tensor: Tensor) -> Tensor:
    """Return a tensor. If it is a zero tensor of torch's derivative formulas, materialize it."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor
