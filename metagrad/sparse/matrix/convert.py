"""The other forms of a sparse matrix: its parts, its blocks, torch's and SciPy's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from metagrad.sparse.checks import check_block
from metagrad.sparse.matrix import assemble, interchange
from metagrad.sparse.matrix.construct import Constructors
from metagrad.sparse.matrix.pattern import Pattern

if TYPE_CHECKING:
    from scipy.sparse import sparray
    from typing_extensions import Self

    from metagrad.sparse.matrix.tensor import SparseTensor


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


class Conversions(Constructors):
    """The conversions of :class:`SparseTensor`, from (:class:`Constructors`) and to other forms."""

    __slots__ = ()

    if TYPE_CHECKING:
        pattern: Pattern
        values: Tensor

        def scalar(self) -> SparseTensor: ...  # noqa: D102

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
