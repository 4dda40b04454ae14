"""What estimators and solvers need to know of an operator: its size, and its products with rows of vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

FACTORISED = (torch.float32, torch.float64)
"""The dtypes of which torch factorises matrices."""


class LinearMap(Protocol):
    """A symmetric map of n-vectors: all that estimators and solvers need of an operator.

    Solvers also take several matrices at once, such as the Hessians of tasks: a map with an attribute
    ``num_matrices``, k, whose products are of rows ``[k, n]``, each with a matrix of its own. A map may say in an
    attribute ``num_together`` how many vectors it multiplies fastest: it is given no more random probes at a time.
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
        """Multiply each row of ``vectors``, shape [num_vectors, n], giving rows of the same shape."""
        ...


Rows: TypeAlias = Callable[[Tensor], Tensor]
"""A linear map of rows, [k, n] to [k, n]; of one operator, unless a function says that each row has its own."""


@dataclass(frozen=True)
class OwnMatrices:
    """A linear map of rows in which each has a matrix of its own, so that all are multiplied or none."""

    products: Rows

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply."""
        return self.products(rows)


def refuse_half(call: str, dtype: torch.dtype) -> None:
    """Raise ``TypeError`` if torch does not factorize matrices of a dtype."""
    if dtype not in FACTORISED:
        raise TypeError(
            f"{call}: factorises a matrix, which torch does in float32 and float64, got an operator of {dtype}. Take "
            'method="cg", or parameters of another dtype: {name: p.detach().float() for name, p in params.items()}.'
        )


def checked_size(call: str, operator: LinearMap) -> int:
    """Return n of an n x n map of floating point numbers."""
    for name in ("shape", "dtype", "device", "multiply"):
        if not hasattr(operator, name):
            raise TypeError(
                f"{call}: operator must be a linear map with shape, dtype, device and multiply; "
                f"{type(operator).__name__} has no {name}."
            )
    shape = tuple(operator.shape)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise ValueError(f"{call}: operator must be square and not empty, got shape {shape}.")
    if not operator.dtype.is_floating_point:
        raise TypeError(f"{call}: operator must be of a floating point dtype, got {operator.dtype}.")
    return shape[0]


def shaped_products(call: str, operator: LinearMap, vectors: Tensor) -> Tensor:
    """Multiply rows, and see that the products have the shape of the vectors."""
    products = operator.multiply(vectors)
    if products.shape != vectors.shape:
        raise ValueError(
            f"{call}: operator.multiply must keep the shape {tuple(vectors.shape)} of its vectors, got "
            f"{tuple(products.shape)}."
        )
    return products


def checked_products(call: str, operator: LinearMap, vectors: Tensor) -> Tensor:
    """Multiply rows, and see that the products are finite as well."""
    products = shaped_products(call, operator, vectors)
    if not bool(products.detach().sum(-1).isfinite().all()) and not bool(products.isfinite().all()):
        raise ValueError(
            f"{call}: a product of the operator has NaN or inf. Look for them in the parameters, in the loss and in "
            "its first and second derivatives (a square root or a norm at zero)."
        )
    return products
