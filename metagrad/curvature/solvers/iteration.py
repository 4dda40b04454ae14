"""What iterative solvers share: rows that stop one by one, and the result of a run."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from metagrad.curvature.linear_map import OwnMatrices, Rows
from metagrad.curvature.rows import norm
from metagrad.curvature.solvers.solution import Result
from metagrad.curvature.solvers.system import LinearSystem

RESULTS: tuple[Result, ...] = tuple(Result)
RUNNING = -1


class Limits(NamedTuple):
    """When the solve of a row ends."""

    tolerance: Tensor  # norm of the residual at which a row has converged, [k]
    max_steps: int


class Run(NamedTuple):
    """The result of a solver, row by row."""

    x: Tensor  # [k, n]
    steps: Tensor  # int64 [k]
    status: Tensor  # index into RESULTS, int64 [k]
    direction: Tensor  # of negative curvature, zero in rows where it was not met, [k, n]


class Solver:
    """Base of the methods of solution: each is a frozen dataclass of its hyper-parameters.

    Attributes:
        no_preconditioner: Why it takes no preconditioner, and what to do instead; None if it takes one.
    """

    no_preconditioner: ClassVar[str | None] = None

    def set_up(self, system: LinearSystem, precondition: Rows | None) -> tuple[Solver, Rows | None]:
        """Choose what depends on the operator alone; return solver and preconditioner to run."""
        if precondition is not None and self.no_preconditioner is not None:
            raise ValueError(f"solve(..., preconditioner): {self.no_preconditioner}")
        return self, precondition

    def run(
        self, products: Rows, b: Tensor, x0: Tensor | None, precondition: Rows | None, limits: Limits
    ) -> Run:
        """Solve for every row of ``b``; on the tape if products are."""
        raise NotImplementedError


def length(rows: Tensor) -> Tensor:
    """Return the norm of each row, [k, n] to [k]; a constant for the tape."""
    return norm(rows.detach())


def divide(numerator: Tensor, denominator: Tensor, where: Tensor) -> Tensor:
    """Divide where allowed, and give 0 elsewhere, there with a zero derivative too."""
    return torch.where(where, numerator, 0.0) / torch.where(where, denominator, 1.0)


def multiply(products: Rows, rows: Tensor, active: Tensor) -> Tensor:
    """Multiply the active rows only; the others give zeros."""
    index = active.nonzero().squeeze(1)
    if len(index) == len(rows):
        return products(rows)
    if isinstance(products, OwnMatrices):
        return torch.where(active[:, None], products(rows), 0.0)
    return torch.zeros_like(rows).index_copy(0, index, products(rows[index]))


def is_finite(rows: Tensor) -> Tensor:
    """Say which rows are finite, [k, n] to [k]."""
    return rows.detach().isfinite().all(-1)


def fill(status: Tensor, where: Tensor | bool, result: Result) -> Tensor:
    """Give rows that still run a result, where a condition holds."""
    return torch.where((status == RUNNING) & where, RESULTS.index(result), status)


def ended(status: Tensor) -> Tensor:
    """Give the rows that still run ``MAX_STEPS``."""
    return fill(status, status == RUNNING, Result.MAX_STEPS)


def begun(r: Tensor, is_sound: Tensor, tolerance: Tensor) -> Tensor:
    """Return the status of rows at their first residuals, [k]: they run, have converged, or are not finite."""
    status = torch.full((len(r),), RUNNING, dtype=torch.int64, device=r.device)
    status = fill(status, ~is_sound, Result.NON_FINITE)
    return fill(status, length(r) <= tolerance, Result.CONVERGED)


def initial(products: Rows, b: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the first iterate and its residual."""
    return (torch.zeros_like(b), b) if x0 is None else (x0, b - products(x0))
