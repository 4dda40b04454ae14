"""Lookups in embedding tables. Derivatives of every order cost as much as the indexed rows."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from metagrad.core import _torch
from metagrad.core._torch import to_list
from metagrad.core.checks import check_choice, check_type, is_integer, refuse
from metagrad.core.tree import widened
from metagrad.sparse.tables.row_sparse import HOLE, gather_rows

Pooling = Literal["mean", "sum", "max"]


def embedding(ids: Tensor, table: Tensor, *, padding_idx: int | None = None) -> Tensor:
    r"""Look up rows of a table, like ``torch.nn.functional.embedding``, with correct derivatives at every order.

    .. math:: y_i = T_{\mathrm{ids}_i}

    Gradients with respect to ``table`` are :class:`RowSparse` at every order. Their time and memory depend on the
    indexed rows and not on the size of the table. Forward mode and ``torch.func`` are supported. ``vmap`` may batch
    ``ids``, ``table`` or both.

    Args:
        ids: int64 or int32, of any shape. On an accelerator, the kernel checks the range.
        table: ``[V, D...]``, dense or :class:`RowSparse`.
        padding_idx: Row whose lookups have no gradient. A negative number counts from the end.

    Returns:
        ``[*ids.shape, D...]``.

    Raises:
        ValueError: An id or ``padding_idx`` is out of range, or ``table`` has less than two dimensions.
        TypeError: ``ids`` are not integers.

    Note:
        Other uses of ``table``, such as its norm or a tied output layer, have dense gradients. The sum of a
        dense and a row-sparse gradient is dense.

    Example:
        >>> from metagrad.sparse.tables.embedding import embedding
        >>> table = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
        >>> y = embedding(torch.tensor([2, 0, 2]), table)
        >>> (y**3).sum().backward()
        >>> table.grad.rows.tolist(), table.grad.values.tolist()
        ([0, 2], [[3.0], [54.0]])

    References:
        PyTorch, ``torch.nn.functional.embedding`` (definition of ``padding_idx``).
    """
    if has_torch_function((ids, table)):
        return handle_torch_function(embedding, (ids, table), ids, table, padding_idx=padding_idx)
    call = "embedding(ids, table)"
    ids, padding_idx = _checked(call, ids, table, padding_idx)
    if padding_idx is None:
        return gather_rows(table, ids)
    padded = ids == padding_idx
    found = gather_rows(table, torch.where(padded, HOLE, ids), holes=True)
    constant = gather_rows(table.detach(), ids.new_full((), padding_idx, dtype=torch.int64))
    return torch.where(over(padded, found), constant, found)


def embedding_bag(
    ids: Tensor,
    offsets: Tensor | None,
    table: Tensor,
    *,
    mode: Pooling = "mean",
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    r"""Reduce bags of rows, like ``torch.nn.functional.embedding_bag``, with correct derivatives at every order.

    .. math:: y_b = \sum_{i \in b} w_i \, T_{\mathrm{ids}_i}, \quad\text{or the mean or the maximum over the bag}

    Cost and supported transforms are the same as for :func:`embedding`. An empty bag gives zeros.

    Args:
        ids: int64 or int32, ``[N]`` with ``offsets``, or ``[bags, n]`` without.
        offsets: Start of each bag in ``ids``, ``[bags]``, ascending from 0.
        table: ``[V, D...]``.
        mode: Reduction of a bag. The maximum is elementwise, and the first of equal elements has the gradient.
        per_sample_weights: Weights :math:`w` in the shape of ``ids``, differentiable, only for ``mode="sum"``.
        padding_idx: Row whose lookups are left out of their bags. A negative number counts from the end.

    Returns:
        ``[bags, D...]``.

    Raises:
        ValueError: Shapes do not match, an id or an offset is out of range, ``mode`` is unknown, or weights
            are given with a mode other than "sum".
        TypeError: ``ids`` or ``offsets`` are not integers.

    Example:
        >>> from metagrad.sparse.tables.embedding import embedding_bag
        >>> table = torch.tensor([[1.0], [2.0], [4.0]])
        >>> ids, offsets = torch.tensor([0, 2, 1]), torch.tensor([0, 2, 2])
        >>> embedding_bag(ids, offsets, table).tolist()
        [[2.5], [0.0], [2.0]]

    References:
        PyTorch, ``torch.nn.functional.embedding_bag``.
    """
    tensors = (ids, offsets, table, per_sample_weights)
    if has_torch_function(tensors):
        how: dict[str, Any] = {
            "mode": mode,
            "per_sample_weights": per_sample_weights,
            "padding_idx": padding_idx,
        }
        return handle_torch_function(embedding_bag, tensors, ids, offsets, table, **how)
    call = "embedding_bag(ids, offsets, table)"
    check_bags(call, ids, offsets, mode, per_sample_weights)
    ids, padding_idx = _checked(call, ids, table, padding_idx)
    kept = None if padding_idx is None else ids != padding_idx
    found = gather_rows(table, ids if kept is None else torch.where(kept, ids, HOLE), holes=kept is not None)
    return reduce_bags(found, offsets, mode=mode, weights=per_sample_weights, kept=kept)


def _checked(call: str, ids: Tensor, table: Tensor, padding_idx: int | None) -> tuple[Tensor, int | None]:
    """Return ids as int64, and ``padding_idx`` counted from the start."""
    check_type(f"{call}: ids", ids, Tensor)
    check_type(f"{call}: table", table, Tensor)
    if ids.dtype not in (torch.int64, torch.int32):
        refuse(f"{call}: ids", "int64 or int32, such as ids.long()", ids.dtype, TypeError)
    if table.layout != torch.strided or table.device != ids.device:
        refuse(f"{call}: table", f"a dense tensor on {ids.device}, as ids", (table.layout, table.device))
    if table.ndim < 2:
        refuse(f"{call}: table", "[V, D...], such as table[:, None] of numbers", tuple(table.shape))
    if padding_idx is None:
        return ids.long(), None
    if not is_integer(padding_idx) or not -len(table) <= padding_idx < len(table):
        raise ValueError(
            f"{call}: padding_idx must be a row of the table, from {-len(table)} to {len(table) - 1}, "
            f"got {padding_idx}."
        )
    return ids.long().clamp(min=HOLE + 1), padding_idx % len(table)  # NaN.long() is HOLE, and no padding


def check_bags(
    call: str, ids: Tensor, offsets: Tensor | None, mode: str, per_sample_weights: Tensor | None
) -> None:
    """Raise an error for arguments that ``F.embedding_bag`` does not support."""
    check_choice(f"{call}: mode", mode, Pooling)
    check_type(f"{call}: ids", ids, Tensor)
    check_type(f"{call}: offsets", offsets, Tensor, optional=True)
    check_type(f"{call}: per_sample_weights", per_sample_weights, Tensor, optional=True)
    if ids.ndim != (2 if offsets is None else 1):
        expected = "[bags, n] without offsets" if offsets is None else "1-d with offsets"
        raise ValueError(f"{call}: ids must be {expected}, got shape {tuple(ids.shape)}.")
    if offsets is not None:
        _check_offsets(call, offsets, len(ids))
    if per_sample_weights is not None and mode != "sum":
        raise ValueError(f'{call}: per_sample_weights are for mode="sum", got mode={mode!r}.')
    if per_sample_weights is not None and per_sample_weights.shape != ids.shape:
        raise ValueError(
            f"{call}: per_sample_weights must have the shape of ids, {tuple(ids.shape)}, "
            f"got {tuple(per_sample_weights.shape)}."
        )


def _check_offsets(call: str, offsets: Tensor, size: int) -> None:
    if offsets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{call}: offsets must be int64 or int32, got {offsets.dtype}.")
    if offsets.ndim != 1:
        raise ValueError(f"{call}: offsets must be 1-d, one for each bag, got shape {tuple(offsets.shape)}.")
    # Values cannot be read under vmap, and reading them would stall an accelerator.
    if _torch.functorch_is_active() or offsets.device.type != "cpu":
        return
    if not len(offsets):
        wrong = size > 0
    else:
        wrong = bool(offsets[0] != 0) or bool(offsets[-1] > size) or bool((offsets.diff() < 0).any())
    if wrong:
        refuse(f"{call}: offsets", f"ascending from 0 to at most {size} ids", to_list(offsets))


def reduce_bags(
    vectors: Tensor,
    offsets: Tensor | None,
    *,
    mode: str,
    weights: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Return the sum, mean or maximum of each bag. Empty bags give zeros, as in ``F.embedding_bag``.

    Args:
        vectors: ``[B, N, D...]``, or ``[n, D...]`` with offsets.
        offsets: Start of each bag, ``[B]``. None if each row of ``vectors`` is a bag.
        mode: "sum", "mean" or "max".
        weights: Factor of each vector, ``[B, N]`` or ``[n]``, only for "sum".
        kept: True for vectors that belong to a bag, bool in the shape of ``weights``. None means all vectors.

    Returns:
        ``[B, D...]``.
    """
    bag, num_bags = _bags(vectors, offsets)
    flat = vectors if offsets is not None else vectors.flatten(0, 1)
    keep = None if kept is None else over(kept.flatten(), flat)
    if mode == "max":
        return _largest(flat, over(bag, flat), keep, num_bags)
    flat = widened(flat)
    if weights is not None:
        flat = flat * over(weights.flatten(), flat)
    total = _summed(flat if keep is None else torch.where(keep, flat, 0), bag, num_bags)
    if mode == "sum":
        return total.to(vectors.dtype)
    ones = torch.ones_like(bag) if kept is None else kept.flatten().long()
    return (total / over(_summed(ones, bag, num_bags).clamp(min=1), total)).to(vectors.dtype)


