"""Ids that send the rows of a tensor to segments, and what is known of their order."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from metagrad.sparse.checks import check_index
from metagrad.sparse.matrix.structure import structural
from metagrad.sparse.policies.stats import timed


class Segments:
    """A fixed map of entries to segments, with its grouping computed once.

    :func:`gather` and :func:`segment_sum` take it in place of an id tensor and are then several times faster, and
    deterministic on CUDA: entries are added segment by segment instead of in the order of their arrival.

    Args:
        ids: The segment of each entry, integers of shape [entries], in any order.
        num_segments: How many segments there are; some may be empty.

    Raises:
        ValueError: An id is out of range.
        TypeError: The ids are not integers.

    Example:
        >>> segments = metagrad.sparse.Segments(torch.tensor([2, 0, 2]), 3)
        >>> metagrad.sparse.segment_sum(torch.tensor([1.0, 2.0, 3.0]), segments)
        tensor([2., 0., 4.])
    """

    def __init__(self, ids: Tensor, num_segments: int) -> None:
        check_index("Segments(ids, num_segments)", "ids", ids, num_segments)
        self.ids = ids.detach().long()
        self.num_segments = num_segments

    @classmethod
    def grouped(cls, ids: Tensor, num_segments: int, order: Tensor | None = None) -> Segments:
        """Make segments of ids known to be in range, and of their stable order where that is known."""
        segments = cls.__new__(cls)
        segments.ids, segments.num_segments = ids, num_segments
        if order is not None:
            segments.order = order
        return segments

    @classmethod
    def sorted_ids(cls, ids: Tensor, num_segments: int) -> Segments:
        """Make segments of ids that ascend already."""
        return cls.grouped(ids, num_segments, torch.arange(len(ids), device=ids.device))

    @cached_property
    @structural
    @timed("conversion")
    def order(self) -> Tensor:
        """The entries by segment, int64 [entries]."""
        return torch.argsort(self.ids, stable=True)

    @cached_property
    @structural
    @timed("conversion")
    def pointers(self) -> Tensor:
        """Segment s holds the entries ``order[pointers[s]:pointers[s + 1]]``, int64 [num_segments + 1]."""
        pointers = torch.zeros(self.num_segments + 1, dtype=torch.int64, device=self.ids.device)
        torch.cumsum(self.counts, 0, out=pointers[1:])
        return pointers

    @cached_property
    @structural
    @timed("conversion")
    def counts(self) -> Tensor:
        """How many entries each segment has, int64 [num_segments]."""
        return torch.bincount(self.ids, minlength=self.num_segments)

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __repr__(self) -> str:
        return f"Segments(entries={len(self)}, num_segments={self.num_segments})"
