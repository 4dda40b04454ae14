"""Sums of half precision, which are accumulated in float32 as torch's dense sums are."""

from __future__ import annotations

from torch import Tensor

from metagrad.core.tree import HALF, widened


def index_sum(values: Tensor, ids: Tensor, num: int) -> Tensor:
    """Add the rows of ``values`` [entries, ...] that share an id: [num, ...], in the dtype of :func:`widened`.

    ``index_add`` alone rounds to the dtype of its operands after every addition: 4096 ones add up to 256 in bfloat16.
    """
    values = widened(values)
    return values.new_zeros(num, *values.shape[1:]).index_add(0, ids, values)


def index_rows(x: Tensor, ids: Tensor) -> Tensor:
    """Gather rows; where a row is gathered many times, its cotangents are added as in :func:`index_sum`."""
    return widened(x).index_select(0, ids).to(x.dtype)


def coalesced(coo: Tensor) -> Tensor:
    """Add up the duplicates of a COO tensor, as in :func:`index_sum`."""
    if coo.is_coalesced() or coo.dtype not in HALF:
        return coo.coalesce()
    return coo.float().coalesce().to(coo.dtype)
