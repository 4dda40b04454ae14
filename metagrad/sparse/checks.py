"""Checks of indices, shapes and values. They run once, in the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from metagrad.core.checks import is_sequence, refuse

MAX_CELLS = 2**63 - 1  # cells are numbered by int64
INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_shape(call: str, shape: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of rows and columns as integers. Raise an error if int64 cannot number the cells."""
    if not is_sequence(shape) or len(shape) != 2 or not all(map(_is_int, shape)):
        raise TypeError(f"{call}: shape must be two integers, rows and columns, got {shape!r}.")
    rows, columns = map(int, shape)
    if rows < 0 or columns < 0:
        raise ValueError(f"{call}: shape must not be negative, got ({rows}, {columns}).")
    if rows * columns > MAX_CELLS:
        raise ValueError(
            f"{call}: a matrix of {rows} x {columns} has more than 2^63 - 1 cells, which int64 cannot number. "
            "Renumber the rows or columns that are used."
        )
    return rows, columns


def check_indices(call: str, row: Tensor, col: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the indices of entries as int64. Raise an error unless all indices are inside the shape."""
    check_ids(call, "row", row)
    check_ids(call, "col", col)
    if len(row) != len(col):
        refuse(f"{call}: row and col", "one number for each entry", (len(row), len(col)))
    check_device(call, "row and col", row, col)
    check_index(call, "row", row, shape[0])
    check_index(call, "col", col, shape[1])
    return row.detach().long(), col.detach().long()


def check_index(call: str, name: str, index: Tensor, size: int) -> None:
    """Raise an error unless an index is a vector of integers from 0 to ``size - 1``."""
    check_ids(call, name, index)
    if index.is_meta:
        raise ValueError(
            f"{call}: {name} is on the meta device, where it has no numbers to check. Give it on a real one."
        )
    if index.numel():
        low, high = (int(bound) for bound in index.aminmax())
        if low < 0 or high >= size:
            expected = f"from 0 to {size - 1}" if size else "empty, for there is nothing to count"
            raise ValueError(f"{call}: {name} must be {expected}, got {low if low < 0 else high}.")


def check_ids(call: str, name: str, index: Tensor) -> None:
    """Raise an error unless an index is a dense vector of integers."""
    check_integers(call, name, index)
    if index.ndim != 1 or index.layout != torch.strided:
        refuse(f"{call}: {name}", "a strided vector", (tuple(index.shape), index.layout))


def check_integers(call: str, name: str, index: Tensor) -> None:
    """Raise ``TypeError`` unless an index is a tensor of integers."""
    if not isinstance(index, Tensor):
        raise TypeError(f"{call}: {name} must be a tensor of integers, got {type(index).__name__}.")
    if index.dtype not in INDEX_DTYPES:
        refuse(f"{call}: {name}", "integers, such as .long() makes them", index.dtype, TypeError)


def check_floating(call: str, name: str, values: Tensor) -> None:
    """Raise ``TypeError`` unless values are a dense tensor of real floating-point numbers."""
    if not isinstance(values, Tensor):
        raise TypeError(f"{call}: {name} must be a tensor, got {type(values).__name__}.")
    if values.layout != torch.strided:
        raise TypeError(
            f"{call}: {name} must be a strided tensor, got {values.layout}. "
            "SparseTensor.from_torch(tensor) converts a torch sparse tensor."
        )
    check_real(call, name, values.dtype)


def check_real(call: str, name: str, dtype: torch.dtype) -> None:
    """Raise ``TypeError`` unless a dtype is real floating point."""
    if not dtype.is_floating_point:
        remedy = "Take .real and .imag apart" if dtype.is_complex else "Convert it with .float()"
        raise TypeError(f"{call}: {name} must be real floating point, got {dtype}. {remedy}.")


def check_same(call: str, names: str, first: Tensor, second: Tensor) -> None:
    """Raise an error if two tensors have different dtypes or devices."""
    if first.dtype != second.dtype:
        raise TypeError(
            f"{call}: {names} must have one dtype, got {first.dtype} and {second.dtype}. Convert one with .to(dtype)."
        )
    check_device(call, names, first, second)


def check_device(call: str, names: str, first: Any, second: Any) -> None:
    """Raise ``ValueError`` if two tensors or patterns are on different devices."""
    devices = first.device, second.device
    if devices[0] != devices[1]:
        raise ValueError(
            f"{call}: {names} must be on one device, got {devices[0]} and {devices[1]}. Move one with .to(device)."
        )


def _is_int(size: object) -> bool:
    return isinstance(size, Integral) and not isinstance(size, bool)
