"""Entries in any order, brought into the order of a pattern: sorted, checked, duplicates added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metagrad.sparse.checks import (
    check_block,
    check_floating,
    check_ids,
    check_index,
    check_indices,
    check_shape,
)
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.pattern import Pattern, Segments
from metagrad.sparse.statistics import timed


@timed("conversion")
def from_entries(
    call: str, row: Tensor, col: Tensor, values: Tensor, shape: Sequence[int]
) -> tuple[Pattern, Tensor]:
    """Make a pattern and its values of entries in any order; those of one cell are added.

    Entries that are in order already are taken as they are: nothing is copied but indices that are not int64.
    The order and the sums are on the tape of ``values``.
    """
    size = _pattern_shape(call, values, shape)
    row, col = check_indices(call, row, col, size)
    _check_lengths(call, row, values)
    if _in_order(row, col):
        return Pattern._trusted(row, col, size), values
    pattern, place = Pattern._coalesced(row, col, size)
    return pattern, rules.segment_sum(values, Segments.grouped(place, pattern.nnz))


def from_compressed(
    call: str, pointers: Tensor, index: Tensor, values: Tensor, shape: Sequence[int], *, columns: bool = False
) -> tuple[Pattern, Tensor]:
    """Make a pattern and its values of compressed rows, or columns, whose entries may be in any order."""
    names = ("ccol", "row") if columns else ("crow", "col")
    segments = _pattern_shape(call, values, shape)[columns]
    segment = _expanded(call, names, pointers, segments, index)
    row, col = (index, segment) if columns else (segment, index)
    pattern, ordered = from_entries(call, row, col, values, shape)
    if pattern.nnz != len(row):
        what = "blocks" if values.ndim == 3 else "entries"
        raise ValueError(
            f"{call}: {len(row) - pattern.nnz} of the {len(row)} {what} are in a cell that is given already. "
            "SparseTensor.from_coo(row, col, values, shape) adds them."
        )
    if ordered is values and not columns:
        pattern.rows.pointers = pointers.detach().long()  # known, so they need not be counted again
    return pattern, ordered


def _expanded(call: str, names: tuple[str, str], pointers: Tensor, segments: int, index: Tensor) -> Tensor:
    """Return the segment of each entry, int64 [entries], of pointers that are checked."""
    name, index_name = names
    check_ids(call, index_name, index)
    check_index(call, name, pointers, len(index) + 1)
    if len(pointers) != segments + 1:
        raise ValueError(
            f"{call}: {name} must have one pointer more than there are segments, {segments + 1}, got {len(pointers)}."
        )
    if pointers.device != index.device:
        raise ValueError(
            f"{call}: {name} is on {pointers.device} and {index_name} on {index.device}. Move one with .to(device)."
        )
    counts = pointers.detach().long().diff()
    if int(pointers[0]) or int(pointers[-1]) != len(index) or bool((counts < 0).any()):
        raise ValueError(
            f"{call}: {name} must ascend from 0 to the number of entries, {len(index)}, "
            f"got {_abbreviated(pointers)}."
        )
    return torch.repeat_interleave(counts)


@timed("conversion")
def to_blocks(pattern: Pattern, values: Tensor, block: tuple[int, int]) -> tuple[Pattern, Tensor]:
    """Put scalar entries into p x q blocks, zero where no entry is; differentiable."""
    p, q = block
    shape = (pattern.shape[0] // p, pattern.shape[1] // q)
    blocks, place = Pattern._coalesced(pattern.row // p, pattern.col // q, shape)
    place = (place * p + pattern.row % p) * q + pattern.col % q
    flat = values.new_zeros(blocks.nnz * p * q).index_add(0, place, values)
    return blocks, flat.reshape(blocks.nnz, p, q)


def _pattern_shape(call: str, values: Tensor, shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the pattern: the matrix's, in blocks where the values are blocks."""
    check_floating(call, "values", values)
    if values.ndim not in (1, 3):
        raise ValueError(
            f"{call}: values must have shape [entries], or [entries, p, q] for blocks, got {list(values.shape)}."
        )
    rows, columns = check_shape(call, shape)
    if values.ndim == 1:
        return rows, columns
    p, q = check_block(call, values.shape[1:], (rows, columns))
    return rows // p, columns // q


def _check_lengths(call: str, row: Tensor, values: Tensor) -> None:
    if len(values) != len(row):
        raise ValueError(
            f"{call}: values must have one number, or one block, for each entry, "
            f"got {len(values)} for {len(row)} entries."
        )
    if values.device != row.device:
        raise ValueError(
            f"{call}: the indices are on {row.device} and the values on {values.device}. Move one with .to(device)."
        )


def _in_order(row: Tensor, col: Tensor) -> bool:
    later, same = row[1:] > row[:-1], row[1:] == row[:-1]
    return bool((later | (same & (col[1:] > col[:-1]))).all())


def _abbreviated(pointers: Tensor) -> str:
    numbers = pointers.tolist()
    return str(numbers) if len(numbers) <= 8 else f"[{numbers[0]}, ..., {numbers[-1]}]"
