"""The Neumann series of an inverse, truncated by a number of steps or by the residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.core.checks import check_positive
from metagrad.curvature.estimators.probes import draw_for
from metagrad.curvature.linear_map import Rows
from metagrad.curvature.solvers.iteration import (
    RUNNING,
    LinearSystem,
    Run,
    Solver,
    Start,
    begun,
    ended,
    fill,
    is_finite,
    length,
    multiply,
)
from metagrad.curvature.solvers.solution import Result

POWER_STEPS = 10


@dataclass(frozen=True)
class Neumann(Solver):
    r"""The Neumann series: one product a step, the simplest and slowest method.

    .. math:: x_k = \alpha \sum_{i=0}^{k-1} (I - \alpha A)^i \, b, \qquad
        b - A x_k = (I - \alpha A)^k \, b

    It converges for positive definite operators with :math:`0 < \alpha < 2 / \lambda_{\max}`. For a symmetric
    operator the norm of the residual is log-convex in k, so a residual that grows once grows forever. Such a row ends
    as ``Result.DIVERGED``. Truncated by ``max_steps``, the series equals ``max_steps`` steps of gradient descent.
    Hypergradients use this approximation. :class:`CG` needs about the square root of the steps.

    Args:
        scale: The factor :math:`\alpha`, above 0. The learning rate, if the operator is the Hessian of a trained
            loss. None means 1 over the largest eigenvalue, estimated by 10 steps of the power method.

    Raises:
        ValueError: ``scale`` is not above 0. In a solve: a preconditioner is given.

    Example:
        The series of 1 / (1 - 0.5) after 4 terms is 1 + 1/2 + 1/4 + 1/8:

        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.solvers.neumann import Neumann
        >>> from metagrad.curvature.solvers.solve import solve
        >>> operator = SimpleNamespace(
        ...     shape=(1, 1), dtype=torch.float32, device=torch.device("cpu"), multiply=lambda rows: 0.5 * rows
        ... )
        >>> solution = solve(operator, torch.ones(1), method=Neumann(scale=1.0), max_steps=4)
        >>> solution.value, solution.result.name
        (tensor([1.8750]), 'MAX_STEPS')

    References:
        Lorraine, Vicol, Duvenaud, "Optimizing millions of hyperparameters by implicit differentiation", AISTATS 2020,
        section 2.3 and algorithm 3.
    """

    no_preconditioner = 'the series has no preconditioner. Use method="cg", or scale the operator.'
    scale: float | None = None

    def __post_init__(self) -> None:
        check_positive("Neumann(scale)", self.scale, optional=True)

    def set_up(self, system: LinearSystem) -> Neumann:
        """Estimate the scale, unless it is given."""
        if self.scale is not None:
            return self
        size = _largest_eigenvalue(system)
        return Neumann(scale=1 / size if size > 0 else 1.0)

    def run(
        self, products: Rows, start: Start, precondition: Rows | None, tolerance: Tensor, max_steps: int
    ) -> Run:
        """Sum the series, after :meth:`set_up`."""
        assert self.scale is not None
        _, x, r = start
        status = begun(r, tolerance)
        steps, slack, count = torch.zeros_like(status), 1 + 100 * torch.finfo(r.dtype).eps, 0
        for _ in range(max_steps):
            active = status == RUNNING
            if not bool(active.any()):
                break
            step, count = self.scale * r, count + 1
            following = r - multiply(products, step, active)
            status = fill(status, ~is_finite(following), Result.NON_FINITE)
            status = fill(status, length(following) > length(r) * slack, Result.DIVERGED)
            moves = (status == RUNNING)[:, None]
            x = x + torch.where(moves, step, 0.0)
            r = torch.where(moves, following, r)
            steps = steps + moves[:, 0]
            status = fill(status, length(r) <= tolerance, Result.CONVERGED)
        return Run(x, steps, ended(status), torch.zeros_like(r), r, count)


def _largest_eigenvalue(system: LinearSystem) -> float:
    """Estimate the largest eigenvalue of positive operators from below, usually to within a factor of two."""
    v = draw_for(system, system.num_matrices or 1, "rademacher", system.generator)
    size = v.new_zeros(())
    for _ in range(POWER_STEPS):
        v = system.constant(v / length(v).clamp_min(torch.finfo(v.dtype).tiny)[:, None])
        size = length(v).max()
    return float(size) if bool(size.isfinite()) else 0.0
