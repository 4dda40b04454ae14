"""The base of solvers: the system, rows that stop independently, and the result of a run."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from metagrad.curvature.linear_map import LinearMap, Rows, SeparateMatrices, shaped_products
from metagrad.curvature.rows import norm
from metagrad.curvature.solvers.solution import Result

RESULTS: tuple[Result, ...] = tuple(Result)
RUNNING = -1
CALL = "solve(operator, b)"


class LinearSystem:
    """``A + damping I`` as a linear map of rows, which counts its products and checks their shape.

    Attributes:
        matvecs: Number of products so far.
    """

    def __init__(
        self, operator: LinearMap, damping: float | Tensor, generator: torch.Generator | None
    ) -> None:
        self.operator, self.damping, self.generator = operator, damping, generator
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


class Start(NamedTuple):
    """Right-hand sides, first iterates and their residuals, [k, n] each."""

    b: Tensor
    x: Tensor
    r: Tensor


class Run(NamedTuple):
    """The result of a solver, row by row."""

    x: Tensor  # [k, n]
    steps: Tensor  # int64 [k]
    status: Tensor  # index into RESULTS, int64 [k]
    direction: Tensor  # direction of negative curvature, zero in rows that did not meet it, [k, n]
    residual: Tensor  # by the recurrence of the solver, [k, n]
    matvecs: int  # products of all rows together


class Solver:
    """Base class of the methods of solution. Each is a frozen dataclass of its hyperparameters.

    Attributes:
        no_preconditioner: Why the method takes no preconditioner, and what to do instead. None if it takes a
            preconditioner.
    """

    no_preconditioner: ClassVar[str | None] = None

    def set_up(self, system: LinearSystem) -> Solver:
        """Return the solver with the options that depend on the operator."""
        return self

    def run(
        self, products: Rows, start: Start, precondition: Rows | None, tolerance: Tensor, max_steps: int
    ) -> Run:
        """Solve for rows, until the norms of the residuals are at most ``tolerance``, [k]."""
        raise NotImplementedError


def length(rows: Tensor) -> Tensor:
    """Return the norm of each row as a constant, [k, n] to [k]."""
    return norm(rows.detach())


def divide(numerator: Tensor, denominator: Tensor, where: Tensor) -> Tensor:
    """Divide where ``where`` is True. Elsewhere the quotient and its derivative are zero."""
    return torch.where(where, numerator, 0.0) / torch.where(where, denominator, 1.0)


def multiply(products: Rows, rows: Tensor, active: Tensor) -> Tensor:
    """Multiply only the active rows. The products of other rows are zero."""
    index = active.nonzero().squeeze(1)
    if len(index) == len(rows):
        return products(rows)
    if isinstance(products, SeparateMatrices):
        return torch.where(active[:, None], products(rows), 0.0)
    return torch.zeros_like(rows).index_copy(0, index, products(rows[index]))


def is_finite(rows: Tensor) -> Tensor:
    """Return which rows are finite, [k, n] to [k]."""
    return rows.detach().isfinite().all(-1)


def fill(status: Tensor, where: Tensor | bool, result: Result) -> Tensor:
    """Give a result to the running rows for which a condition holds."""
    return torch.where((status == RUNNING) & where, RESULTS.index(result), status)


def ended(status: Tensor) -> Tensor:
    """Give ``MAX_STEPS`` to the rows that are still running."""
    return fill(status, status == RUNNING, Result.MAX_STEPS)


def begun(r: Tensor, tolerance: Tensor) -> Tensor:
    """Return the status of rows at their first residuals, [k]: running, converged or not finite."""
    status = torch.full((len(r),), RUNNING, dtype=torch.int64, device=r.device)
    status = fill(status, ~is_finite(r), Result.NON_FINITE)
    return fill(status, length(r) <= tolerance, Result.CONVERGED)
