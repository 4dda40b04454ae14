"""Reduction of looked-up vectors to bags, by operations whose derivatives are right at every order."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.sparse.kernels.accumulation import widened


def reduce_bags(
    vectors: Tensor,
    offsets: Tensor | None,
    *,
    mode: str,
    weights: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Sum, average or take the maximum over each bag; empty bags give zeros, as ``F.embedding_bag`` has it.

    Args:
        vectors: ``[B, N, D...]``, or ``[n, D...]`` with offsets.
        offsets: Where each bag begins, ``[B]``; None if each row of ``vectors`` is one.
        mode: "sum", "mean" or "max".
        weights: A factor for each vector, ``[B, N]`` or ``[n]``; for "sum" only.
        kept: Which vectors belong to a bag at all, bool, like ``weights``; None means all.

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


def check_bags(vectors: Tensor, offsets: Tensor | None, mode: str, weights: Tensor | None) -> None:
    """Refuse what ``F.embedding_bag`` refuses."""
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f'F.embedding_bag(..., mode): expected "sum", "mean" or "max", got {mode!r}.')
    if vectors.ndim != (3 if offsets is None else 2):
        raise ValueError(
            "F.embedding_bag(ids, ...): ids must be [bags, n], or 1-d with offsets, got shape "
            f"{tuple(vectors.shape[:-1])} {'without' if offsets is None else 'with'} offsets."
        )
    if weights is None:
        return
    if mode != "sum":
        raise ValueError(f'F.embedding_bag(..., mode={mode!r}): per_sample_weights need mode="sum".')
    if weights.shape != vectors.shape[:-1]:
        raise ValueError(
            f"F.embedding_bag(ids, ..., per_sample_weights): expected the shape of ids, "
            f"{tuple(vectors.shape[:-1])}, got {tuple(weights.shape)}."
        )


def over(mask: Tensor, values: Tensor) -> Tensor:
    """Give a tensor of the first dimensions trailing ones, to be broadcast over rows."""
    return mask.view(*mask.shape, *[1] * (values.ndim - mask.ndim))


def _bags(vectors: Tensor, offsets: Tensor | None) -> tuple[Tensor, int]:
    """Number the bag of each vector; return how many there are as well."""
    if offsets is None:
        num_bags, size = vectors.shape[:2]
        return torch.arange(num_bags, device=vectors.device).repeat_interleave(size), num_bags
    # A bag begins where an offset is; torch.searchsorted would copy its arguments under vmap, and warn.
    begins = torch.zeros(vectors.shape[0] + 1, dtype=torch.long, device=vectors.device)
    begins = begins.scatter_add(0, offsets.long(), torch.ones_like(offsets, dtype=torch.long))
    return begins.cumsum(0)[:-1] - 1, offsets.shape[0]


def _summed(flat: Tensor, bag: Tensor, num_bags: int) -> Tensor:
    # Not index_add, which torch.vmap runs one task after the other.
    index = over(bag, flat).expand_as(flat)
    return flat.new_zeros(num_bags, *flat.shape[1:]).scatter_add(0, index, flat)


def _largest(flat: Tensor, bag: Tensor, keep: Tensor | None, num_bags: int) -> Tensor:
    """Take the maximum by gathering it, of equal ones the first: its derivatives are those of a gather."""
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
