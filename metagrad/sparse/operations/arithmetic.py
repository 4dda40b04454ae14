"""Arithmetic by elements: sums and products of two matrices, sparse or dense, powers and dropout."""

from __future__ import annotations

from numbers import Real
from typing import overload

import torch.nn.functional as F
from torch import Tensor

from metagrad.core._torch import at_least_2d
from metagrad.core.checks import is_a
from metagrad.sparse.checks import check_floating, check_same
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.operations.entries import Entries, Matrix, as_sparse, like
from metagrad.sparse.pattern import Pattern
from metagrad.sparse.statistics import count_merge


@overload
def add(a: Matrix, b: Matrix | float) -> Matrix: ...
@overload
def add(a: Entries, b: Tensor) -> Tensor: ...
def add(a: Matrix, b: Matrix | Tensor | float) -> Matrix | Tensor:
    r"""Add a sparse matrix to another one, or to a dense one.

    .. math:: y_{ij} = a_{ij} + b_{ij}

    Two matrices on the same Pattern add as vectors. For two patterns the union, and where each entry goes in it, is
    found once and kept with them.

    Args:
        a: Sparse, [n, m].
        b: Sparse or dense, [n, m]; or the number 0, so that Python's ``sum`` adds a list.

    Returns:
        Sparse on the union of the patterns, which is the pattern of one of them where it contains the other; blocks
        stay blocks where both have blocks of one size. With a dense ``b``, dense.

    Raises:
        ValueError: The shapes or devices differ (a dense ``b`` is not repeated: the sum would be as large as the
            matrix), or ``b`` is a number other than 0.
        TypeError: Operands of other types or of two dtypes.

    Example:
        >>> a = metagrad.sparse.SparseTensor(metagrad.sparse.Pattern.banded(2, 0), torch.tensor([1.0, 2.0]))
        >>> b = metagrad.sparse.SparseTensor(metagrad.sparse.Pattern.banded(2, 1), torch.tensor([10.0, 20.0, 30.0]))
        >>> (a + b).to_dense()
        tensor([[11.,  0.],
                [20., 32.]])
        >>> (a + b).pattern is b.pattern, (a + torch.ones(2, 2)).tolist()
        (True, [[2.0, 1.0], [1.0, 3.0]])
    """
    return _add("add(a, b)", as_sparse("add(a, b)", "a", a), b)


@overload
def sub(a: Matrix, b: Matrix | float) -> Matrix: ...
@overload
def sub(a: Entries, b: Tensor) -> Tensor: ...
def sub(a: Matrix, b: Matrix | Tensor | float) -> Matrix | Tensor:
    r"""Subtract a matrix from a sparse one.

    .. math:: y_{ij} = a_{ij} - b_{ij}

    Args:
        a: Sparse, [n, m].
        b: As :func:`add` takes it.

    Returns:
        As :func:`add` returns it.

    Raises:
        ValueError: As :func:`add`.
        TypeError: As :func:`add`.

    Example:
        >>> a = metagrad.sparse.SparseTensor(metagrad.sparse.Pattern.banded(2, 0), torch.tensor([1.0, 2.0]))
        >>> (a - a).values, (torch.ones(2, 2) - a).tolist()
        (tensor([0., 0.]), [[0.0, 1.0], [1.0, -1.0]])
    """
    a = as_sparse("sub(a, b)", "a", a)
    if isinstance(b, (Tensor, Real)):
        return _add("sub(a, b)", a, -b)
    other = as_sparse("sub(a, b)", "b", b)
    return _add("sub(a, b)", a, like(other, other.pattern, -other.values))


