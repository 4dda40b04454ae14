"""Strided tensors, averaged in flat buckets: one all-reduce for many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def weighted_sums(
    tensors: Sequence[Tensor | None], like: Sequence[Tensor], factor: float, limit: int, group: ProcessGroup
) -> list[Tensor]:
    """Add tensors up over processes, each times the factor of its process; all buckets are under way at once.

    Args:
        tensors: The tensors of this process. None counts as zeros, and so does every tensor if the factor is 0.
        like: Tensors of the same shapes, dtypes and layouts.
        factor: The factor of this process.
        limit: The size of a bucket in bytes.
        group: The processes.
    """
    begun = []
    for numbers in buckets_of(like, limit):
        flat = torch.cat([_flat(tensors[n] if factor else None, like[n]) for n in numbers]).mul_(factor)
        begun.append((numbers, flat, dist.all_reduce(flat, group=group, async_op=True)))
    found: dict[int, Tensor] = {}
    for numbers, flat, work in begun:
        assert work is not None
        work.wait()
        pieces = flat.split_with_sizes([like[n].numel() for n in numbers])
        found |= {n: _in_layout(piece, like[n]) for n, piece in zip(numbers, pieces, strict=True)}
    return [found[number] for number in range(len(like))]


def buckets_of(tensors: Sequence[Tensor], limit: int) -> list[list[int]]:
    """Put tensors of one dtype and device together, in their order, up to a size in bytes; return their numbers."""
    filled: list[list[int]] = []
    last: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for number, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        bucket, size = last.get(kind, ([], limit))
        if size + tensor.nbytes > limit:
            bucket, size = [], 0
            filled.append(bucket)
        bucket.append(number)
        last[kind] = (bucket, size + tensor.nbytes)
    return filled


def _flat(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_zeros(like.numel()) if tensor is None else tensor.reshape(-1)


def _in_layout(flat: Tensor, like: Tensor) -> Tensor:
    whole = flat.view(like.shape)
    return whole if like.is_contiguous() else torch.empty_like(like, requires_grad=False).copy_(whole)
