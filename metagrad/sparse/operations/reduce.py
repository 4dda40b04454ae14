"""Sums, means, maxima, norms and softmax of a sparse matrix."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from metagrad.core.tree import widened
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.operations.entries import Entries, Matrix, as_sparse, like
from metagrad.sparse.operations.segments import exponentials, segment_max, segment_softmax, spread
from metagrad.sparse.pattern import Pattern, Segments


def sum(a: Entries, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
    r"""Add all cells, or those of each row or column.

    .. math:: y = \sum_{ij} a_{ij}, \qquad y_i = \sum_j a_{ij}\ (\mathrm{dim} = 1), \qquad
        y_j = \sum_i a_{ij}\ (\mathrm{dim} = 0)

    Args:
        a: Sparse, [n, m].
        dim: None, everything; 1 or -1, each row; 0 or -2, each column.
        keepdim: Keep the dimension summed over with size 1, so that the result broadcasts against ``a``.

    Returns:
        Dense: a scalar, [n] or [m].

    Raises:
        ValueError: ``dim`` is out of range.
        TypeError: ``a`` is not a SparseTensor.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 0, 1]), torch.tensor([0, 2, 1]), (2, 3))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([1.0, 2.0, 4.0]))
        >>> a.sum(), a.sum(dim=1), a.sum(dim=0)
        (tensor(7.), tensor([3., 4.]), tensor([1., 4., 2.]))
        >>> (a / a.sum(dim=1, keepdim=True)).values
        tensor([0.3333, 0.6667, 1.0000])
    """
    a = as_sparse("sum(a, dim)", "a", a)
    return _summed("sum(a, dim)", a, dim, keepdim).to(a.values.dtype)


def mean(a: Entries, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
    r"""Average all cells, or those of each row or column, stored or not.

    .. math:: y = \frac{1}{nm} \sum_{ij} a_{ij}, \qquad y_i = \frac{1}{m} \sum_j a_{ij}\ (\mathrm{dim} = 1)

    This is the mean of the dense matrix. The mean of the stored entries of each row is
    ``segment_mean(a.values, a.pattern.rows)``, that of all of them ``a.values.mean()``.

    Args:
        a: Sparse, [n, m].
        dim: None, everything; 1 or -1, each row; 0 or -2, each column.
        keepdim: Keep the dimension averaged over with size 1.

    Returns:
        Dense: a scalar, [n] or [m]; NaN where there are no cells at all.

    Raises:
        ValueError: ``dim`` is out of range.
        TypeError: ``a`` is not a SparseTensor.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 0, 1]), torch.tensor([0, 2, 1]), (2, 4))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([1.0, 3.0, 4.0]))
        >>> a.mean(), a.mean(dim=1)
        (tensor(1.), tensor([1., 1.]))
        >>> metagrad.sparse.segment_mean(a.values, a.pattern.rows)
        tensor([2., 4.])
    """
    a = as_sparse("mean(a, dim)", "a", a)
    sums = _summed("mean(a, dim)", a, dim, keepdim)
    return (sums / (a.shape[0] * a.shape[1] if dim is None else a.shape[dim])).to(a.values.dtype)


def max(a: Entries, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
    r"""Take the largest stored entry of all, or of each row or column.

    .. math:: y = \max_{ij \text{ stored}} a_{ij}, \qquad y_i = \max_{j \text{ stored in row } i} a_{ij}

    Cells that are not stored do not take part: a row of one entry, -2, has the maximum -2, and 0 in the dense
    matrix. ``a.relu().max(dim)`` counts their zeros. The gradient is that of :func:`segment_max`.

    Args:
        a: Sparse, [n, m]; blocks become scalars.
        dim: None, everything; 1 or -1, each row; 0 or -2, each column.
        keepdim: Keep the dimension reduced with size 1.

    Returns:
        Dense: a scalar, [n] or [m]; 0 where nothing is stored.

    Raises:
        ValueError: ``dim`` is out of range.
        TypeError: ``a`` is not a SparseTensor.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 0, 1]), torch.tensor([0, 2, 1]), (3, 3))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([1.0, 3.0, -2.0]))
        >>> a.max(), a.max(dim=1)
        (tensor(3.), tensor([ 3., -2.,  0.]))
    """
    scalar = as_sparse("max(a, dim)", "a", a).scalar()
    if dim is None:
        return _kept(scalar.values.amax() if scalar.pattern.nnz else scalar.values.sum(), dim, keepdim)
    index = _along("max(a, dim)", scalar.pattern, dim)
    return _kept(segment_max(scalar.values, index), dim, keepdim)


def norm(a: Entries, p: float = 2) -> Tensor:
    r"""Compute the p-norm of the entries; by default the Frobenius norm of the matrix.

    .. math:: y = \Big( \sum_{ij} |a_{ij}|^p \Big)^{1/p}, \qquad y = \max_{ij} |a_{ij}|\ (p = \infty)

    The norm has a corner at the zero matrix, and for a ``p`` that is not an even number :math:`|a|^p` may have one at
    an entry that is zero. Derivatives of every order are taken to be 0 there, never NaN.

    Args:
        a: Sparse, [n, m].
        p: The order, 1 or more; ``math.inf`` is the largest magnitude.

    Returns:
        Dense, a scalar.

    Raises:
        ValueError: ``p`` is below 1.
        TypeError: ``a`` is not a SparseTensor.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([3.0, -4.0]))
        >>> a.norm(), a.norm(p=1), a.norm(p=float("inf"))
        (tensor(5.), tensor(7.), tensor(4.))
    """
    given = as_sparse("norm(a, p)", "a", a).values
    values = widened(given)
    if not p >= 1:
        raise ValueError(f"norm(a, p): p must be 1 or more, got {p}.")
    if p == math.inf:
        return given.abs().amax() if given.numel() else given.sum()
    powers = values**p if p % 2 == 0 else _without_zeros(values, lambda x: x.abs() ** p)
    return _without_zeros(powers.sum(), lambda x: x ** (1 / p)).to(given.dtype)


def softmax(a: Matrix, dim: int = -1) -> Matrix:
    r"""Normalise the exponentials of the stored entries of each row, or of each column.

    .. math:: y_{ij} = e^{a_{ij}} \Big/ \sum_{k \text{ stored in row } i} e^{a_{ik}}

    A cell that is not stored counts as minus infinity, as in ``torch.sparse.softmax``.

    Args:
        a: Sparse, [n, m]; blocks become scalars.
        dim: 1 or -1, each row; 0 or -2, each column.

    Returns:
        Weights on the same pattern; a row without entries has none.

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
    scalar = as_sparse("softmax(a, dim)", "a", a).scalar()
    index = _along("softmax(a, dim)", scalar.pattern, dim)
    return like(scalar, scalar.pattern, segment_softmax(scalar.values, index))


