"""Chebyshev's iteration: as many steps as conjugate gradients, without inner products, and linear in b."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from metagrad.curvature.estimators.probes import draw_for
from metagrad.curvature.linear_map import Rows
from metagrad.curvature.solvers.iteration import (
    RUNNING,
    Limits,
    Run,
    Solver,
    begun,
    ended,
    fill,
    initial,
    is_finite,
    length,
    multiply,
)
from metagrad.curvature.solvers.solution import Result
from metagrad.curvature.solvers.system import CALL, LinearSystem
from metagrad.curvature.spectrum.lanczos import lanczos
from metagrad.curvature.spectrum.quadrature import gauss_rule

LANCZOS_STEPS = 12


@dataclass(frozen=True)
class Chebyshev(Solver):
    r"""Chebyshev's iteration: one product a step, for eigenvalues in an interval above 0.

    .. math:: b - A x_k = \frac{T_k \big( (c - A) / e \big)}{T_k(c / e)} \, b, \qquad
        c = \frac{\beta + \alpha}{2}, \quad e = \frac{\beta - \alpha}{2}

    the residual polynomial that is least on :math:`[\alpha, \beta]`, of Chebyshev's T. Its coefficients do not depend
    on b: a truncated solution is a fixed symmetric matrix times b, so that the implicit derivative in b is exactly
    that of the steps, and rounding or noise in products is not fed back, as it is by the inner products of
    :class:`CG`. That is what :class:`Neumann` is for too, which needs about the square of the steps; it is this
    iteration for an interval that is a point. Eigenvalues between 0 and :math:`\alpha` converge as well, slowly;
    where one is negative or far above :math:`\beta`, the row ends as ``Result.DIVERGED``.

    Args:
        interval: :math:`(\alpha, \beta)`, of the damped operator. None is that of the Ritz values of 12 steps of
            Lanczos, widened above by the norm of the last residual, and above 0 below.

    Raises:
        ValueError: ``interval`` is not above 0; in a solve, a preconditioner is given.

    Example:
        Two eigenvalues at the ends of the interval; the residual after one step is :math:`(c - \lambda) / c`:

        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.solvers.chebyshev import Chebyshev
        >>> from metagrad.curvature.solvers.solve import solve
        >>> A = torch.diag(torch.tensor([1.0, 3.0]))
        >>> operator = SimpleNamespace(
        ...     shape=(2, 2), dtype=A.dtype, device=A.device, products=lambda rows: rows @ A
        ... )
        >>> solution = solve(operator, torch.ones(2), method=Chebyshev((1.0, 3.0)), max_steps=1)
        >>> solution.value, solution.result.name
        (tensor([0.5000, 0.5000]), 'MAX_STEPS')

    References:
        Golub, Varga, "Chebyshev semi-iterative methods", Numer. Math. 3, 1961; Saad, "Iterative methods for sparse
        linear systems", 2003, algorithm 12.1; Zhou, Saad, Tiago, Chelikowsky, "Self-consistent-field calculations
        using Chebyshev-filtered subspace iteration", J. Comput. Phys. 219, 2006, for the upper end.
    """

    name = "chebyshev"
    summary = "positive definite; no inner products, linear in b, for truncation as Neumann's in a root of its steps"
    no_preconditioner = 'the interval is that of the operator. Use method="pcg", or scale the operator.'
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.interval is not None and not 0 < self.interval[0] <= self.interval[1]:
            raise ValueError(f"Chebyshev(interval): expected 0 < low <= high, or None, got {self.interval}.")

    def set_up(self, system: LinearSystem, precondition: Rows | None) -> tuple[Chebyshev, None]:
        """Find the interval, unless it is given."""
        super().set_up(system, precondition)
        return (self if self.interval is not None else Chebyshev(_interval(system))), None

    def run(
        self, products: Rows, b: Tensor, x0: Tensor | None, precondition: Rows | None, limits: Limits
    ) -> Run:
        """Solve for every row of ``b``; after :meth:`set_up`."""
        assert self.interval is not None
        center, square = sum(self.interval) / 2, ((self.interval[1] - self.interval[0]) / 2) ** 2
        x, r = initial(products, b, x0)
        status = begun(r, is_finite(r), limits.tolerance)
        steps, bound, slack = torch.zeros_like(status), length(r), 1 + 100 * torch.finfo(b.dtype).eps
        ratio, d = 1 / center, r / center
        for _ in range(limits.max_steps):
            active = status == RUNNING
            if not bool(active.any()):
                break
            following = r - multiply(products, d, active)
            status = fill(status, ~is_finite(following), Result.NON_FINITE)
            # No step is to a larger residual than the first; of a point, none is to a larger one than the last.
            status = fill(status, length(following) > bound * slack, Result.DIVERGED)
            moves = (status == RUNNING)[:, None]
            x = x + torch.where(moves, d, 0.0)
            r = torch.where(moves, following, r)
            steps = steps + moves[:, 0]
            status = fill(status, length(r) <= limits.tolerance, Result.CONVERGED)
            if square == 0:
                bound, d = length(r), r / center
                continue
            before, ratio = ratio, 1 / (2 * center - square * ratio)
            d = square * ratio * before * d + 2 * ratio * r
        return Run(x, steps, ended(status), torch.zeros_like(b, requires_grad=False))


def _interval(system: LinearSystem) -> tuple[float, float]:
    """Estimate where the eigenvalues are; several matrices are the blocks of one."""
    operator = system.undamped
    n = operator.shape[0]
    size = n * (operator.num_matrices or 1)

    def products(rows: Tensor) -> Tensor:
        return system.constant_products(rows.reshape(-1, n)).view_as(rows)

    dtype, device = operator.dtype, operator.device
    whole: Any = SimpleNamespace(shape=(size, size), dtype=dtype, device=device, products=products)
    start = draw_for(whole, 1, "normal", system.generator)
    state = lanczos(whole, start, steps=LANCZOS_STEPS, call=CALL)
    values = gauss_rule(state, 0).nodes
    high = float(values[-1] + state.off_diagonal[0, len(values) - 1])
    low = max(float(values[0]), torch.finfo(operator.dtype).eps ** 0.5 * high)
    return (low, high) if high > 0 else (1.0, 1.0)
