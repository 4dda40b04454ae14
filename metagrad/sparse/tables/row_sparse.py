"""Row-sparse tensors, most rows of which are zero, such as the gradient of an embedding table.

Two operations are closed under differentiation, and everything else is composed from them: to gather rows from a
table, and to scatter rows into one. The derivative of each is the other, so the gradient of a table, of any
order, costs what the rows cost and not what the table would.
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
from metagrad.core.checks import check_type, is_integer, is_sequence
from metagrad.sparse.checks import check_floating
from metagrad.sparse.kernels.derivatives import Kernel, nestable
from metagrad.sparse.kernels.products import index_sum
from metagrad.sparse.policy import count_densified

HOLE = torch.iinfo(torch.int64).min
"""An id that names no row: zeros are gathered for it, and what is scattered to it is dropped."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Functions of torch whose derivatives torch would compute from the whole table; `row_operations` has ours."""

OPERATIONS: dict[Any, Callable[..., Any]] = {}
"""What torch calls below its tape, in `row_operations`; what is not in it raises."""


Operation: TypeAlias = Callable[..., Tensor]


def _operator(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda self, other: function(self, other)


class RowSparse(TensorSubclass):
    r"""A tensor that is zero except in some rows; the cotangent of an embedding table.

    .. math:: X_{r_i} = v_i, \qquad X_j = 0 \text{ for } j \notin r

    It stands where a gradient stands: in ``.grad``, where it accumulates, and in what ``torch.autograd.grad``
    returns, where it can be differentiated again, at every order. Its linear arithmetic, products, positive
    powers, sums and norms keep to the rows; ``dense - lr * x`` is dense; ``dense.add_(x, alpha=-lr)`` writes the
    rows alone. Any other operation raises, because its result would be dense.

    Args:
        rows: Which rows are kept, ``[R]``, int64, ascending and without duplicates. Of a stack of tables,
            ``shape`` ``[tables, V, ...]``, row ``v`` of table ``t`` is row ``t * V + v``.
        values: Their values, ``[R, D...]``, in the dtype and on the device of the tensor.
        shape: The shape of the whole, ``[V, D...]``, or ``[tables, V, D...]`` of a stack.

    Raises:
        ValueError: Shapes do not fit each other, or rows are out of range, unsorted or duplicated.
        TypeError: ``rows`` is not int64; later, when an operation is not one that keeps to rows.

    Note:
        Inside a ``torch.func`` transform the gradient is hidden in torch's own wrapper: ``rows`` and ``values``
        cannot be reached, and derivatives of functions of it are torch's own formulas. They are right or raise,
        but the derivative of a product with a dense tensor is dense there.

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

    kept: Kept  # below the tape
    if not TYPE_CHECKING:
        is_sparse = True  # for torch.optim

    @property
    def rows(self) -> Tensor:
        """The kept rows, ``[R]``, ascending."""
        return self.kept.rows

    @property
    def values(self) -> Tensor:
        """The values of the kept rows, ``[R, D...]``, on the tape of this tensor; not to be written into."""
        if _torch.has_torch_function(self):
            return handle_torch_function(_VALUES, (self,), self)
        return gather_rows(self, self.rows, self.row_ndim, unique=True)

    @property
    def row_ndim(self) -> int:
        """How many of the first dimensions count rows: 1, and more of a stack of tables."""
        return self.ndim - self.kept.values.ndim + 1

    # A TypeError inside one of torch's operators becomes NotImplemented, for which Python raises a message of its
    # own, or returns False for ==. Functions raise ours.
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
        """Make a :class:`RowSparse` of rows in any order, adding up duplicates; differentiable in ``values``.

        Args:
            rows: ``[N]``, int64.
            values: ``[N, D...]``.
            shape: The shape of the whole, ``[V, D...]``.

        Raises:
            ValueError: Shapes do not fit each other, or rows are out of range.
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
        """Return the whole as a strided tensor, differentiably; this is the only way to it."""
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        count_densified(dense.nbytes)
        return dense + self

    def to_coo(self) -> Tensor:
        """Return a hybrid COO tensor, for optimizers of ``torch.optim``; *detached*, as torch would cut it."""
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


class Kept:
    """Rows and values, shared by a tensor and its detached aliases, so that all see a write in place."""

    def __init__(self, rows: Tensor, values: Tensor, *, writable: bool = True) -> None:
        self.rows = rows
        self.values = values
        self.writable = writable


def wrap(kept: Kept, shape: Sequence[int]) -> RowSparse:
    """Make a tensor of rows and values that are known to be right, outside of any graph."""
    result: RowSparse = _torch.make_wrapper_subclass(
        RowSparse, tuple(shape), dtype=kept.values.dtype, device=kept.values.device
    )
    result.kept = kept
    return result


def unknown(call: str, reason: str) -> TypeError:
    """Make the error of an operation that would be dense."""
    return TypeError(
        f"{call}: not an operation on RowSparse: {reason}. Work on its .values (those of the kept rows), or make "
        "it dense by .to_dense(), or a COO tensor by .to_coo(). As a gradient it goes into mg.optim.SparseAdam, "
        "torch.optim.Adagrad or torch.optim.SGD."
    )


def _refuse_out(name: str, kwargs: Mapping[str, Any] | None) -> None:
    if kwargs and kwargs.get("out") is not None:
        raise unknown(f"{name}(..., out)", "it writes into a tensor that is given")


def check_range(name: str, ids: Tensor, row_shape: Sequence[int], holes: bool = False) -> None:
    """Raise if an id is out of range, where that can be seen without waiting."""
    # On an accelerator a look at the values would stall it; its kernels assert the range themselves.
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
    """Refuse rows that are unsorted or duplicated."""
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
        raise ValueError(
            f"{call}: shape must be [V, ...] with rows of shape {width}, as values has, got {shape}."
        )
    check_range(f"{call}: rows", rows, shape[:row_ndim])


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
    return _GatherRows.apply(table, ids, Places(), row_ndim, unique, holes)


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
    return _ScatterRows.apply(source, ids, Places(), tuple(shape), unique, holes)


class Places:
    """Where the ids of a lookup are among its rows: checked and found once, for derivatives of every order."""

    _is_checked = False
    _distinct: tuple[Tensor, Tensor] | None = None  # the rows, and the place of each id among them

    def check(self, ids: Tensor, row_shape: Sequence[int], holes: bool) -> None:
        """Raise if an id is out of range."""
        if not self._is_checked:
            check_range("embedding(ids, table): ids", ids, row_shape, holes)
            self._is_checked = True

    def look_up(self, table: RowSparse, ids: Tensor) -> Tensor:
        """Gather rows ``[N]``, kept or not, below the tape."""
        if self._distinct is not None and self._distinct[0] is table.kept.rows:
            return table.kept.values.index_select(0, self._distinct[1])
        return look_up(table, ids)

    def summed(self, ids: Tensor, source: Tensor, holes: bool) -> tuple[Tensor, Tensor]:
        """Return the rows there are, and the sum of the vectors of each, ``[R, D...]``."""
        rows, place = self._distinct = self._distinct or _torch.distinct_and_places(ids)
        values = index_sum(source, place, len(rows)).to(source.dtype)
        if holes and len(rows) and rows[0] == HOLE:
            return rows[1:], values[1:]
        return rows, values


_Inputs: TypeAlias = tuple[Tensor, Tensor, Places, Any, bool, bool]
_Gradients: TypeAlias = tuple[Tensor | None, None, None, None, None, None]


class _RowsContext(Context, Protocol):
    """What the derivatives of a lookup, or of a sum into a table, have."""

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
            return wrap(Kept(rows, values), shape)

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


def look_up(table: RowSparse, ids: Tensor) -> Tensor:
    """Gather rows ``[N]``, kept or not, below the tape."""
    rows, values = table.kept.rows, table.kept.values
    found = values.new_zeros(len(ids), *values.shape[1:])
    if not len(rows):
        return found
    place = torch.searchsorted(rows.contiguous(), ids.contiguous()).clamp_(max=len(rows) - 1)
    hit = (rows[place] == ids).view(-1, *[1] * (values.ndim - 1))
    return torch.where(hit, values.index_select(0, place), found)


def written_out(tensor: Tensor) -> Tensor:
    """Materialise the zero tensors that torch's derivative formulas return, which operations below the tape read."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor
