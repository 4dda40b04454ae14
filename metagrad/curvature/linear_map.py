"""What estimators and solvers need to know of an operator: its size, and its products with rows of vectors."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class LinearMap(Protocol):
    """A symmetric map of n-vectors. Estimators and solvers see no more of a Hessian than this."""

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
        """Where vectors and products live."""
        ...

    def products(self, vectors: Tensor) -> Tensor:
        """Multiply each row of ``vectors``, shape [num_vectors, n], giving rows of the same shape."""
        ...
