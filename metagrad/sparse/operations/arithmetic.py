"""Elementwise arithmetic of a sparse matrix with a sparse matrix, a dense matrix or a number."""

from __future__ import annotations

from numbers import Real
from typing import Generic, overload

import torch.nn.functional as F
from torch import Tensor

from metagrad.core._torch import at_least_2d
from metagrad.core.checks import is_a, is_number
from metagrad.sparse.checks import check_floating, check_same
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.operations.entries import Entries, Matrix, as_sparse, like
from metagrad.sparse.policy import count_merge


class Arithmetic(Generic[Matrix]):
    """Elementwise operators, powers and dropout."""

    __slots__ = ()

    @property
    def _matrix(self) -> Matrix:
        raise NotImplementedError

    @overload
    def __add__(self, other: Matrix | float) -> Matrix: ...
    @overload
    def __add__(self, other: Tensor) -> Tensor: ...
    def __add__(self, other: Matrix | Tensor | float) -> Matrix | Tensor:
        """Add a sparse or dense matrix of the same shape, or the number 0.

        If two matrices have the same Pattern, their values are added as vectors. The union of two patterns is
        computed once and cached. The sum with a dense matrix is dense. Dense matrices are not broadcast.
        """
        return _add("a + b", self._matrix, other)

    __radd__ = __add__

    @overload
    def __sub__(self, other: Matrix | float) -> Matrix: ...
    @overload
    def __sub__(self, other: Tensor) -> Tensor: ...
    def __sub__(self, other: Matrix | Tensor | float) -> Matrix | Tensor:
        """Subtract a matrix of the same shape, or the number 0. See :meth:`__add__`."""
        if isinstance(other, (Tensor, Real)):
            return _add("a - b", self._matrix, -other)
        b = as_sparse("a - b", "b", other)
        return _add("a - b", self._matrix, like(b, b.pattern, -b.values))

    @overload
    def __rsub__(self, other: float) -> Matrix: ...
    @overload
    def __rsub__(self, other: Tensor) -> Tensor: ...
    def __rsub__(self, other: Tensor | float) -> Matrix | Tensor:
        a = self._matrix
        return _add("b - a", like(a, a.pattern, -a.values), other)

    def __mul__(self, other: Matrix | Tensor | float) -> Matrix:
        """Multiply elementwise by a sparse matrix, a number, or a dense [n, m], [n, 1], [1, m], [m] or scalar.

        Only the entries of ``a`` are read from a dense matrix. The product of two sparse matrices has the
        intersection of their patterns. Other products have the pattern of ``a``. Cells that are not stored
        stay zero, even if the other factor is infinite or NaN there.
        """
        call, a = "a * b", self._matrix
        if isinstance(other, Real):
            return like(a, a.pattern, a.values * float(other))
        if isinstance(other, Tensor):
            return like(a, a.pattern, a.values * _at_entries(call, a, other))
        b = _fitting(call, a, as_sparse(call, "b", other))
        if a.pattern is b.pattern:
            count_merge("avoided")
            return like(a, a.pattern, a.values * b.values)
        both = a.pattern.intersection(b.pattern)
        products = a.values.index_select(0, both.left) * b.values.index_select(0, both.right)
        return like(a, both.pattern, products)

    __rmul__ = __mul__

    def __truediv__(self, other: Tensor | float) -> Matrix:
        """Divide by a dense matrix, in the shapes that :meth:`__mul__` takes, or by a number.

        Cells that are not stored stay zero, also where ``b`` is zero: ``a / a.sum(dim=1, keepdim=True)`` leaves a
        row without entries empty.
        """
        call, a = "a / b", self._matrix
        if isinstance(other, Real):
            return like(a, a.pattern, a.values / float(other))
        if not isinstance(other, Tensor):
            raise TypeError(
                f"{call}: b must be dense or a number, got {type(other).__name__}: zero would be divided by zero. On "
                "one pattern, a.with_values(a.values / b.values) divides the stored entries."
            )
        return like(a, a.pattern, a.values / _at_entries(call, a, other))

    def __rtruediv__(self, other: object) -> Matrix:
        raise TypeError(
            "x / a: a is a SparseTensor, and its zeros would divide. Use a.with_values(1 / a.values) for the stored "
            "entries alone."
        )

    def __pow__(self, exponent: float) -> Matrix:
        """Raise every entry to a positive power."""
        a = self._matrix
        if not is_a(exponent, int, float):
            raise TypeError(f"a ** exponent: exponent must be a number, got {type(exponent).__name__}.")
        if not exponent > 0:
            raise ValueError(
                f"a ** exponent: exponent must be positive, got {exponent}: cells that are not stored are zero and "
                f"would not stay so. Use a.with_values(a.values**{exponent}) for the stored entries alone."
            )
        return like(a, a.pattern, a.values**exponent)

    def dropout(self, p: float = 0.5, *, training: bool = True) -> Matrix:
        r"""Set entries to zero with probability ``p`` and divide the rest by ``1 - p``, on the same pattern.

        Example:
            >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
            >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0]))
            >>> a.dropout(1.0).values.tolist(), a.dropout(0.5, training=False).values.tolist()
            ([0.0, 0.0], [2.0, 3.0])
        """
        a = self._matrix
        if not is_number(p) or not 0 <= p <= 1:
            raise ValueError(f"a.dropout(p): p must be from 0 to 1, got {p}.")
        return like(a, a.pattern, F.dropout(a.values, p, training)) if training else a


def _add(call: str, a: Matrix, b: object) -> Matrix | Tensor:
    if isinstance(b, Tensor):
        return _onto_dense(call, a, b)
    if isinstance(b, Real):
        if b != 0:
            raise ValueError(
                f"{call}: a number is added to every cell, stored or not, got {b}. Use a.with_values(a.values + {b}) "
                f"for the stored entries alone, or a.to_dense() + {b}."
            )
        return a
    other = _fitting(call, a, as_sparse(call, "b", b))
    if a.pattern is other.pattern:
        count_merge("avoided")
        return like(a, a.pattern, a.values + other.values)
    both = a.pattern.union(other.pattern)
    zeros = a.values.new_zeros(both.pattern.nnz)
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
    return b.index_put((a.pattern.row, a.pattern.col), a.values, accumulate=True)


def _fitting(call: str, a: Matrix, b: Matrix) -> Matrix:
    check_same(call, "a and b", a.values, b.values)
    if a.shape != b.shape:
        raise ValueError(f"{call}: a is {tuple(a.shape)}, so b must be too, got {tuple(b.shape)}.")
    return b


def _at_entries(call: str, a: Entries, b: Tensor) -> Tensor:
    """Return the element of a dense matrix for each entry of a sparse matrix."""
    check_floating(call, "b", b)
    check_same(call, "a and b", a.values, b)
    if b.numel() == 1 and b.ndim <= 2:
        return b.reshape(())
    grid, (n, m) = at_least_2d(b), a.shape
    if grid.ndim > 2 or grid.shape[0] not in (1, n) or grid.shape[1] not in (1, m):
        raise ValueError(
            f"{call}: a is ({n}, {m}), so b must be [{n}, {m}], [{n}, 1], [1, {m}], [{m}] or a scalar, "
            f"got {list(b.shape)}."
        )
    if grid.shape == (n, m):
        return grid[a.pattern.row, a.pattern.col]
    return rules.gather(*((grid[0], a.pattern.cols) if len(grid) == 1 else (grid[:, 0], a.pattern.rows)))
