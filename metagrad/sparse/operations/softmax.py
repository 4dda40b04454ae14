"""Softmax over the entries of a segment, and over the stored entries of a row or a column."""

from __future__ import annotations

import math

from torch import Tensor

from metagrad.sparse.kernels.accumulation import widened
from metagrad.sparse.matrix.tensor import SparseTensor
from metagrad.sparse.operations.elementwise import as_sparse
from metagrad.sparse.operations.reduce import entries_along
from metagrad.sparse.operations.segment_functions import Index, check_entries, largest, spread, total


def segment_softmax(values: Tensor, index: Index, num_segments: int | None = None) -> Tensor:
    r"""Normalise the exponentials of the entries of each segment.

    .. math:: y_e = e^{v_e} \Big/ \sum_{e' : s(e') = s(e)} e^{v_{e'}}

    The largest entry of a segment is subtracted first, so no exponential overflows.

    Args:
        values: Scores, floating point, [entries, ...]; minus infinity gives a weight of 0.
        index: :class:`Segments`, or ids of shape [entries], as :func:`gather` takes them.
        num_segments: How many segments there are; with ids alone.

    Returns:
        Weights in the shape of ``values``, which sum to one over each segment; 0, with a gradient of 0, over one that
        is minus infinity throughout (``torch.softmax`` gives NaN there).

    Raises:
        ValueError: As :func:`segment_sum`.
        TypeError: As :func:`segment_sum`.

    Example:
        >>> scores = torch.tensor([1.0, 2.0, 2.0, 2.0])
        >>> metagrad.sparse.segment_softmax(scores, torch.tensor([0, 1, 1, 3]), 4)
        tensor([1.0000, 0.5000, 0.5000, 1.0000])
    """
    index, num = check_entries("segment_softmax(values, index, num_segments)", values, index, num_segments)
    weights, sums = _exponentials(widened(values), index, num)[1:]
    return (weights / spread(sums, index)).to(values.dtype)


def softmax(a: SparseTensor, dim: int = -1) -> SparseTensor:
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
    index = entries_along("softmax(a, dim)", scalar.pattern, dim)
    return SparseTensor._of(scalar.pattern, segment_softmax(scalar.values, index))


def log_softmax(a: SparseTensor, dim: int = -1) -> SparseTensor:
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
    index = entries_along("log_softmax(a, dim)", scalar.pattern, dim)
    shifted, _, sums = _exponentials(widened(scalar.values), index, index.num_segments)
    values = shifted - spread(sums.log(), index)
    return SparseTensor._of(scalar.pattern, values.to(scalar.values.dtype))


def _exponentials(values: Tensor, index: Index, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores below their maximum, their exponentials, and the sums of these; 1 where there are none."""
    top = largest(values, index, num)
    shifted = values - spread(top.masked_fill(top == -math.inf, 0), index)
    weights = shifted.exp()
    sums = total(weights, index, num)
    return shifted, weights, sums.masked_fill(sums == 0, 1)
