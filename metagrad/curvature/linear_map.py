"""The protocol of estimators and solvers: the size of a linear map, and its products with rows of vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from metagrad.core.checks import is_a, refuse

FACTORIZED = (torch.float32, torch.float64)
"""The dtypes whose matrices torch can factorize."""


class LinearMap(Protocol):
    """A symmetric linear map of n-vectors. Estimators and solvers need nothing else of an operator.

    A solver also accepts several matrices at once, such as the Hessians of tasks. Such a map has an attribute
    ``num_matrices``, k, and multiplies rows ``[k, n]``, each with its own matrix. A map may have an attribute
    ``num_together``, the number of vectors that it multiplies fastest. Random probes then come in pieces of that
    size.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """(n, n)."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of vectors and products."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of vectors and products."""
        ...

    def multiply(self, vectors: Tensor) -> Tensor:
        """Multiply each row of ``vectors``, shape [num_vectors, n]. The result has the same shape."""
        ...


Rows: TypeAlias = Callable[[Tensor], Tensor]
"""A linear map of rows, [k, n] to [k, n]. All rows have the same matrix unless a function says otherwise."""


@dataclass(frozen=True)
class SeparateMatrices:
    """A linear map of rows in which each row has its own matrix.

    A call multiplies either all rows or none.
    """

    products: Rows

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows."""
        return self.products(rows)


def refuse_half(call: str, dtype: torch.dtype, *, other: str = "cg") -> None:
    """Raise ``TypeError`` if torch cannot factorize matrices of a dtype."""
    if dtype not in FACTORIZED:
        raise TypeError(
            f"{call}: factorizes a matrix, which torch does in float32 and float64, got an operator of {dtype}. Take "
            f'method="{other}", or parameters of another dtype: '
            "{name: p.detach().float() for name, p in params.items()}."
        )


def checked_size(call: str, operator: LinearMap) -> int:
    """Return n. Raise unless ``operator`` is an n x n map of floating point numbers."""
    parts = ("shape", "dtype", "device", "multiply")
    if isinstance(operator, Tensor) or not all(hasattr(operator, name) for name in parts):
        raise TypeError(
            f"{call}: operator must be a linear map with {', '.join(parts)}, such as metagrad.hessian(loss, params), "
            f"got {type(operator).__name__}."
        )
    shape: Any = operator.shape
    if not hasattr(shape, "__len__") or len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise ValueError(f"{call}: operator must be square and not empty, got shape {shape}.")
    if not (is_a(operator.dtype, torch.dtype) and operator.dtype.is_floating_point):
        raise TypeError(f"{call}: operator must be of a floating point dtype, got {operator.dtype}.")
    return shape[0]


def shaped_products(call: str, operator: LinearMap, vectors: Tensor) -> Tensor:
    """Multiply rows. Raise ``ValueError`` unless the products have the shape of the vectors."""
    products = operator.multiply(vectors)
    shape = tuple(products.shape) if is_a(products, Tensor) else type(products).__name__
    if shape != tuple(vectors.shape):
        refuse(f"{call}: operator.multiply(rows)", f"products of the shape {tuple(vectors.shape)}", shape)
    return products


def checked_products(call: str, operator: LinearMap, vectors: Tensor) -> Tensor:
    """Multiply rows. Raise ``ValueError`` unless the products are finite and have the shape of the vectors."""
    products = shaped_products(call, operator, vectors)
    if not bool(products.detach().sum(-1).isfinite().all()):
        refuse_nonfinite(call, products)
    return products


def refuse_nonfinite(call: str, products: Tensor) -> None:
    """Raise ``ValueError`` unless products are finite. Their sums may overflow."""
    if not bool(products.isfinite().all()):
        raise ValueError(
            f"{call}: a product of the operator has NaN or inf. Look for them in the parameters, in the loss and in "
            "its first and second derivatives (a square root or a norm at zero)."
        )
