"""A pattern and the values of its entries: the arguments and results of operations on matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from metagrad.sparse.pattern import Pattern

if TYPE_CHECKING:
    from typing_extensions import Self


class Entries:
    """The part of a :class:`SparseTensor` that operations use. Each operation returns the type of its argument."""

    __slots__ = ("__weakref__", "pattern", "values")

    pattern: Pattern
    values: Tensor

    @classmethod
    def _of(cls, pattern: Pattern, values: Tensor) -> Self:
        """Return a matrix without checks. Values may be wrappers of a torch.func transform."""
        made = cls.__new__(cls)
        made.pattern, made.values = pattern, values
        return made

    @property
    def shape(self) -> torch.Size:
        """Numbers of rows and columns."""
        return torch.Size(self.pattern.shape)

    def t(self) -> Self:
        """Return the transpose, differentiably, on the cached transpose of the pattern."""
        return self._of(self.pattern.t(), self.values.index_select(0, self.pattern.csc_order))


Matrix = TypeVar("Matrix", bound=Entries)


def like(a: Matrix | type[Matrix], pattern: Pattern, values: Tensor) -> Matrix:
    """Return a matrix of the type of ``a``, or of type ``a`` if ``a`` is a type, without checks."""
    return a._of(pattern, values)


@overload
def as_sparse(call: str, name: str, a: Matrix) -> Matrix: ...
@overload
def as_sparse(call: str, name: str, a: object) -> Any: ...
def as_sparse(call: str, name: str, a: object) -> Any:
    """Return the matrix itself, or the current matrix of a sparse ``Parameter``, or raise ``TypeError``."""
    matrix = getattr(a, "_matrix", None)
    if isinstance(matrix, Entries):
        return matrix
    raise TypeError(
        f"{call}: {name} must be a SparseTensor, got {type(a).__name__}. "
        "SparseTensor.from_torch(tensor) and from_scipy(matrix) convert."
    )
