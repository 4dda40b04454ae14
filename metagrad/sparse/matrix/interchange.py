"""Conversion from and to torch's sparse tensors and SciPy's: of values, without derivatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from metagrad.core._torch import from_numpy
from metagrad.sparse.checks import check_real
from metagrad.sparse.matrix.assemble import from_compressed, from_entries
from metagrad.sparse.pattern import Pattern
from metagrad.sparse.statistics import timed

if TYPE_CHECKING:
    from scipy.sparse import sparray, spmatrix

ScipyFormat: TypeAlias = Literal["bsr", "coo", "csc", "csr", "dia", "dok", "lil"]

SCIPY_FORMATS = get_args(ScipyFormat)
SCIPY_DTYPES = (torch.float32, torch.float64)
LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
BLOCK_LAYOUTS = (torch.sparse_bsr, torch.sparse_bsc)


@timed("conversion")
def from_torch(tensor: Tensor) -> tuple[Pattern, Tensor]:
    """Take the pattern and the values of a torch sparse tensor, sharing its memory."""
    call = "SparseTensor.from_torch(tensor)"
    _check_torch(call, tensor)
    shape = tuple(tensor.shape)
    if tensor.layout == torch.sparse_coo:
        row, col = tensor._indices()  # the public .indices() refuses a tensor that is not coalesced
        return from_entries(call, row, col, tensor._values(), shape)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return from_compressed(call, tensor.crow_indices(), tensor.col_indices(), tensor.values(), shape)
    return from_compressed(
        call, tensor.ccol_indices(), tensor.row_indices(), tensor.values(), shape, columns=True
    )


@timed("conversion")
def to_torch(pattern: Pattern, values: Tensor, layout: torch.layout) -> Tensor:
    """Make a torch sparse tensor that shares the memory of the values where their order is the same."""
    p, q = values.shape[1:] if values.ndim == 3 else (1, 1)
    shape = (pattern.shape[0] * p, pattern.shape[1] * q)
    if layout in BLOCK_LAYOUTS:
        values = values.reshape(-1, p, q)
    if layout == torch.sparse_coo:
        indices = torch.stack([pattern.row, pattern.col])
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        pointers, index = pattern.crow, pattern.col
    else:
        pointers, index, values = pattern.ccol, pattern.t().col, values[pattern.csc_order]
    return torch.sparse_compressed_tensor(
        pointers, index, values, shape, layout=layout, check_invariants=False
    )


@timed("conversion")
def from_scipy(matrix: sparray | spmatrix) -> tuple[Pattern, Tensor]:
    """Take the pattern and the values of a SciPy sparse matrix, sharing the memory of its values where possible."""
    import scipy.sparse

    call = "SparseTensor.from_scipy(matrix)"
    if not scipy.sparse.issparse(matrix):
        raise TypeError(
            f"{call}: matrix must be a SciPy sparse array or matrix, got {type(matrix).__name__}."
        )
    shape: tuple[int, ...] = matrix.shape  # type: ignore[reportAttributeAccessIssue]
    if len(shape) != 2:
        raise ValueError(f"{call}: matrix must have two dimensions, got shape {shape}.")
    if isinstance(matrix, (scipy.sparse.bsr_array, scipy.sparse.bsr_matrix)):
        parts = scipy.sparse.bsr_array(matrix)
        row, col = np.repeat(np.arange(len(parts.indptr) - 1), np.diff(parts.indptr)), parts.indices
    else:
        # Not coo_array(matrix), which copies in SciPy 1.15.
        parts = matrix.tocoo(copy=False)  # type: ignore[reportAttributeAccessIssue]
        row, col = parts.row, parts.col
    _check_numbers(call, parts.data.dtype)
    return from_entries(call, _tensor(row), _tensor(col), _tensor(parts.data), shape)


@timed("conversion")
def to_scipy(pattern: Pattern, values: Tensor, format: ScipyFormat) -> sparray:
    """Make a SciPy sparse array that shares the memory of the values where SciPy's format allows."""
    import scipy.sparse

    col, crow = pattern.col.numpy(), pattern.crow.numpy()
    if format == "bsr":
        p, q = values.shape[1:] if values.ndim == 3 else (1, 1)
        shape = (pattern.shape[0] * p, pattern.shape[1] * q)
        return scipy.sparse.bsr_array((values.reshape(-1, p, q).numpy(), col, crow), shape=shape)
    return scipy.sparse.csr_array((values.numpy(), col, crow), shape=pattern.shape).asformat(format)


def check_leaving(call: str, values: Tensor) -> None:
    """Refuse to detach values unless asked to."""
    if values.requires_grad:
        raise ValueError(
            f"{call}: a requires grad, and its derivatives would end here, for torch cuts the graph of its own "
            "sparse tensors and SciPy has none. Use a.detach() first; .to_dense(), .coo(), .csr() and .csc() "
            "are differentiable."
        )


def check_layout(call: str, layout: torch.layout) -> None:
    """Refuse what is not one of torch's sparse layouts."""
    if layout not in LAYOUTS:
        raise ValueError(
            f"{call}: layout must be one of {', '.join(map(str, LAYOUTS))}, got {layout}. "
            "For a strided tensor use .to_dense()."
        )


def check_scipy_target(call: str, values: Tensor, format: str) -> None:
    """Refuse a format that SciPy does not have, and values that it cannot hold."""
    if format not in SCIPY_FORMATS:
        raise ValueError(f"{call}: format must be one of {', '.join(SCIPY_FORMATS)}, got {format!r}.")
    if values.device.type != "cpu":
        raise ValueError(f"{call}: a is on {values.device}, SciPy on the CPU. Use a.to('cpu') first.")
    if values.dtype not in SCIPY_DTYPES:
        raise TypeError(
            f"{call}: SciPy's sparse arrays are float32 or float64, and a is {values.dtype}. Use a.float() first."
        )


def _check_torch(call: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{call}: tensor must be a torch sparse tensor, got {type(tensor).__name__}.")
    if tensor.layout not in LAYOUTS:
        raise TypeError(
            f"{call}: tensor must have a sparse layout, got {tensor.layout}. "
            "SparseTensor.from_dense(tensor) takes the cells that are not zero."
        )
    check_real(call, "tensor", tensor.dtype)
    if tensor.requires_grad:
        raise ValueError(
            f"{call}: tensor requires grad, and torch gives no values of a sparse tensor that keep their graph "
            "at order 2. Use tensor.detach(), or SparseTensor.from_coo(row, col, values, shape) with the "
            "strided values it was made of, which stay on the tape."
        )
    if tensor.ndim != 2:
        raise ValueError(
            f"{call}: tensor must have two dimensions and numbers as entries, got shape {tuple(tensor.shape)}."
        )
    if tensor.layout == torch.sparse_coo and tensor.sparse_dim() != 2:
        raise ValueError(
            f"{call}: the entries of tensor are whole rows, as in the gradient of an embedding table. "
            "metagrad.sparse.RowSparse is the form for these."
        )


def _check_numbers(call: str, dtype: np.dtype) -> None:
    if dtype.kind != "f" or dtype.itemsize > 8:
        remedy = "the .real and the .imag part" if dtype.kind == "c" else "matrix.astype('float64')"
        raise TypeError(f"{call}: matrix must be float32 or float64, got {dtype}. Use {remedy}.")


def _tensor(array: np.ndarray) -> Tensor:
    """Share an array with torch, which warns of read-only memory and knows no negative strides."""
    return from_numpy(np.require(array, requirements=("C", "W")))
