"""What hypothesis draws: entries as users hold them, and patterns with everything that is rare."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from metagrad.sparse import Pattern


class Entries(NamedTuple):
    """Cells in any order, some of them more than once."""

    row: Tensor
    col: Tensor
    shape: tuple[int, int]


def entries(min_side: int = 0, max_side: int = 5, max_entries: int = 10) -> st.SearchStrategy[Entries]:
    """Unsorted, with duplicates, empty rows and columns, nothing stored, one row, or no cells at all."""
    sides = st.integers(min_side, max_side)
    return st.tuples(sides, sides).flatmap(lambda shape: _entries_of(shape, max_entries))


def _entries_of(shape: tuple[int, int], max_entries: int) -> st.SearchStrategy[Entries]:
    cells = st.tuples(st.integers(0, max(shape[0] - 1, 0)), st.integers(0, max(shape[1] - 1, 0)))
    limit = max_entries if shape[0] * shape[1] else 0
    return st.lists(cells, max_size=limit).map(lambda found: _as_entries(found, shape))


def _as_entries(cells: list[tuple[int, int]], shape: tuple[int, int]) -> Entries:
    pairs = torch.tensor(cells, dtype=torch.int64).reshape(-1, 2)
    return Entries(pairs[:, 0], pairs[:, 1], shape)


def patterns(min_side: int = 0, max_side: int = 5, max_entries: int = 10) -> st.SearchStrategy[Pattern]:
    """Patterns of such entries."""
    return entries(min_side, max_side, max_entries).map(lambda e: Pattern.coalesce(*e)[0])


seeds = st.integers(0, 2**20)
