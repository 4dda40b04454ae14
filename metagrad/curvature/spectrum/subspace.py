"""What a search for eigenvectors hands back."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Subspace(NamedTuple):
    """Approximate eigenvectors, before their residuals are taken.

    Attributes:
        vectors: Rows, about orthonormal, shape [k, n]; constants.
        scale: The largest norm of a product with a unit vector: a lower bound of the operator's norm.
        matvecs: How many products were spent.
        settled: False where the budget ended the search.
    """

    vectors: Tensor
    scale: float
    matvecs: int
    settled: bool
