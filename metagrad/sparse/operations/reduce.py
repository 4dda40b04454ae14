"""Sums, means, maxima, norms and softmax of a sparse matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic

from torch import Tensor

from metagrad.core.checks import is_integer, is_number, refuse
from metagrad.core.tree import widened
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.operations.entries import Entries, Matrix, as_sparse, like
from metagrad.sparse.operations.segments import exponentials, segment_max, segment_softmax, spread
from metagrad.sparse.pattern import Pattern, Segments


class Reductions(Generic[Matrix]):
    """Sums, means, maxima, norms and softmax.

    ``dim`` is None for everything, 1 or -1 for each row, 0 or -2 for each column. ``keepdim`` keeps the reduced
    dimension with size 1. Results are dense.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 0, 1]), torch.tensor([0, 2, 1]), (2, 3))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([1.0, 3.0, 4.0]))
        >>> a.sum(), a.sum(dim=1), a.sum(dim=0)
        (tensor(8.), tensor([4., 4.]), tensor([1., 4., 3.]))
        >>> (a / a.sum(dim=1, keepdim=True)).values
        tensor([0.2500, 0.7500, 1.0000])
    """

    __slots__ = ()

    @property
    def _matrix(self) -> Matrix:
        raise NotImplementedError

    def sum(self, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
        """Add all cells, or the cells of each row or column."""
        return _summed("a.sum(dim)", self._matrix, dim, keepdim).to(self._matrix.values.dtype)

    def mean(self, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
        """Average all cells, or the cells of each row or column, stored or not: the mean of the dense matrix."""
        a = self._matrix
        sums = _summed("a.mean(dim)", a, dim, keepdim)
        return (sums / (a.shape[0] * a.shape[1] if dim is None else a.shape[dim])).to(a.values.dtype)

    def max(self, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
        """Return the largest stored entry, or the largest entry of each row or column. It is 0 without entries.

        Cells that are not stored are ignored. ``a.relu().max(dim)`` includes their zeros. The gradient is described
        in :func:`metagrad.sparse.segment_max`.
        """
        a = self._matrix
        if dim is None:
            return _kept(a.values.amax() if a.pattern.nnz else a.values.sum(), dim, keepdim)
        return _kept(segment_max(a.values, _along("a.max(dim)", a.pattern, dim)), dim, keepdim)

    def norm(self, p: float = 2) -> Tensor:
        """Compute the p-norm of the entries, for ``p`` of 1 or more or ``math.inf``.

        The norm is not differentiable at the zero matrix, and for some ``p`` at an entry that is zero. Derivatives of
        every order are 0 there, never NaN.
        """
        given = self._matrix.values
        values = widened(given)
        if not is_number(p) or not p >= 1:
            raise ValueError(f"a.norm(p): p must be 1 or more, got {p}.")
        if p == math.inf:
            return given.abs().amax() if given.numel() else given.sum()
        powers = values**p if p % 2 == 0 else _without_zeros(values, lambda x: x.abs() ** p)
        return _without_zeros(powers.sum(), lambda x: x ** (1 / p)).to(given.dtype)

    def softmax(self, dim: int = -1) -> Matrix:
        """Compute the softmax of each row or column. See :func:`metagrad.sparse.softmax`."""
        return softmax(self._matrix, dim)

    def log_softmax(self, dim: int = -1) -> Matrix:
        """Compute the logarithm of :meth:`softmax` without underflow.

        The log-weight of a cell that is not stored is minus infinity. :meth:`SparseTensor.to_dense` writes 0 there.
        """
        a = self._matrix
        index = _along("a.log_softmax(dim)", a.pattern, dim)
        shifted, _, sums = exponentials(widened(a.values), index, index.num_segments)
        return like(a, a.pattern, (shifted - spread(sums.log(), index)).to(a.values.dtype))


def softmax(a: Matrix, dim: int = -1) -> Matrix:
    r"""Compute the softmax of the stored entries of each row or column.

    .. math:: y_{ij} = e^{a_{ij}} \Big/ \sum_{k \text{ stored in row } i} e^{a_{ik}}

    A cell that is not stored counts as minus infinity, as in ``torch.sparse.softmax``.

    Args:
        a: Sparse, [n, m].
        dim: 1 or -1 for each row, 0 or -2 for each column.

    Returns:
        Weights on the same pattern.

    Raises:
        ValueError: ``dim`` is out of range.
        TypeError: ``a`` is not a SparseTensor.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 0, 1]), torch.tensor([0, 2, 1]), (2, 3))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([3.0, 3.0, -9.0]))
        >>> metagrad.sparse.softmax(a).to_dense()
        tensor([[0.5000, 0.0000, 0.5000],
                [0.0000, 1.0000, 0.0000]])
    """
    matrix = as_sparse("softmax(a, dim)", "a", a)
    index = _along("softmax(a, dim)", matrix.pattern, dim)
    return like(matrix, matrix.pattern, segment_softmax(matrix.values, index))


def _along(call: str, pattern: Pattern, dim: int) -> Segments:
    """Group the entries by row for the last dimension, by column for the first."""
    if not is_integer(dim) or not -2 <= dim <= 1:
        refuse(f"{call}: dim", "0 (each column), 1 (each row) or None (everything)", dim)
    return pattern.rows if dim in (1, -1) else pattern.cols


def _summed(call: str, a: Entries, dim: int | None, keepdim: bool) -> Tensor:
    """Add all cells, or the cells of each row or column, in the dtype of accumulation."""
    values = widened(a.values)
    if dim is None:
        return _kept(values.sum(), dim, keepdim)
    index = _along(call, a.pattern, dim)
    return _kept(rules.segment_sum(values, index), dim, keepdim)


def _kept(result: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    if not keepdim:
        return result
    return result.reshape(1, 1) if dim is None else result.unsqueeze(dim)


def _without_zeros(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function that is 0 at 0, with zero derivatives at 0."""
    is_zero = x == 0
    return function(x.masked_fill(is_zero, 1)).masked_fill(is_zero, 0)