def mul(a: Matrix, b: Matrix | Tensor | float) -> Matrix:
    r"""Multiply element by element.

    .. math:: y_{ij} = a_{ij} \, b_{ij}

    Args:
        a: Sparse, [n, m].
        b: Sparse, [n, m]; dense, [n, m], [n, 1], [1, m], [m] or a scalar; or a number. Of a dense one only what
            stands at the entries is read, and a row or a column is never repeated.

    Returns:
        Sparse: on the intersection of two patterns, otherwise on that of ``a``. Cells that are not stored are zero
        and stay so, also where ``b`` is infinite or NaN. Blocks stay blocks with a number, a scalar, or blocks of
        the same size.

    Raises:
        ValueError: ``b`` does not fit the shape of ``a`` (the result would have to be larger), or two devices.
        TypeError: Operands of other types or of two dtypes.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0]))
        >>> (a * a).values, (2 * a).values, (a * torch.tensor([1.0, 10.0])).values
        (tensor([4., 9.]), tensor([4., 6.]), tensor([20.,  3.]))
    """
    call = "mul(a, b)"
    a = as_sparse(call, "a", a)
    if isinstance(b, Real):
        return like(a, a.pattern, a.values * float(b))
    if isinstance(b, Tensor):
        a, factor = _at_entries(call, a, b)
        return like(a, a.pattern, a.values * factor)
    a, other = _alike(call, a, as_sparse(call, "b", b))
    if a.pattern is other.pattern:
        count_merge("avoided")
        return like(a, a.pattern, a.values * other.values)
    both = a.pattern.intersection(other.pattern)
    return like(
        a, both.pattern, a.values.index_select(0, both.left) * other.values.index_select(0, both.right)
    )


def div(a: Matrix, b: Tensor | float) -> Matrix:
    r"""Divide element by element by a dense matrix or a number.

    .. math:: y_{ij} = a_{ij} / b_{ij}

    Args:
        a: Sparse, [n, m].
        b: Dense, in the shapes that :func:`mul` takes; or a number.

    Returns:
        Sparse, on the pattern of ``a``. Cells that are not stored are zero and stay so, also where ``b`` is zero:
        ``a / a.sum(dim=1, keepdim=True)`` leaves a row without entries empty.

    Raises:
        ValueError: ``b`` does not fit the shape of ``a``, or two devices.
        TypeError: ``b`` is sparse, whose zeros would divide; or operands of other types or of two dtypes.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0]))
        >>> (a / 2).values, (a / torch.tensor([[4.0], [6.0]])).values
        (tensor([1.0000, 1.5000]), tensor([0.5000, 0.5000]))
    """
    call = "div(a, b)"
    a = as_sparse(call, "a", a)
    if isinstance(b, Real):
        return like(a, a.pattern, a.values / float(b))
    if not isinstance(b, Tensor):
        raise TypeError(
            f"{call}: b must be dense or a number, got {type(b).__name__}: zero would be divided by zero. On one "
            "pattern, a.with_values(a.values / b.values) divides the stored entries."
        )
    a, factor = _at_entries(call, a, b)
    return like(a, a.pattern, a.values / factor)


def pow(a: Matrix, exponent: float) -> Matrix:
    r"""Raise every entry to a positive power.

    .. math:: y_{ij} = a_{ij}^p, \qquad p > 0

    Args:
        a: Sparse, [n, m], or with blocks.
        exponent: The power :math:`p`; at a stored zero a fractional one has the infinite derivatives that
            ``torch.pow`` gives there.

    Returns:
        The powers on the same pattern.

    Raises:
        ValueError: ``exponent`` is not positive: a cell that is not stored would become 1, or infinite.
        TypeError: ``a`` is not a SparseTensor, or ``exponent`` not a number.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, -3.0]))
        >>> (a**2).values, a.pow(3).values
        (tensor([4., 9.]), tensor([  8., -27.]))
    """
    a = as_sparse("pow(a, exponent)", "a", a)
    if not is_a(exponent, int, float):
        raise TypeError(f"pow(a, exponent): exponent must be a number, got {type(exponent).__name__}.")
    if not exponent > 0:
        raise ValueError(
            f"pow(a, exponent): exponent must be positive, got {exponent}: cells that are not stored are zero and "
            f"would not stay so. Use a.with_values(a.values**{exponent}) for the stored entries alone."
        )
    return like(a, a.pattern, a.values**exponent)


