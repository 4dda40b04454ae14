"""Conjugate gradients for each row, with negative curvature and the stopping rules of optimizers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.core import checks
from metagrad.curvature.linear_map import Rows
from metagrad.curvature.rows import dot
from metagrad.curvature.solvers.iteration import (
    RUNNING,
    Run,
    Solver,
    Start,
    begun,
    divide,
    ended,
    fill,
    is_finite,
    length,
    multiply,
)
from metagrad.curvature.solvers.solution import Result


@dataclass(frozen=True)
class CG(Solver):
    r"""Conjugate gradients: one product a step, for positive definite operators.

    .. math:: \alpha_i = \frac{r_i^T M r_i}{p_i^T A p_i}, \quad x_{i+1} = x_i + \alpha_i p_i, \quad
        r_{i+1} = r_i - \alpha_i A p_i, \quad p_{i+1} = M r_{i+1} + \frac{r_{i+1}^T M r_{i+1}}{r_i^T M r_i} p_i

    A row ends when its residual is within the tolerance, or by the rule below. It also ends if :math:`p^T A p \le 0`,
    with the iterate so far and the direction :math:`p`. In exact arithmetic, the number of steps is at most the
    number of distinct eigenvalues of the preconditioned operator.

    Args:
        progress: The :math:`\epsilon` of Martens' rule. Stop at step i if the model :math:`\phi(x) = x^T A x / 2 -
            b^T x` fell by less than :math:`k \epsilon |\phi(x_i)|` in the last :math:`k = \max(10, i / 10)` steps.
            Martens uses 5e-4. None disables the rule.
        follows_negative: If the curvature :math:`\kappa = p^T A p / p^T M p` is not above rounding errors, take one
            last step along p by its absolute value (Dauphin et al., NeurIPS 2014). If the curvature is only rounding,
            the step is scaled by M, as in gradient descent. If False, a row ends with the previous iterate. M is the
            inverse of the preconditioner.

    Raises:
        ValueError: ``progress`` is not above 0.

    Example:
        The minimum of :math:`x^T x - b^T x` is :math:`b / 2`:

        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.solvers.cg import CG
        >>> from metagrad.curvature.solvers.solve import solve
        >>> operator = SimpleNamespace(
        ...     shape=(2, 2), dtype=torch.float32, device=torch.device("cpu"), multiply=lambda rows: 2 * rows
        ... )
        >>> solution = solve(operator, torch.tensor([3.0, 4.0]), method=CG())
        >>> solution.value, solution.result.name
        (tensor([1.5000, 2.0000]), 'CONVERGED')

    References:
        Hestenes, Stiefel, "Methods of conjugate gradients for solving linear systems", J. Res. NBS 49, 1952; Martens,
        "Deep learning via Hessian-free optimization", ICML 2010, section 4.4.
    """

    progress: float | None = None
    follows_negative: bool = False

    def __post_init__(self) -> None:
        checks.check_positive("CG(progress)", self.progress, optional=True)

    def run(
        self, products: Rows, start: Start, precondition: Rows | None, tolerance: Tensor, max_steps: int
    ) -> Run:
        """Solve for every row. Differentiable if products are."""
        b, x, r = start
        z, rz, status = _preconditioned(precondition, r, begun(r, tolerance))
        p, p_image = z, r  # the search directions, and their products with M
        scale, steps, count = torch.zeros_like(rz.detach()), torch.zeros_like(status), 0
        direction = r.new_zeros(()).expand_as(r)  # a stand-in without memory until a direction is found
        models = [_model(x, b, r)]
        for _ in checks.progress(range(max_steps), "conjugate gradients"):
            if not bool((status == RUNNING).any()):
                break
            q, count = multiply(products, p, status == RUNNING), count + 1
            status = fill(status, ~is_finite(q), Result.NON_FINITE)
            moves = status == RUNNING
            q = torch.where(moves[:, None], q, 0.0)
            pq = dot(p, q)
            curvature, rounding, scale = self._curvature(p, p_image, q, pq, scale, precondition)
            is_negative = moves & (pq <= rounding)
            status = fill(status, is_negative, Result.NEGATIVE_CURVATURE)
            if not self.follows_negative:
                direction = torch.where(is_negative[:, None], _unit(p), direction)
            alpha = divide(rz, curvature, where=moves if self.follows_negative else moves & ~is_negative)
            before, x, r = x, x + alpha[:, None] * p, r - alpha[:, None] * q
            del q  # without a graph, the next direction reuses its memory
            status = fill(status, length(r) <= tolerance, Result.CONVERGED)
            if self.progress is not None:
                models.append(_model(x, b, r))
                status = fill(status, _makes_no_progress(models, self.progress), Result.PROGRESS)
            z, following, status = _preconditioned(precondition, r, status)
            x = torch.where((moves & ~following.detach().isfinite())[:, None], before, x)  # is too far
            goes_on = status == RUNNING
            beta = divide(following, rz, where=goes_on)[:, None]
            p = torch.where(goes_on[:, None], z + beta * p, p)
            p_image = p if precondition is None else r + beta * p_image
            rz, steps = torch.where(goes_on, following, rz), steps + (alpha.detach() != 0)
        return Run(x, steps, ended(status), direction, r, count)

    def _curvature(
        self, p: Tensor, p_image: Tensor, q: Tensor, pq: Tensor, scale: Tensor, precondition: Rows | None
    ) -> tuple[Tensor, Tensor | float, Tensor]:
        """Return the divisor of r^T z, the bound for rounding in p^T A p, and the scale so far."""
        if not self.follows_negative:
            return pq, 0.0, scale
        pp = dot(p, p_image)
        images = dot(q, q if precondition is None else precondition(q)).detach()
        scale = torch.maximum(scale, divide(images, pp.detach(), where=pp.detach() > 0).sqrt())
        rounding = torch.finfo(pq.dtype).eps * scale * pp
        return torch.where(pq.abs() <= rounding, pp, pq.abs()), rounding, scale


def _preconditioned(precondition: Rows | None, r: Tensor, status: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return z = M^-1 r, r^T z, and the status."""
    z = r if precondition is None else precondition(r)
    rz = dot(r, z)
    status = fill(status, ~rz.detach().isfinite(), Result.NON_FINITE)
    return z, rz, fill(status, rz <= 0, Result.BREAKDOWN)


def _model(x: Tensor, b: Tensor, r: Tensor) -> Tensor:
    """Return the quadratic model x^T A x / 2 - b^T x, [k]."""
    return -0.5 * dot(x.detach(), b.detach() + r.detach())


def _makes_no_progress(models: list[Tensor], progress: float) -> Tensor | bool:
    """Apply Martens' rule, at step i = len(models) - 1."""
    step = len(models) - 1
    lag = max(10, math.ceil(step / 10))
    if step <= lag:
        return False
    now, before = models[-1], models[-1 - lag]
    return (now < 0) & (before - now < lag * progress * now.abs())


def _unit(rows: Tensor) -> Tensor:
    return rows.detach() / length(rows).clamp_min(torch.finfo(rows.dtype).tiny)[:, None]
