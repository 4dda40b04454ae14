"""The system of a solve: checks of its arguments, and its map, counted and damped."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

from metagrad.core.checks import check_number, is_a, refuse
from metagrad.curvature.linear_map import LinearMap, shaped_products
from metagrad.curvature.solvers.implicit import is_batched

CALL = "solve(operator, b)"


class LinearSystem:
    """``A + damping I`` as a linear map of rows, which counts its products and checks their shape.

    Attributes:
        weight: The damping as a constant.
        matvecs: Number of products so far.
    """

    def __init__(
        self, operator: LinearMap, damping: float | Tensor, generator: torch.Generator | None
    ) -> None:
        self.operator, self.damping, self.generator = operator, damping, generator
        self.weight: float = checked_damping(damping)
        self.shape: tuple[int, int] = operator.shape
        self.dtype: torch.dtype = operator.dtype
        self.device: torch.device = operator.device
        self.num_matrices: int | None = getattr(operator, "num_matrices", None)
        self.matvecs: int = 0

    def undamped(self, vectors: Tensor) -> Tensor:
        """Multiply rows [k, n] by A."""
        products = shaped_products(CALL, self.operator, vectors)
        self.matvecs += len(vectors)
        return products

    def multiply(self, vectors: Tensor) -> Tensor:
        """Multiply rows [k, n]."""
        products = self.undamped(vectors)
        if isinstance(self.damping, Tensor) or self.damping:
            products = products + self.damping * vectors
        return products

    def constant(self, vectors: Tensor) -> Tensor:
        """Multiply rows without a graph."""
        with torch.no_grad():
            return self.multiply(vectors).detach()


def checked_damping(damping: float | Tensor) -> float:
    """Return the value of the damping."""
    if not isinstance(damping, (numbers.Real, Tensor)):
        raise TypeError(f"solve(..., damping): expected a number or a tensor, got {type(damping).__name__}.")
    if isinstance(damping, Tensor) and damping.numel() != 1:
        refuse("solve(..., damping)", "a number or a tensor with one element", tuple(damping.shape))
    value = float(damping.detach() if isinstance(damping, Tensor) else damping)
    return check_number("solve(..., damping)", value, 0)


def check_vector(name: str, vector: Tensor, operator: LinearMap, like: Tensor | None = None) -> None:
    """Raise unless a right-hand side, or a start for it, fits the operator."""
    n = operator.shape[0]
    if not is_a(vector, Tensor):
        raise TypeError(f"{CALL}: {name} must be a tensor, got {type(vector).__name__}.")
    count = getattr(operator, "num_matrices", None)
    expected = f"{[n]} or rows [k, {n}]" if count is None else f"rows {[count, n]}, one for each matrix"
    fits = vector.ndim in (1, 2) and vector.shape[-1] == n and count in (None, len(vector))
    if not fits or (like is not None and vector.shape != like.shape):
        expected = expected if like is None else f"{list(like.shape)} as b"
        raise ValueError(f"{CALL}: {name} must be {expected}, got {list(vector.shape)}.")
    for what, error in (("dtype", TypeError), ("device", ValueError)):
        got, expected = getattr(vector, what), getattr(operator, what)
        if got != expected:
            raise error(
                f"{CALL}: {name} must be of the operator's {what} {expected}, got {got}. Use {name}.to({expected})."
            )
    if is_batched(vector):
        raise ValueError(
            f"{CALL}: {name} has a dimension of vmap, under which rows cannot stop one by one. Pass rows [k, {n}]."
        )
    if not bool(vector.detach().isfinite().all()):
        raise ValueError(f"{CALL}: {name} has NaN or inf.")
