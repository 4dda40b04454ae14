"""Strided tensors, averaged in flat buckets: one all-reduce for many of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


class Bucket(NamedTuple):
    """An all-reduce under way.

    Attributes:
        numbers: The numbers of the tensors in it.
        flat: Their elements, one tensor after the other.
        work: What to wait for.
    """

    numbers: list[int]
    flat: Tensor
    work: Work


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


def start(
    numbers: list[int],
    tensors: Mapping[int, Tensor | None],
    like: Sequence[Tensor],
    factor: float,
    group: ProcessGroup,
) -> Bucket:
    """Begin to add some tensors up over processes, each times a factor.

    Args:
        numbers: The numbers of those to add up.
        tensors: By number; None counts as zeros, and so does every tensor if the factor is 0.
        like: Tensors of the same shapes.
        factor: What they are multiplied by.
        group: The processes.
    """
    parts = [tensors[n] if factor else None for n in numbers]
    flat = torch.cat(
        [
            like[n].new_zeros(like[n].numel()) if part is None else part.reshape(-1)
            for n, part in zip(numbers, parts, strict=True)
        ]
    ).mul_(factor)
    work = dist.all_reduce(flat, group=group, async_op=True)
    assert work is not None
    return Bucket(numbers, flat, work)


def finish(bucket: Bucket, like: Sequence[Tensor], correction: float = 1.0) -> dict[int, Tensor]:
    """Wait for a bucket, and return its tensors by their numbers, in the layout of what they are like.

    They share the memory of the bucket where that is contiguous.
    """
    bucket.work.wait()
    if correction != 1:
        bucket.flat.mul_(correction)
    pieces = bucket.flat.split_with_sizes([like[n].numel() for n in bucket.numbers])
    return {n: _in_layout(piece, like[n]) for n, piece in zip(bucket.numbers, pieces, strict=True)}


def _in_layout(flat: Tensor, like: Tensor) -> Tensor:
    whole = flat.view(like.shape)
    return whole if like.is_contiguous() else torch.empty_like(like, requires_grad=False).copy_(whole)
