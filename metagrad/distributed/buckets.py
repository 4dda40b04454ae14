"""Strided tensors, averaged in flat buckets: one all-reduce for many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


class Bucket(NamedTuple):
    """An all-reduce on its way.

    Attributes:
        numbers: Which of the tensors it holds.
        flat: They, one after the other.
        work: To wait for.
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
    tensors: Sequence[Tensor | None], like: Sequence[Tensor], share: float, limit: int, group: ProcessGroup
) -> list[Bucket]:
    """Begin to add up tensors over processes, each times its share; None counts as zeros, shaped as in ``like``."""
    begun = []
    for numbers in buckets_of([t if t is not None else p for t, p in zip(tensors, like, strict=True)], limit):
        parts = [tensors[n] if share else None for n in numbers]
        flat = torch.cat(
            [
                like[n].new_zeros(like[n].numel()) if part is None else part.reshape(-1)
                for n, part in zip(numbers, parts, strict=True)
            ]
        ).mul_(share)
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        begun.append(Bucket(numbers, flat, work))
    return begun


def finish(bucket: Bucket, like: Sequence[Tensor]) -> dict[int, Tensor]:
    """Wait for a bucket, and return its tensors, which share its memory, by their numbers."""
    bucket.work.wait()
    sizes = [like[n].numel() for n in bucket.numbers]
    pieces = bucket.flat.split(sizes)
    return {n: piece.view(like[n].shape) for n, piece in zip(bucket.numbers, pieces, strict=True)}