def log_softmax(a: Matrix, dim: int = -1) -> Matrix:
    r"""Compute the logarithm of :func:`softmax`, without the underflow of its two steps.

    .. math:: y_{ij} = a_{ij} - \log \sum_{k \text{ stored in row } i} e^{a_{ik}}

    Args:
        a: Sparse, [n, m]; blocks become scalars.
        dim: 1 or -1, each row; 0 or -2, each column.

    Returns:
        Log-weights on the same pattern. A cell that is not stored has a weight of 0, so its log-weight is minus
        infinity, and not the 0 that :meth:`SparseTensor.to_dense` writes there.

    Raises:
        ValueError: ``dim`` is out of range.
        TypeError: ``a`` is not a SparseTensor.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 0]), torch.tensor([0, 2]), (1, 3))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([0.0, 1000.0]))
        >>> metagrad.sparse.log_softmax(a).values
        tensor([-1000.,     0.])
    """
    scalar = as_sparse("log_softmax(a, dim)", "a", a).scalar()
    index = _along("log_softmax(a, dim)", scalar.pattern, dim)
    shifted, _, sums = exponentials(widened(scalar.values), index, index.num_segments)
    values = shifted - spread(sums.log(), index)
    return like(scalar, scalar.pattern, values.to(scalar.values.dtype))


def _along(call: str, pattern: Pattern, dim: int) -> Segments:
    """Group the entries by row for the last dimension, by column for the first."""
    if dim not in (-2, -1, 0, 1):
        raise ValueError(
            f"{call}: dim must be 0 (each column), 1 (each row) or None (everything), got {dim!r}."
        )
    return pattern.rows if dim in (1, -1) else pattern.cols


def _summed(call: str, a: Entries, dim: int | None, keepdim: bool) -> Tensor:
    """Add all cells, or those of each row or column, in the dtype in which sums are accumulated."""
    values = widened(a.values)
    if dim is None:
        return _kept(values.sum(), dim, keepdim)
    index = _along(call, a.pattern, dim)
    # The numbers of a block in one row, or one column, are added first: a block is never taken apart.
    values = values.sum(2 if index is a.pattern.rows else 1) if a.is_blocked else values
    return _kept(rules.segment_sum(values, index).reshape(-1), dim, keepdim)


def _kept(result: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    if not keepdim:
        return result
    return result.reshape(1, 1) if dim is None else result.unsqueeze(dim)


def _without_zeros(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function that is 0 at 0, with derivatives of 0 there."""
    is_zero = x == 0
    return function(x.masked_fill(is_zero, 1)).masked_fill(is_zero, 0)
