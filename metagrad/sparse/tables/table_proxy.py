"""A proxy for an embedding table that supports only lookups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from metagrad.core._torch import Function, make_wrapper_subclass, pytree
from metagrad.sparse.tables.embedding import check_bags, embedding, embedding_bag, reduce_bags

Lookup = Callable[[Tensor], Tensor]
"""Ids of any shape to vectors ``[*ids.shape, D]``."""


class TableProxy(Tensor):
    """A tensor without memory that has the shape, dtype and device of a table.

    Lookups are ``F.embedding`` and ``F.embedding_bag``. The function ``lookup`` computes them. Any other use needs
    rows that do not exist. It reaches the dispatcher and raises ``ValueError`` with the name of the table.

    Args:
        name: Name of the table in error messages.
        shape: Shape of the table, ``[V, D]``.
        like: Tensor with the dtype and device of the table.
        lookup: Computes a lookup.
    """

    _name: str
    _lookup: Lookup

    def __new__(cls, name: str, shape: Sequence[int], like: Tensor, lookup: Lookup) -> TableProxy:  # noqa: D102
        result = make_wrapper_subclass(cls, tuple(shape), dtype=like.dtype, device=like.device)
        result._name, result._lookup = name, lookup
        return result

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"TableProxy({self._name!r}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _LOOKUPS:
            return _LOOKUPS[func](*args, **kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = next(leaf._name for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise ValueError(
            f"sparse=[{name!r}]: the model uses the table as a whole, by {func}, where only the rows that are "
            "looked up by F.embedding or F.embedding_bag are there. Leave it out of sparse, or give that use a "
            "parameter of its own."
        )


@dataclass(frozen=True)
class LocalRows:
    """Some rows of a table.

    Attributes:
        name: Name of the table in error messages.
        shape: Shape of the table, ``[V, D]``.
        rows: Numbers of the rows, ``[R]``, ascending. The last row may be repeated, and its first value counts.
        values: Values of the rows, ``[R, D]``.
    """

    name: str
    shape: tuple[int, ...]
    rows: Tensor
    values: Tensor

    def proxy(self) -> Tensor:
        """Return the proxy that replaces the table."""
        return _proxy_of_rows(self.rows, self.values, self.name, self.shape)


pytree.register_pytree_node(
    LocalRows,
    lambda local: ([local.rows, local.values], (local.name, local.shape)),
    lambda parts, context: LocalRows(*context, *parts),
)


@dataclass(frozen=True, eq=False)
class SharedTable:
    """A whole table that supports only lookups, so that its gradient is row-sparse.

    Attributes:
        name: Name of the table in error messages.
        table: The table, ``[V, D]``.
    """

    name: str
    table: Tensor

    def proxy(self) -> Tensor:
        """Return the proxy that replaces the table."""
        return _proxy_of_table(self.table, self.name)


# vmap does not map over the table.
pytree.register_pytree_node(SharedTable, lambda shared: ([], shared), lambda _, shared: shared)


def _proxy_of_table(table: Tensor, name: str) -> Tensor:
    # See _proxy_of_rows for the reason.
    if has_torch_function((table,)):
        return handle_torch_function(_proxy_of_table, (table,), table, name)
    return TableProxy(name, table.shape, table, lambda ids: embedding(ids, table))


def _proxy_of_rows(rows: Tensor, values: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    # A tracer of the function must see that each call reads rows and values, and makes a new proxy.
    if has_torch_function((rows, values)):
        return handle_torch_function(_proxy_of_rows, (rows, values), rows, values, name, shape)

    def lookup(ids: Tensor) -> Tensor:
        position = positions(rows, ids.flatten(), name).view(ids.shape)
        return F.embedding(position, values)

    return TableProxy(name, shape, values, lookup)


def positions(rows: Tensor, ids: Tensor, name: str) -> Tensor:
    """Return the position of each id ``[*batch, n]`` in rows ``[*batch, R]``. Each id must be one of the rows."""
    return _Positions.apply(rows, ids.long(), name)


class _Positions(Function):
    """The search for positions, as a Function whose forward sees plain tensors also under vmap."""

    @staticmethod
    def forward(rows, ids, name):
        position = torch.searchsorted(rows.contiguous(), ids.contiguous()).clamp_(max=rows.shape[-1] - 1)
        if not torch.equal(rows.gather(-1, position), ids):
            raise ValueError(
                f"sparse=[{name!r}]: the model looks up rows that it did not look up in the pass that found them. "
                "The ids must depend on the inputs alone: not on parameters, random numbers or running "
                "statistics. Leave the table out of sparse."
            )
        return position

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, *cotangents):
        return None, None, None

    @staticmethod
    def jvp(ctx, *tangents):
        return None

    @staticmethod
    def vmap(info, in_dims, rows, ids, name):
        rows, ids = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((rows, ids), in_dims[:2], strict=True)
        )
        return _Positions.apply(rows, ids, name), 0


def _embedding(
    ids: Tensor,
    table: TableProxy,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    _refuse("F.embedding", table, max_norm, scale_grad_by_freq)
    vectors = table._lookup(ids)
    if padding_idx is None:
        return vectors
    # A lookup of the padding row is a constant.
    is_padding = (ids == padding_idx % table.shape[0]).unsqueeze(-1)
    return torch.where(is_padding, vectors.detach(), vectors)


def _embedding_bag(
    ids: Tensor,
    table: TableProxy,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    _refuse("F.embedding_bag", table, max_norm, scale_grad_by_freq)
    kept = None if padding_idx is None else ids != padding_idx % table.shape[0]
    if include_last_offset and offsets is not None:
        offsets = offsets[:-1]
    check_bags("F.embedding_bag(ids, table, offsets)", ids, offsets, mode, per_sample_weights)
    return reduce_bags(table._lookup(ids), offsets, mode=mode, weights=per_sample_weights, kept=kept)


def _refuse(function: str, table: TableProxy, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    if max_norm is not None:
        raise ValueError(
            f"sparse=[{table._name!r}]: {function}(max_norm={max_norm}) writes into the table in place, which has "
            "no derivative. Construct the embedding without max_norm."
        )
    if scale_grad_by_freq:
        raise ValueError(
            f"sparse=[{table._name!r}]: {function}(scale_grad_by_freq=True) scales the gradient by a factor that is "
            "missing from the second derivative. Construct the embedding without it."
        )


_LOOKUPS: dict[Any, Callable[..., Tensor]] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    embedding: _embedding,
    embedding_bag: lambda ids, offsets, table, **how: _embedding_bag(ids, table, offsets, **how),
}
