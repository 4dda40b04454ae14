"""A pattern and the values of its entries: what operations on matrices take and return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from metagrad.sparse.pattern import Pattern

if TYPE_CHECKING:
    from typing_extensions import Self


class Entries:
    """The part of a :class:`SparseTensor` that operations work on; each returns the type that it was given."""

    __slots__ = ("__weakref__", "pattern", "values")

    pattern: Pattern
    values: Tensor

    @classmethod
    def _of(cls, pattern: Pattern, values: Tensor) -> Self:
        """Make one of parts that fit, or of what a torch.func transform put in the place of values."""
        made = cls.__new__(cls)
        made.pattern, made.values = pattern, values
        return made

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return torch.Size(self.pattern.shape)

    def t(self) -> Self:
        """Return the transpose, differentiable; its pattern is the cached transpose."""
        return self._of(self.pattern.t(), self.values.index_select(0, self.pattern.csc_order))


Matrix = TypeVar("Matrix", bound=Entries)


def like(a: Matrix | type[Matrix], pattern: Pattern, values: Tensor) -> Matrix:
    """Make a matrix of the type of another, or of a type, of parts that fit."""
    return a._of(pattern, values)


@overload
def as_sparse(call: str, name: str, a: Matrix) -> Matrix: ...
@overload
def as_sparse(call: str, name: str, a: object) -> Any: ...
def as_sparse(call: str, name: str, a: object) -> Any:
    """Return the matrix that an argument is, or that a parameter holds; raise ``TypeError`` for anything else."""
    matrix = getattr(a, "_matrix", None)
    if isinstance(matrix, Entries):
        return matrix
    raise TypeError(
        f"{call}: {name} must be a SparseTensor, got {type(a).__name__}. "
        "SparseTensor.from_torch(tensor) and from_scipy(matrix) convert."
    )
