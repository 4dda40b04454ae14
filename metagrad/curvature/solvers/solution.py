"""The result of a linear solve: its value, how it ended, and its cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Result(Enum):
    """How a solve ended. The value of each member is a sentence for the user.

    Example:
        >>> from metagrad.curvature.solvers.solution import Result
        >>> Result.CONVERGED.value
        'The residual is within its tolerance.'
        >>> Result.MAX_STEPS.is_success
        False
    """

    CONVERGED = "The residual is within its tolerance."
    PROGRESS = "The last steps reduced the quadratic model by less than the requested progress."
    MAX_STEPS = (
        "max_steps was reached before the residual was within its tolerance. Allow more steps or a larger rtol, "
        "or improve the condition by damping or a preconditioner."
    )
    STAGNATED = (
        "The recurrence reports a residual within its tolerance and the true residual is larger: rounding errors "
        "of this dtype dominate. Use float64, a larger rtol, damping or a preconditioner."
    )
    NEGATIVE_CURVATURE = (
        "A direction without positive curvature was met, so the operator is not positive definite. Add damping, or "
        "take the direction, stats.direction."
    )
    DIVERGED = (
        "The series diverges: an eigenvalue is negative, or times the scale 2 or more. "
        "The value is the last sum before the residual grew. Use a smaller scale, damping or another method."
    )
    BREAKDOWN = (
        "The preconditioner is not positive definite: a residual has no positive product with its image."
    )
    NON_FINITE = (
        "A product of the operator or of the preconditioner has NaN or inf, or iterates grew without bound, as of a "
        "singular operator and a right-hand side outside its range. Look for NaN in the parameters, in the loss and "
        "in its first and second derivatives, or add damping; the value is the last iterate before."
    )

    @property
    def is_success(self) -> bool:
        """Whether the solve ended by its tolerance or its progress rule."""
        return self in (Result.CONVERGED, Result.PROGRESS)


class SolveError(RuntimeError):
    """A solve failed, and its caller requested an exception."""


@dataclass(frozen=True, eq=False)
class Stats:
    """Statistics of a :func:`solve`. For a flat right-hand side, tensors do not have the dimension k.

    Attributes:
        results: Result of each right-hand side, k of them.
        steps: Number of steps for each right-hand side, int64 [k].
        residual_norms: Norms of the true residuals ``b - (A + damping I) x``, [k].
        matvecs: Total number of vectors multiplied with the operator. It includes products that set up a
            preconditioner and that check symmetry and residuals.
        direction: Directions d of negative curvature with ``d^T (A + damping I) d <= 0`` and norm 1, [k, n]. Zero for
            right-hand sides that did not meet it. None if no right-hand side met negative curvature.
    """

    results: tuple[Result, ...]
    steps: Tensor
    residual_norms: Tensor
    matvecs: int
    direction: Tensor | None


@dataclass(frozen=True, eq=False)
class Solution:
    """The result of :func:`solve`.

    Attributes:
        value: The solution, in the shape of the right-hand side. The last finite iterate if the solve failed.
        result: How the solve ended. For many right-hand sides, the first failure if there is one.
        stats: Steps, residuals and products of the solve.

    Example:
        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.solvers.solve import solve
        >>> A = torch.diag(torch.tensor([2.0, 4.0]))
        >>> operator = SimpleNamespace(
        ...     shape=(2, 2), dtype=A.dtype, device=A.device, multiply=lambda rows: rows @ A
        ... )
        >>> solution = solve(operator, torch.tensor([2.0, 2.0]))
        >>> solution.value, solution.result.name, int(solution.stats.steps)
        (tensor([1.0000, 0.5000]), 'CONVERGED', 2)
    """

    value: Tensor
    result: Result
    stats: Stats

    def __repr__(self) -> str:
        most = int(self.stats.steps.max()) if self.stats.steps.numel() else 0
        return f"Solution({self.result.name}: {most} steps, {self.stats.matvecs} products)"


def overall(results: tuple[Result, ...]) -> Result:
    """Return the first failure. If all rows succeeded, return the first result that is not plain convergence."""
    for result in results:
        if not result.is_success:
            return result
    return next((result for result in results if result is not Result.CONVERGED), Result.CONVERGED)


def raise_failure(call: str, stats: Stats) -> None:
    """Raise ``SolveError`` for the first failure among the right-hand sides, if there is one."""
    for index, result in enumerate(stats.results):
        if not result.is_success:
            steps = int(stats.steps.reshape(-1)[index])
            residual = float(stats.residual_norms.reshape(-1)[index])
            raise SolveError(
                f"{call}: right-hand side {index} of {len(stats.results)}, after {steps} steps with a residual of "
                f"norm {residual:.3g}: {result.value}"
            )