def over(mask: Tensor, values: Tensor) -> Tensor:
    """Append dimensions of size 1 to a tensor, so that it broadcasts over the rows of ``values``."""
    return mask.view((*mask.shape, *[1] * (values.ndim - mask.ndim)))


def _bags(vectors: Tensor, offsets: Tensor | None) -> tuple[Tensor, int]:
    """Return the number of the bag of each vector, and the number of bags."""
    if offsets is None:
        num_bags, size = vectors.shape[:2]
        return torch.arange(num_bags, device=vectors.device).repeat_interleave(size), num_bags
    # torch.searchsorted would copy its arguments under vmap and warn.
    begins = torch.zeros(vectors.shape[0] + 1, dtype=torch.long, device=vectors.device)
    begins = begins.scatter_add(0, offsets.long(), torch.ones_like(offsets, dtype=torch.long))
    return begins.cumsum(0)[:-1] - 1, offsets.shape[0]


def _summed(flat: Tensor, bag: Tensor, num_bags: int) -> Tensor:
    # Not index_add, which torch.vmap runs in a loop.
    index = over(bag, flat).expand_as(flat)
    return flat.new_zeros(num_bags, *flat.shape[1:]).scatter_add(0, index, flat)


def _largest(flat: Tensor, bag: Tensor, keep: Tensor | None, num_bags: int) -> Tensor:
    """Gather the elementwise maximum, the first of equal elements. Derivatives are derivatives of a gather."""
    size, width = flat.shape[0], flat.shape[1:]
    index = bag.expand_as(flat)
    values = flat.detach() if keep is None else torch.where(keep, flat.detach(), -torch.inf)
    largest = flat.new_full((num_bags, *width), -torch.inf).scatter_reduce(0, index, values, "amax")
    bound = largest.gather(0, index)
    is_largest = (values == bound) | (values.isnan() & bound.isnan())
    if keep is not None:
        is_largest = is_largest & keep
    place = over(torch.arange(size, device=flat.device), flat).expand_as(flat)
    candidates = torch.where(is_largest, place, size)
    first = place.new_full((num_bags, *width), size).scatter_reduce(0, index, candidates, "amin")
    return torch.cat([flat, flat.new_zeros(1, *width)]).gather(0, first)
