"""Tables that share all but a few rows with a base, which is not modified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from metagrad.core import _torch
from metagrad.core._torch import Context, VmapInfo
from metagrad.sparse.kernels.tangents import Kernel, nestable
from metagrad.sparse.tables.row_sparse import (
    Kept,
    Rows,
    check_ascending,
    check_int64,
    check_range,
    gather_rows,
    scatter_rows,
    take,
    wrap,
)


class RowTable(Rows):
    r"""A table that shares all but a few rows with a base: what row-wise optimizers make of a table.

    .. math:: T_{r_i} = v_i, \qquad T_j = s \, B_j \text{ for } j \notin r

    Making one copies nothing of the base. It is a tensor on the tape: ``embedding(ids, table)`` looks rows up,
    and its gradient, a :class:`RowSparse`, goes on to ``values``, ``base`` and ``scale``. Arithmetic on it raises,
    for it would copy the table: update it by a row-wise rule.

    Args:
        base: ``[V, D...]``, strided; shared, not copied. To write into it changes the table.
        rows: The rows that have values of their own, ``[R]``, int64, ascending and without duplicates.
        values: These, ``[R, D...]``.
        scale: What each of the other rows is multiplied by, ``[D...]``; None is 1.

    Raises:
        ValueError: Shapes do not fit each other, or rows are out of range, unsorted or duplicated.
        TypeError: ``rows`` is not int64.

    Note:
        Not for tables that ``vmap`` batches, and in forward mode only without ``scale``; both raise.

    Example:
        >>> from metagrad.sparse.tables.embedding import embedding
        >>> from metagrad.sparse.tables.row_table import RowTable
        >>> table = RowTable(torch.zeros(4, 2), torch.tensor([2]), torch.ones(1, 2))
        >>> embedding(torch.tensor([2, 3]), table)
        tensor([[1., 1.],
                [0., 0.]])
    """

    base: Tensor  # without its graph, as is the scale
    scale: Tensor | None

    def __new__(cls, base: Tensor, rows: Tensor, values: Tensor, scale: Tensor | None = None) -> RowTable:  # noqa: D102
        _check(base, rows, values, scale)
        return _Overlay.apply(base, values, scale, rows)

    def to_dense(self) -> Tensor:
        """Return the whole as a strided tensor, differentiably."""
        return gather_rows(self, torch.arange(len(self), device=self.device), unique=True)

    @torch.no_grad()
    def write_(self) -> Tensor:
        """Write the table into its base, in place, and return the base.

        Other tables made of the same base change with it, so a row-wise rule with weight decay starts anew then.
        """
        base = self.base
        if self.scale is not None:
            base.mul_(self.scale)
            self.scale = None
        return base.index_copy_(0, self.rows, self.kept.values)

    def elsewhere(self, ids: Tensor) -> Tensor:
        """Return rows ``[N]`` of the base, times the scale, ``[N, D...]``; below the tape."""
        found = take(self.base, ids, 1, holes=True)
        return found if self.scale is None else found * self.scale

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"RowTable({len(self.rows)} rows of their own, shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = _torch.disabled_torch_function

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.alias):
            return _alias(args[0])
        if func.overloadpacket in (torch.ops.aten.is_same_size, torch.ops.aten._has_same_storage_numel):
            return args[0].shape == args[1].shape
        if func.overloadpacket is torch.ops.aten.view and tuple(args[1]) == tuple(args[0].shape):
            return _alias(args[0])
        raise TypeError(
            f"{func.overloadpacket.__name__}(...): not an operation on RowTable: it would copy the whole table. Look "
            "rows up by embedding(ids, table), or make it dense by .to_dense()."
        )


def _alias(table: RowTable) -> RowTable:
    return _assembled(table.base, table.kept, table.scale)


def _assembled(base: Tensor, kept: Kept, scale: Tensor | None) -> RowTable:
    result = wrap(kept, base.shape, RowTable)
    result.base, result.scale = base, scale
    return result


class _OverlayContext(Context, Protocol):
    """What the derivatives of a table have."""

    shape: tuple[int, ...]
    scaled: bool


class _Overlay(Kernel):
    @staticmethod
    def forward(base: Tensor, values: Tensor, scale: Tensor | None, rows: Tensor) -> RowTable:
        return _assembled(
            base.detach(), Kept(rows, values.detach()), None if scale is None else scale.detach()
        )

    @staticmethod
    def setup_context(
        ctx: _OverlayContext, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor], output: RowTable
    ) -> None:
        base, _, scale, rows = inputs
        ctx.shape, ctx.scaled = tuple(base.shape), scale is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, *([base, scale] if ctx.scaled else []))
        ctx.save_for_forward(rows)

    @staticmethod
    def backward(
        ctx: _OverlayContext, cotangent: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if cotangent is None:
            return None, None, None, None
        rows, *scaling = ctx.saved_tensors
        to_values = gather_rows(cotangent, rows, unique=True)
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[2]):
            return None, to_values, None, None
        elsewhere = cotangent - scatter_rows(to_values, rows, cotangent.shape, unique=True)
        if not ctx.scaled:
            return elsewhere, to_values, None, None
        base, scale = scaling
        to_scale = (elsewhere * base).sum(0) if ctx.needs_input_grad[2] else None
        return elsewhere * scale, to_values, to_scale, None

    @staticmethod
    @nestable
    def jvp(
        ctx: _OverlayContext, base: Tensor | None, values: Tensor | None, scale: Tensor | None, rows: None
    ) -> RowTable:
        if ctx.scaled:
            raise NotImplementedError(
                "RowTable(..., scale): forward mode would scale the whole table. Use reverse mode, or a rule without "
                "weight decay."
            )
        (kept,) = ctx.saved_tensors
        if base is None and values is not None:
            base = values.new_zeros(()).expand(ctx.shape)
        if values is None and base is not None:
            values = base.new_zeros(len(kept), *ctx.shape[1:])
        return _Overlay.apply(base, values, None, kept)

    @staticmethod
    def vmap(info: VmapInfo, in_dims: Sequence[int | None], *args: Tensor | None) -> NoReturn:
        raise NotImplementedError(
            "RowTable(base, rows, values): under vmap the tables of all tasks would be copied. Stack the tasks' rows "
            "instead, or use MAML(sparse=[...])."
        )


def _check(base: Tensor, rows: Tensor, values: Tensor, scale: Tensor | None) -> None:
    call = "RowTable(base, rows, values)"
    check_int64(call, rows)
    if rows.ndim != 1 or base.ndim < 2 or values.shape != (len(rows), *base.shape[1:]):
        raise ValueError(
            f"{call}: values must be a row of the base for each of rows, got shapes base {tuple(base.shape)}, rows "
            f"{tuple(rows.shape)} and values {tuple(values.shape)}."
        )
    check_range(f"{call}: rows", rows, base.shape[:1])
    check_ascending(call, rows)
    if scale is not None and scale.shape != base.shape[1:]:
        raise ValueError(
            f"{call}: scale must be a row, of shape {tuple(base.shape[1:])}, got {tuple(scale.shape)}."
        )
