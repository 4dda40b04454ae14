"""What Python's operators, and the methods that torch gives every tensor, mean for a sparse matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

from torch import Tensor

from metagrad.sparse.checks import check_floating
from metagrad.sparse.operations import elementwise
from metagrad.sparse.operations.elementwise import Elementwise, as_sparse

if TYPE_CHECKING:
    from metagrad.sparse.matrix.tensor import SparseTensor


class Operators(Elementwise):
    """The operators and methods of :class:`SparseTensor`; each is a function of this package."""

    __slots__ = ()

    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, other: SparseTensor) -> SparseTensor: ...
    def __matmul__(self, other: Tensor | SparseTensor) -> Tensor | SparseTensor:
        from metagrad.sparse.operations.products import spgemm, spmm

        if isinstance(other, Tensor):
            return spmm(self._matrix, other)
        return spgemm(self._matrix, as_sparse("a @ b", "b", other))

    def __rmatmul__(self, other: Tensor) -> Tensor:
        from metagrad.sparse.operations.products import spmm

        check_floating("x @ a", "x", other)
        n, m = self._matrix.shape
        if not other.ndim or other.shape[-1] != n:
            raise ValueError(f"x @ a: a is ({n}, {m}), so x must be [..., {n}], got {list(other.shape)}.")
        transposed = self._matrix.t()
        return spmm(transposed, other) if other.ndim == 1 else spmm(transposed, other.mT).mT

    @overload
    def __add__(self, other: SparseTensor | float) -> SparseTensor: ...
    @overload
    def __add__(self, other: Tensor) -> Tensor: ...
    def __add__(self, other: SparseTensor | Tensor | float) -> SparseTensor | Tensor:
        from metagrad.sparse.operations.merge import add

        return add(self._matrix, other)

    __radd__ = __add__

    @overload
    def __sub__(self, other: SparseTensor | float) -> SparseTensor: ...
    @overload
    def __sub__(self, other: Tensor) -> Tensor: ...
    def __sub__(self, other: SparseTensor | Tensor | float) -> SparseTensor | Tensor:
        from metagrad.sparse.operations.merge import sub

        return sub(self._matrix, other)

    @overload
    def __rsub__(self, other: float) -> SparseTensor: ...
    @overload
    def __rsub__(self, other: Tensor) -> Tensor: ...
    def __rsub__(self, other: Tensor | float) -> SparseTensor | Tensor:
        return self.neg() + other

    def __mul__(self, other: SparseTensor | Tensor | float) -> SparseTensor:
        """Multiply by elements."""
        from metagrad.sparse.operations.merge import mul

        return mul(self._matrix, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Tensor | float) -> SparseTensor:
        from metagrad.sparse.operations.merge import div

        return div(self._matrix, other)

    def __rtruediv__(self, other: object) -> SparseTensor:
        raise TypeError(
            "x / a: a is a SparseTensor, and its zeros would divide. Use a.with_values(1 / a.values) for the stored "
            "entries alone."
        )

    def __pow__(self, exponent: float) -> SparseTensor:
        return self.pow(exponent)

    def pow(self, exponent: float) -> SparseTensor:
        """Raise every entry to a positive power: :func:`metagrad.sparse.pow`."""
        return elementwise.pow(self._matrix, exponent)

    def dropout(self, p: float = 0.5, *, training: bool = True) -> SparseTensor:
        """Set entries to zero at random: :func:`metagrad.sparse.dropout`."""
        return elementwise.dropout(self._matrix, p, training=training)

    def sum(self, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
        """Add all cells, or those of each row or column: :func:`metagrad.sparse.sum`."""
        from metagrad.sparse.operations.reduce import sum

        return sum(self._matrix, dim, keepdim=keepdim)

    def mean(self, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
        """Average all cells, or those of each row or column: :func:`metagrad.sparse.mean`."""
        from metagrad.sparse.operations.reduce import mean

        return mean(self._matrix, dim, keepdim=keepdim)

    def max(self, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
        """Take the largest stored entry of all, or of each row or column: :func:`metagrad.sparse.max`."""
        from metagrad.sparse.operations.reduce import max

        return max(self._matrix, dim, keepdim=keepdim)

    def norm(self, p: float = 2) -> Tensor:
        """Compute the p-norm of the entries: :func:`metagrad.sparse.norm`."""
        from metagrad.sparse.operations.reduce import norm

        return norm(self._matrix, p)

    def softmax(self, dim: int = -1) -> SparseTensor:
        """Normalise the exponentials of each row or column: :func:`metagrad.sparse.softmax`."""
        from metagrad.sparse.operations.softmax import softmax

        return softmax(self._matrix, dim)

    def log_softmax(self, dim: int = -1) -> SparseTensor:
        """Compute the logarithm of :meth:`softmax`: :func:`metagrad.sparse.log_softmax`."""
        from metagrad.sparse.operations.softmax import log_softmax

        return log_softmax(self._matrix, dim)
