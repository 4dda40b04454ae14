"""Conversions of sparse matrices: coordinates, dense tensors, sparse layouts of torch and formats of SciPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from metagrad.core._torch import from_numpy
from metagrad.core.checks import check_choice, refuse
from metagrad.sparse.checks import check_device, check_floating, check_indices, check_real, check_shape
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.operations.entries import Entries
from metagrad.sparse.pattern import Pattern, Segments, check_mask
from metagrad.sparse.policy import timed

if TYPE_CHECKING:
    from scipy.sparse import sparray, spmatrix
    from typing_extensions import Self

ScipyFormat: TypeAlias = Literal["bsr", "coo", "csc", "csr", "dia", "dok", "lil"]

SCIPY_DTYPES = (torch.float32, torch.float64)
TARGETS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
LAYOUTS = (*TARGETS, torch.sparse_bsr, torch.sparse_bsc)


class Conversions(Entries):
    """The conversions of :class:`SparseTensor`.

    Dense values keep their autograd graph. They are shared instead of copied if they have the order of the pattern.
    """

    __slots__ = ()

    @classmethod
    def from_coo(cls, row: Tensor, col: Tensor, values: Tensor, shape: Sequence[int]) -> Self:
        r"""Return the matrix of entries in any order. Entries of the same cell are added, differentiably.

        .. math:: a_{ij} = \sum_{e \,:\, \mathrm{row}_e = i,\ \mathrm{col}_e = j} v_e

        Args:
            row: The row of each entry, integers of shape [entries].
            col: The column of each entry.
            values: Floating point, [entries]. They keep their autograd graph.
            shape: Rows and columns of the matrix.

        Returns:
            The matrix. It shares ``values`` if the entries are in row-major order and no cell occurs twice.

        Raises:
            ValueError: An index is out of range, lengths or devices differ, or there are more than 2^63 - 1 cells.
            TypeError: Indices are not integers, values are not real floating point, or the shape is not two integers.

        Example:
            >>> row, col = torch.tensor([1, 0, 1]), torch.tensor([0, 1, 0])
            >>> a = metagrad.sparse.SparseTensor.from_coo(row, col, torch.tensor([1.0, 2.0, 3.0]), (2, 2))
            >>> a
            SparseTensor(shape=(2, 2), nnz=2, values=tensor([2., 4.]))
        """
        call = "SparseTensor.from_coo(row, col, values, shape)"
        return cls._of(*from_entries(call, row, col, values, shape))

    @classmethod
    def from_dense(cls, tensor: Tensor, mask: Tensor | None = None) -> Self:
        """Return the nonzero or the masked cells of a dense matrix, differentiably.

        Args:
            tensor: Floating point, [n, m].
            mask: Cells to store, bool [n, m]. None stores the nonzero cells. The pattern stays the same if
                the tensor changes later, so give a mask if zeros may become nonzero.

        Returns:
            The matrix, with a copy of the cells.

        Raises:
            ValueError: ``tensor`` is not two-dimensional, or ``mask`` has another shape or device.
            TypeError: ``tensor`` is not a dense floating-point tensor, or ``mask`` is not boolean.

        Example:
            >>> metagrad.sparse.SparseTensor.from_dense(torch.tensor([[0.0, 5.0], [6.0, 0.0]]))
            SparseTensor(shape=(2, 2), nnz=2, values=tensor([5., 6.]))
        """
        call = "SparseTensor.from_dense(tensor, mask)"
        check_floating(call, "tensor", tensor)
        if tensor.ndim != 2:
            raise ValueError(f"{call}: tensor must have two dimensions, got shape {list(tensor.shape)}.")
        if mask is not None:
            check_mask(call, mask)
        pattern = Pattern.from_mask(tensor != 0 if mask is None else mask)
        if pattern.shape != tuple(tensor.shape) or pattern.device != tensor.device:
            raise ValueError(
                f"{call}: mask must have the shape and the device of tensor, {list(tensor.shape)} on "
                f"{tensor.device}, got {list(pattern.shape)} on {pattern.device}."
            )
        return cls._of(pattern, tensor[pattern.row, pattern.col])

    @classmethod
    @timed("conversion")
    def from_torch(cls, tensor: Tensor) -> Self:
        """Convert a sparse tensor of torch in any of its five layouts. Every number of a block becomes an entry.

        Args:
            tensor: COO, coalesced or not, CSR, CSC, BSR or BSC, of two dimensions.

        Returns:
            The matrix, without an autograd graph. It shares the values of ``tensor`` if their order is row-major.

        Raises:
            ValueError: ``tensor`` requires grad, because torch detaches the graph of its values at order 2. It is
                also raised if ``tensor`` has more than two dimensions, or vectors as entries.
            TypeError: ``tensor`` is dense, or its dtype is not real floating point.

        Example:
            >>> metagrad.sparse.SparseTensor.from_torch(torch.eye(2).to_sparse())
            SparseTensor(shape=(2, 2), nnz=2, values=tensor([1., 1.]))
        """
        call = "SparseTensor.from_torch(tensor)"
        _check_torch(call, tensor)
        coo = tensor.to_sparse_coo()
        # Not the public indices(), which raises for a tensor that is not coalesced.
        row, col = coo._indices()
        return cls._of(*from_entries(call, row, col, coo._values(), tuple(tensor.shape)))

    @classmethod
    @timed("conversion")
    def from_scipy(cls, matrix: sparray | spmatrix) -> Self:
        """Convert a SciPy sparse array or matrix of any format. Duplicates are added.

        The values share memory if their order is row-major and the memory is writeable.

        Raises:
            ValueError: ``matrix`` does not have two dimensions.
            TypeError: ``matrix`` is not a SciPy array or matrix, or its numbers are not float32 or float64.

        Example:
            >>> import scipy.sparse
            >>> metagrad.sparse.SparseTensor.from_scipy(scipy.sparse.eye_array(2, format="csc"))
            SparseTensor(shape=(2, 2), nnz=2, values=tensor([1., 1.], dtype=torch.float64))
        """
        import scipy.sparse

        call = "SparseTensor.from_scipy(matrix)"
        if not scipy.sparse.issparse(matrix):
            refuse(f"{call}: matrix", "a SciPy sparse array or matrix", type(matrix).__name__, TypeError)
        shape: tuple[int, ...] = matrix.shape  # type: ignore[reportAttributeAccessIssue]
        if len(shape) != 2:
            raise ValueError(f"{call}: matrix must have two dimensions, got shape {shape}.")
        # Not coo_array(matrix), which copies in SciPy 1.15.
        parts = matrix.tocoo(copy=False)  # type: ignore[reportAttributeAccessIssue]
        _check_numbers(call, parts.data.dtype)
        row, col, values = map(_tensor, (parts.row, parts.col, parts.data))
        return cls._of(*from_entries(call, row, col, values, shape))

    @timed("conversion")
    def to_torch(self, layout: torch.layout = torch.sparse_coo) -> Tensor:
        """Return a sparse tensor of torch, without an autograd graph. It shares memory if the order is the same.

        Args:
            layout: COO, CSR or CSC. For blocks use torch, as in ``a.to_torch().to_sparse_bsr((2, 2))``.

        Raises:
            ValueError: The values require grad (detach them first), or the layout is not supported.

        Example:
            >>> a = metagrad.sparse.SparseTensor.from_dense(torch.eye(2))
            >>> a.to_torch(torch.sparse_csr).values()
            tensor([1., 1.])
        """
        call, pattern, values = "SparseTensor.to_torch(layout)", self.pattern, self.values
        if layout not in TARGETS:
            raise ValueError(
                f"{call}: layout must be one of {', '.join(map(str, TARGETS))}, got {layout}. For a strided tensor "
                "use .to_dense(), for blocks .to_torch().to_sparse_bsr(size)."
            )
        _check_leaving(call, values)
        if layout == torch.sparse_coo:
            return torch.sparse_coo_tensor(
                torch.stack([pattern.row, pattern.col]),
                values,
                pattern.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        pointers, index = pattern.crow, pattern.col
        if layout == torch.sparse_csc:
            pointers, index, values = pattern.ccol, pattern.t().col, values[pattern.csc_order]
        return torch.sparse_compressed_tensor(
            pointers, index, values, pattern.shape, layout=layout, check_invariants=False
        )

    @timed("conversion")
    def to_scipy(self, format: ScipyFormat = "csr") -> sparray:
        """Return a SciPy sparse array, without an autograd graph. CSR shares the memory of the values.

        Args:
            format: Name of a sparse format of SciPy.

        Raises:
            ValueError: The values require grad or are not on the CPU, or SciPy has no such format.
            TypeError: The values are neither float32 nor float64.

        Example:
            >>> metagrad.sparse.SparseTensor.from_dense(torch.eye(2)).to_scipy().sum().item()
            2.0
        """
        import scipy.sparse

        call, pattern, values = "SparseTensor.to_scipy(format)", self.pattern, self.values
        check_choice(call, format, ScipyFormat)
        if values.device.type != "cpu":
            raise ValueError(f"{call}: a is on {values.device}, SciPy on the CPU. Use a.to('cpu') first.")
        if values.dtype not in SCIPY_DTYPES:
            raise TypeError(
                f"{call}: SciPy's sparse arrays are float32 or float64, and a is {values.dtype}. Use a.float() first."
            )
        _check_leaving(call, values)
        parts = values.numpy(), pattern.col.numpy(), pattern.crow.numpy()
        return scipy.sparse.csr_array(parts, shape=pattern.shape).asformat(format)


@timed("conversion")
def from_entries(
    call: str, row: Tensor, col: Tensor, values: Tensor, shape: Sequence[int]
) -> tuple[Pattern, Tensor]:
    """Sort entries, and return their pattern and values. Entries of the same cell are added, differentiably.

    Entries in row-major order are not copied, except indices that are not int64.
    """
    check_floating(call, "values", values)
    size = check_shape(call, shape)
    row, col = check_indices(call, row, col, size)
    if values.shape != row.shape:
        refuse(f"{call}: values", f"one number for each of {len(row)} entries", list(values.shape))
    check_device(call, "indices and values", row, values)
    if _in_order(row, col):
        return Pattern._trusted(row, col, size), values
    pattern, place = Pattern._coalesced(row, col, size)
    return pattern, rules.segment_sum(values, Segments.grouped(place, pattern.nnz))


def _in_order(row: Tensor, col: Tensor) -> bool:
    later, same = row[1:] > row[:-1], row[1:] == row[:-1]
    return bool((later | (same & (col[1:] > col[:-1]))).all())


def _check_leaving(call: str, values: Tensor) -> None:
    """Raise ``ValueError`` if values require grad, instead of detaching them."""
    if values.requires_grad:
        raise ValueError(
            f"{call}: a requires grad, and its derivatives would end here, for torch cuts the graph of its own "
            "sparse tensors and SciPy has none. Use a.detach() first; .to_dense() and .values are differentiable."
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
        refuse(f"{call}: tensor", "two dimensions and numbers as entries", tuple(tensor.shape))
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
    """Return an array as a tensor. It is copied if torch does not support its memory layout."""
    return from_numpy(np.require(array, requirements=("C", "W")))
