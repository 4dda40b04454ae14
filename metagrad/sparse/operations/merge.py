"""Sums and products by elements: of two sparse matrices, and of a sparse and a dense one."""

from __future__ import annotations

from numbers import Real
from typing import overload

import torch
from torch import Tensor

from metagrad.sparse.checks import check_floating, check_same
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.matrix.pattern import Pattern
from metagrad.sparse.matrix.tensor import SparseTensor
from metagrad.sparse.operations.elementwise import as_sparse
from metagrad.sparse.policies.stats import count_merge


@overload
def add(a: SparseTensor, b: SparseTensor | float) -> SparseTensor: ...
@overload
def add(a: SparseTensor, b: Tensor) -> Tensor: ...
def add(a: SparseTensor, b: SparseTensor | Tensor | float) -> SparseTensor | Tensor:
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
def sub(a: SparseTensor, b: SparseTensor | float) -> SparseTensor: ...
@overload
def sub(a: SparseTensor, b: Tensor) -> Tensor: ...
def sub(a: SparseTensor, b: SparseTensor | Tensor | float) -> SparseTensor | Tensor:
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
    return _add("sub(a, b)", a, as_sparse("sub(a, b)", "b", b).neg())


def mul(a: SparseTensor, b: SparseTensor | Tensor | float) -> SparseTensor:
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
        return SparseTensor._of(a.pattern, a.values * float(b))
    if isinstance(b, Tensor):
        a, factor = _at_entries(call, a, b)
        return SparseTensor._of(a.pattern, a.values * factor)
    a, b = _alike(call, a, as_sparse(call, "b", b))
    if a.pattern is b.pattern:
        count_merge("avoided")
        return SparseTensor._of(a.pattern, a.values * b.values)
    both = a.pattern.intersection(b.pattern)
    return SparseTensor._of(
        both.pattern, a.values.index_select(0, both.left) * b.values.index_select(0, both.right)
    )


def div(a: SparseTensor, b: Tensor | float) -> SparseTensor:
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
        return SparseTensor._of(a.pattern, a.values / float(b))
    if not isinstance(b, Tensor):
        raise TypeError(
            f"{call}: b must be dense or a number, got {type(b).__name__}: zero would be divided by zero. On one "
            "pattern, a.with_values(a.values / b.values) divides the stored entries."
        )
    a, factor = _at_entries(call, a, b)
    return SparseTensor._of(a.pattern, a.values / factor)


def _add(call: str, a: SparseTensor, b: SparseTensor | Tensor | float) -> SparseTensor | Tensor:
    if isinstance(b, Tensor):
        return _onto_dense(call, a, b)
    if isinstance(b, Real):
        if b != 0:
            raise ValueError(
                f"{call}: a number is added to every cell, stored or not, got {b}. Use a.with_values(a.values + {b}) "
                f"for the stored entries alone, or a.to_dense() + {b}."
            )
        return a
    a, b = _alike(call, a, as_sparse(call, "b", b))
    if a.pattern is b.pattern:
        count_merge("avoided")
        return SparseTensor._of(a.pattern, a.values + b.values)
    both = a.pattern.union(b.pattern)
    zeros = a.values.new_zeros(both.pattern.nnz, *a.values.shape[1:])
    values = zeros.index_add(0, both.left, a.values).index_add(0, both.right, b.values)
    return SparseTensor._of(both.pattern, values)


def _onto_dense(call: str, a: SparseTensor, b: Tensor) -> Tensor:
    check_floating(call, "b", b)
    check_same(call, "a and b", a.values, b)
    if b.shape != a.shape:
        raise ValueError(
            f"{call}: a is {tuple(a.shape)}, so a dense b must be too, got {tuple(b.shape)}. For the dense sum of a "
            "smaller b, use a.to_dense()."
        )
    scalar = a.scalar()
    return b.index_put((scalar.pattern.row, scalar.pattern.col), scalar.values, accumulate=True)


def _alike(call: str, a: SparseTensor, b: SparseTensor) -> tuple[SparseTensor, SparseTensor]:
    """Return two matrices whose entries are of one size."""
    check_same(call, "a and b", a.values, b.values)
    if a.shape != b.shape:
        raise ValueError(f"{call}: a is {tuple(a.shape)}, so b must be too, got {tuple(b.shape)}.")
    return (a, b) if a.block_shape == b.block_shape else (a.scalar(), b.scalar())


def _at_entries(call: str, a: SparseTensor, b: Tensor) -> tuple[SparseTensor, Tensor]:
    """Return a matrix, and the number of a dense one for each of its entries."""
    check_floating(call, "b", b)
    check_same(call, "a and b", a.values, b)
    if b.numel() == 1 and b.ndim <= 2:
        return a, b.reshape(())
    grid, (n, m) = torch.atleast_2d(b), a.shape
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
