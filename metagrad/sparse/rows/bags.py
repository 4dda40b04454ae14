"""Reduction of looked-up vectors to bags, by operations whose derivatives are right at every order."""

from __future__ import annotations

import torch
from torch import Tensor


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
        vectors: ``[B, N, D]``, or ``[n, D]`` with offsets.
        offsets: Where each bag begins, ``[B]``; None if each row of ``vectors`` is one.
        mode: "sum", "mean" or "max".
        weights: A factor for each vector, without its last axis; for "sum" only.
        kept: Which vectors belong to a bag at all, bool, like ``weights``; None means all.

    Returns:
        ``[B, D]``.

    Raises:
        ValueError: ``mode`` is unknown, or shapes do not fit each other.
    """
    _check(vectors, offsets, mode, weights)
    bag, num_bags = _bags(vectors, offsets)
    flat = vectors.flatten(0, -2)
    keep = torch.ones_like(bag, dtype=torch.bool) if kept is None else kept.flatten()
    if weights is not None:
        flat = flat * weights.flatten().unsqueeze(1)
    if mode == "max":
        return _largest(flat, bag, keep, num_bags)
    total = _summed(torch.where(keep.unsqueeze(1), flat, 0), bag, num_bags)
    if mode == "sum":
        return total
    count = _summed(keep.to(flat.dtype).unsqueeze(1), bag, num_bags)
    return total / count.clamp(min=1)


def _check(vectors: Tensor, offsets: Tensor | None, mode: str, weights: Tensor | None) -> None:
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
    index = bag.unsqueeze(1).expand(flat.shape)
    return flat.new_zeros(num_bags, flat.shape[1]).scatter_add(0, index, flat)


def _largest(flat: Tensor, bag: Tensor, keep: Tensor, num_bags: int) -> Tensor:
    """Gather the first of the largest elements of each bag, in each column; among equals one has the gradient."""
    index = bag.unsqueeze(1).expand(flat.shape)
    values = torch.where(keep.unsqueeze(1), flat.detach(), -torch.inf)
    largest = flat.new_full((num_bags, flat.shape[1]), -torch.inf).scatter_reduce(0, index, values, "amax")
    place = torch.arange(flat.shape[0], device=flat.device).unsqueeze(1).expand(flat.shape)
    bound = largest.gather(0, index)
    is_largest = keep.unsqueeze(1) & ((values == bound) | (values.isnan() & bound.isnan()))
    none = flat.shape[0]
    candidates = torch.where(is_largest, place, none)
    first = place.new_full((num_bags, flat.shape[1]), none).scatter_reduce(0, index, candidates, "amin")
    padded = torch.cat([flat, flat.new_zeros(1, flat.shape[1])])
    return padded.gather(0, first)
