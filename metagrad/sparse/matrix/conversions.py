"""The other forms of a sparse matrix: its parts, its blocks, torch's and SciPy's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from metagrad.sparse.checks import check_block, check_floating
from metagrad.sparse.matrix import assemble, interchange
from metagrad.sparse.operations.entries import Entries
from metagrad.sparse.pattern import Pattern

if TYPE_CHECKING:
    from scipy.sparse import sparray, spmatrix
    from typing_extensions import Self


class COO(NamedTuple):
    """Entries with their coordinates, row by row."""

    row: Tensor  # int64 [nnz]
    col: Tensor  # int64 [nnz]
    values: Tensor  # [nnz], or [nnz, p, q] for blocks


class CSR(NamedTuple):
    """Compressed rows: row i holds the entries from ``crow[i]`` to ``crow[i + 1]``."""

    crow: Tensor  # int64 [rows + 1]
    col: Tensor  # int64 [nnz]
    values: Tensor  # [nnz], or [nnz, p, q] for blocks


class CSC(NamedTuple):
    """Compressed columns: column j holds the entries from ``ccol[j]`` to ``ccol[j + 1]``."""

    ccol: Tensor  # int64 [columns + 1]
    row: Tensor  # int64 [nnz]
    values: Tensor  # [nnz], or [nnz, p, q] for blocks


class Conversions(Entries):
    """The conversions of :class:`SparseTensor`, from and to other forms.

    A shape is always that of the matrix; where entries are p x q blocks, rows and columns are counted in blocks.
    Strided values stay on the tape, and are shared, not copied, if their order is the pattern's.
    """

    __slots__ = ()

    @classmethod
    def from_coo(cls, row: Tensor, col: Tensor, values: Tensor, shape: Sequence[int]) -> Self:
        r"""Make a matrix of entries in any order; those of one cell are added, differentiably.

        .. math:: a_{ij} = \sum_{e \,:\, \mathrm{row}_e = i,\ \mathrm{col}_e = j} v_e

        Args:
            row: The row of each entry, integers of shape [entries].
            col: The column of each entry.
            values: Floating point, [entries], or [entries, p, q] for blocks; they stay on the tape.
            shape: Rows and columns of the matrix.

        Returns:
            The matrix. It shares ``values`` if the entries are in row-major order and no cell occurs twice.

        Raises:
            ValueError: An index is out of range, lengths or devices differ, blocks do not divide the shape, or
                there are more than 2^63 - 1 cells.
            TypeError: Indices are not integers, values are not real floating point, or the shape is not two integers.

        Example:
            >>> row, col = torch.tensor([1, 0, 1]), torch.tensor([0, 1, 0])
            >>> a = metagrad.sparse.SparseTensor.from_coo(row, col, torch.tensor([1.0, 2.0, 3.0]), (2, 2))
            >>> a
            SparseTensor(shape=(2, 2), nnz=2, values=tensor([2., 4.]))
        """
        call = "SparseTensor.from_coo(row, col, values, shape)"
        return cls._of(*assemble.from_entries(call, row, col, values, shape))

    @classmethod
    def from_csr(cls, crow: Tensor, col: Tensor, values: Tensor, shape: Sequence[int]) -> Self:
        """Make a matrix of compressed rows; the columns within one may be in any order.

        Args:
            crow: The pointers, integers of shape [rows + 1] that ascend from 0 to the number of entries.
            col: The column of each entry, integers of shape [entries].
            values: Floating point, [entries], or [entries, p, q] for blocks; they stay on the tape.
            shape: Rows and columns of the matrix.

        Returns:
            The matrix. It shares ``crow``, ``col`` and ``values`` if they are int64 and the columns ascend.

        Raises:
            ValueError: As :meth:`from_coo`; ``crow`` does not ascend or has a wrong length; a cell occurs twice.
            TypeError: As :meth:`from_coo`.

        Example:
            >>> crow, col = torch.tensor([0, 1, 1]), torch.tensor([1])
            >>> metagrad.sparse.SparseTensor.from_csr(crow, col, torch.tensor([5.0]), (2, 2)).to_dense()
            tensor([[0., 5.],
                    [0., 0.]])
        """
        call = "SparseTensor.from_csr(crow, col, values, shape)"
        return cls._of(*assemble.from_compressed(call, crow, col, values, shape))

    @classmethod
    def from_csc(cls, ccol: Tensor, row: Tensor, values: Tensor, shape: Sequence[int]) -> Self:
        """Make a matrix of compressed columns; as :meth:`from_csr`, with rows and columns exchanged.

        Example:
            >>> ccol, row = torch.tensor([0, 0, 2]), torch.tensor([0, 1])
            >>> metagrad.sparse.SparseTensor.from_csc(ccol, row, torch.tensor([5.0, 6.0]), (2, 2)).to_dense()
            tensor([[0., 5.],
                    [0., 6.]])
        """
        call = "SparseTensor.from_csc(ccol, row, values, shape)"
        return cls._of(*assemble.from_compressed(call, ccol, row, values, shape, columns=True))

    @classmethod
    def from_bsr(cls, crow: Tensor, col: Tensor, blocks: Tensor, shape: Sequence[int]) -> Self:
        """Make a matrix of compressed rows of blocks; as :meth:`from_csr`, with ``blocks`` [entries, p, q].

        Example:
            >>> crow, col, blocks = torch.tensor([0, 1]), torch.tensor([1]), torch.ones(1, 2, 2)
            >>> metagrad.sparse.SparseTensor.from_bsr(crow, col, blocks, (2, 4)).to_dense()
            tensor([[0., 0., 1., 1.],
                    [0., 0., 1., 1.]])
        """
        call = "SparseTensor.from_bsr(crow, col, blocks, shape)"
        check_floating(call, "blocks", blocks)
        if blocks.ndim != 3:
            raise ValueError(f"{call}: blocks must have shape [entries, p, q], got {list(blocks.shape)}.")
        return cls._of(*assemble.from_compressed(call, crow, col, blocks, shape))

    @classmethod
    def from_edges(cls, edge_index: Tensor, values: Tensor | None = None, *, shape: Sequence[int]) -> Self:
        """Make the adjacency matrix of an edge list: edge e goes from row ``edge_index[0, e]`` to a column.

        Where messages flow along the edges, from source to target, they are summed by ``a.t() @ x``.

        Args:
            edge_index: The ends of each edge, integers of shape [2, edges], in any order; parallel edges are added.
            values: The weight of each edge, [edges], which stays on the tape; None is 1 for each.
            shape: Rows and columns, both the number of nodes for a graph on one set of them.

        Returns:
            The matrix.

        Raises:
            ValueError: ``edge_index`` is not [2, edges]; and as :meth:`from_coo`.
            TypeError: As :meth:`from_coo`.

        Example:
            >>> edges = torch.tensor([[0, 0, 1], [1, 2, 2]])
            >>> a = metagrad.sparse.SparseTensor.from_edges(edges, shape=(3, 3))
            >>> a.t() @ torch.tensor([1.0, 10.0, 100.0])
            tensor([ 0.,  1., 11.])
        """
        call = "SparseTensor.from_edges(edge_index, values, shape=...)"
        if not isinstance(edge_index, Tensor) or edge_index.ndim != 2 or len(edge_index) != 2:
            what = list(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index).__name__
            raise ValueError(f"{call}: edge_index must be a tensor of shape [2, edges], got {what}.")
        row, col = edge_index.unbind()
        weights = torch.ones(len(row), device=row.device) if values is None else values
        return cls._of(*assemble.from_entries(call, row, col, weights, shape))

    @classmethod
    def from_dense(cls, tensor: Tensor, mask: Tensor | None = None) -> Self:
        """Take cells of a strided matrix; their gradient reaches it.

        Args:
            tensor: Floating point, [n, m].
            mask: The cells to take, bools [n, m]; None takes those that are not zero. As the tensor changes, the
                pattern does not: give a mask where zeros may come and go.

        Returns:
            The matrix; a copy of the cells.

        Raises:
            ValueError: ``tensor`` is not two-dimensional, or ``mask`` has another shape or device.
            TypeError: ``tensor`` is not strided floating point, or ``mask`` is not bool.

        Example:
            >>> metagrad.sparse.SparseTensor.from_dense(torch.tensor([[0.0, 5.0], [6.0, 0.0]]))
            SparseTensor(shape=(2, 2), nnz=2, values=tensor([5., 6.]))
        """
        call = "SparseTensor.from_dense(tensor, mask)"
        check_floating(call, "tensor", tensor)
        if tensor.ndim != 2:
            raise ValueError(f"{call}: tensor must have two dimensions, got shape {list(tensor.shape)}.")
        pattern = Pattern.from_mask(tensor != 0 if mask is None else mask)
        if pattern.shape != tuple(tensor.shape) or pattern.device != tensor.device:
            raise ValueError(
                f"{call}: mask must have the shape and the device of tensor, {list(tensor.shape)} on "
                f"{tensor.device}, got {list(pattern.shape)} on {pattern.device}."
            )
        return cls._of(pattern, tensor[pattern.row, pattern.col])

    @classmethod
    def from_torch(cls, tensor: Tensor) -> Self:
        """Convert a torch sparse tensor of any of the five layouts; blocks of BSR and BSC stay blocks.

        Args:
            tensor: COO, coalesced or not, CSR, CSC, BSR or BSC, of two dimensions.

        Returns:
            The matrix, which shares the memory of ``tensor`` where the order is row-major; it is off the tape.

        Raises:
            ValueError: ``tensor`` requires grad: torch cuts the graph of its values at order 2. Or it has more
                dimensions, or rows as entries.
            TypeError: ``tensor`` is strided, or its numbers are not real floating point.

        Example:
            >>> metagrad.sparse.SparseTensor.from_torch(torch.eye(2).to_sparse())
            SparseTensor(shape=(2, 2), nnz=2, values=tensor([1., 1.]))
        """
        return cls._of(*interchange.from_torch(tensor))

    @classmethod
    def from_scipy(cls, matrix: sparray | spmatrix) -> Self:
        """Convert a SciPy sparse array or matrix of any format; blocks of BSR stay blocks, duplicates are added.

        The memory of the values is shared where their order is row-major and it is writeable.

        Raises:
            ValueError: ``matrix`` does not have two dimensions.
            TypeError: ``matrix`` is not SciPy's, or its numbers are not float32 or float64.

        Example:
            >>> import scipy.sparse
            >>> metagrad.sparse.SparseTensor.from_scipy(scipy.sparse.eye_array(2, format="csc"))
            SparseTensor(shape=(2, 2), nnz=2, values=tensor([1., 1.], dtype=torch.float64))
        """
        return cls._of(*interchange.from_scipy(matrix))

    def coo(self) -> COO:
        """Return the rows, columns and values, differentiable and without a copy.

        Example:
            >>> metagrad.sparse.SparseTensor.from_dense(torch.tensor([[0.0, 5.0], [6.0, 0.0]])).coo()
            COO(row=tensor([0, 1]), col=tensor([1, 0]), values=tensor([5., 6.]))
        """
        return COO(self.pattern.row, self.pattern.col, self.values)

    def csr(self) -> CSR:
        """Return the row pointers, columns and values, differentiable and without a copy.

        Example:
            >>> metagrad.sparse.SparseTensor.from_dense(torch.tensor([[0.0, 5.0], [6.0, 0.0]])).csr()
            CSR(crow=tensor([0, 1, 2]), col=tensor([1, 0]), values=tensor([5., 6.]))
        """
        return CSR(self.pattern.crow, self.pattern.col, self.values)

    def csc(self) -> CSC:
        """Return the column pointers, rows and values in the order of columns, differentiable.

        Example:
            >>> metagrad.sparse.SparseTensor.from_dense(torch.tensor([[0.0, 5.0], [6.0, 0.0]])).csc()
            CSC(ccol=tensor([0, 1, 2]), row=tensor([1, 0]), values=tensor([6., 5.]))
        """
        values = self.values.index_select(0, self.pattern.csc_order)
        return CSC(self.pattern.ccol, self.pattern.t().col, values)

    def to_blocks(self, block: tuple[int, int]) -> Self:
        """Gather the entries in p x q blocks, zero where no entry is; differentiable.

        Each call finds the blocks and makes a new pattern: call it once, and train the blocks.

        Raises:
            ValueError: The blocks do not divide the matrix.
            TypeError: ``block`` is not two integers.

        Example:
            >>> a = metagrad.sparse.SparseTensor.from_dense(torch.tensor([[0.0, 5.0, 0.0, 0.0]]))
            >>> a.to_blocks((1, 2))
            SparseTensor(shape=(1, 4), nnz=2, blocks=(1, 2), values=tensor([[[0., 5.]]]))
        """
        scalar = self.scalar()
        sizes = check_block("SparseTensor.to_blocks(block)", block, scalar.pattern.shape)
        return self._of(*assemble.to_blocks(scalar.pattern, scalar.values, sizes))

    def to_torch(self, layout: torch.layout = torch.sparse_coo) -> Tensor:
        """Make a torch sparse tensor, off the tape; its memory is shared where the order is the same.

        Args:
            layout: COO, CSR or CSC, of numbers; or BSR or BSC, of the blocks, 1 x 1 where the entries are numbers.

        Raises:
            ValueError: The values require grad, which would end silently: detach first. Or the layout is not sparse.

        Example:
            >>> a = metagrad.sparse.SparseTensor.from_dense(torch.eye(2))
            >>> a.to_torch(torch.sparse_csr).values()
            tensor([1., 1.])
        """
        call = "SparseTensor.to_torch(layout)"
        interchange.check_layout(call, layout)
        interchange.check_leaving(call, self.values)
        a = self if layout in interchange.BLOCK_LAYOUTS else self.scalar()
        return interchange.to_torch(a.pattern, a.values, layout)

    def to_scipy(self, format: interchange.ScipyFormat = "csr") -> sparray:
        """Make a SciPy sparse array, off the tape; CSR and BSR share the memory of the values.

        Args:
            format: "coo", "csr", "csc", "dia", "dok" or "lil", of numbers; or "bsr", of the blocks.

        Raises:
            ValueError: The values require grad, or are not on the CPU; or SciPy has no such format.
            TypeError: The values are neither float32 nor float64.

        Example:
            >>> metagrad.sparse.SparseTensor.from_dense(torch.eye(2)).to_scipy().sum().item()
            2.0
        """
        call = "SparseTensor.to_scipy(format)"
        interchange.check_scipy_target(call, self.values, format)
        interchange.check_leaving(call, self.values)
        a = self if format == "bsr" else self.scalar()
        return interchange.to_scipy(a.pattern, a.values, format)