def dropout(a: Matrix, p: float = 0.5, *, training: bool = True) -> Matrix:
    r"""Set entries to zero at random, and scale the others up so that the expectation stays.

    .. math:: y_{ij} = \frac{z_{ij}}{1 - p}\, a_{ij}, \qquad z_{ij} \sim \mathrm{Bernoulli}(1 - p)

    The pattern stays: an entry that is dropped is stored as a zero, and its gradient is zero.

    Args:
        a: Sparse, [n, m]; with blocks each number is drawn for itself.
        p: The probability of a zero, from 0 to 1.
        training: False returns ``a`` as it is.

    Returns:
        A matrix on the same pattern.

    Raises:
        ValueError: ``p`` is not a probability.
        TypeError: ``a`` is not a SparseTensor.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0]))
        >>> a.dropout(1.0).values, a.dropout(0.5, training=False).values
        (tensor([0., 0.]), tensor([2., 3.]))
    """
    a = as_sparse("dropout(a, p)", "a", a)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout(a, p): p must be from 0 to 1, got {p}.")
    return like(a, a.pattern, F.dropout(a.values, p, training)) if training else a


def _add(call: str, a: Matrix, b: Matrix | Tensor | float) -> Matrix | Tensor:
    if isinstance(b, Tensor):
        return _onto_dense(call, a, b)
    if isinstance(b, Real):
        if b != 0:
            raise ValueError(
                f"{call}: a number is added to every cell, stored or not, got {b}. Use a.with_values(a.values + {b}) "
                f"for the stored entries alone, or a.to_dense() + {b}."
            )
        return a
    a, other = _alike(call, a, as_sparse(call, "b", b))
    if a.pattern is other.pattern:
        count_merge("avoided")
        return like(a, a.pattern, a.values + other.values)
    both = a.pattern.union(other.pattern)
    zeros = a.values.new_zeros(both.pattern.nnz, *a.values.shape[1:])
    values = zeros.index_add(0, both.left, a.values).index_add(0, both.right, other.values)
    return like(a, both.pattern, values)


def _onto_dense(call: str, a: Entries, b: Tensor) -> Tensor:
    check_floating(call, "b", b)
    check_same(call, "a and b", a.values, b)
    if b.shape != a.shape:
        raise ValueError(
            f"{call}: a is {tuple(a.shape)}, so a dense b must be too, got {tuple(b.shape)}. For the dense sum of a "
            "smaller b, use a.to_dense()."
        )
    scalar = a.scalar()
    return b.index_put((scalar.pattern.row, scalar.pattern.col), scalar.values, accumulate=True)


def _alike(call: str, a: Matrix, b: Matrix) -> tuple[Matrix, Matrix]:
    """Return two matrices whose entries are of one size."""
    check_same(call, "a and b", a.values, b.values)
    if a.shape != b.shape:
        raise ValueError(f"{call}: a is {tuple(a.shape)}, so b must be too, got {tuple(b.shape)}.")
    return (a, b) if a.block_shape == b.block_shape else (a.scalar(), b.scalar())


def _at_entries(call: str, a: Matrix, b: Tensor) -> tuple[Matrix, Tensor]:
    """Return a matrix, and the number of a dense one for each of its entries."""
    check_floating(call, "b", b)
    check_same(call, "a and b", a.values, b)
    if b.numel() == 1 and b.ndim <= 2:
        return a, b.reshape(())
    grid, (n, m) = at_least_2d(b), a.shape
    if grid.ndim > 2 or grid.shape[0] not in (1, n) or grid.shape[1] not in (1, m):
        raise ValueError(
            f"{call}: a is ({n}, {m}), so b must be [{n}, {m}], [{n}, 1], [1, {m}], [{m}] or a scalar, "
            f"got {list(b.shape)}."
        )
    scalar = a.scalar()
    return scalar, _read(grid, scalar.pattern)


def _read(grid: Tensor, pattern: Pattern) -> Tensor:
    """Read a matrix, a row [1, m] or a column [n, 1] at the entries of a pattern."""
    if grid.shape == pattern.shape:
        return grid[pattern.row, pattern.col]
    if grid.shape[0] == 1:
        return rules.gather(grid[0], pattern.cols)
    return rules.gather(grid[:, 0], pattern.rows)
