"""Conjugate gradients, with negative curvature, a trust radius and stopping rules of optimizers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.curvature.solvers.iteration import (
    RUNNING,
    Limits,
    LinearSystem,
    Rows,
    Run,
    divide,
    dot,
    ended,
    fill,
    initial,
    is_finite,
    multiply,
    norm,
    running,
)
from metagrad.curvature.solvers.solution import Result


class CGState(NamedTuple):
    """What conjugate gradients carry from step to step; every row is a right-hand side."""

    x: Tensor  # iterates, [k, n]
    r: Tensor  # residuals b - A x, [k, n]
    p: Tensor  # search directions, [k, n]
    rz: Tensor  # r^T M r with the preconditioner M, [k]
    steps: Tensor  # int64 [k]
    status: Tensor  # int64 [k]
    direction: Tensor  # of negative curvature, [k, n]
    norms: tuple[Tensor, Tensor, Tensor]  # x^T M^-1 x, x^T M^-1 p and p^T M^-1 p, [k] each
    models: tuple[Tensor, ...]  # values x^T A x / 2 - b^T x of the model at all iterates so far, [k] each


@dataclass(frozen=True)
class CG:
    r"""Conjugate gradients: one product a step, for positive definite operators.

    .. math:: \alpha_i = \frac{r_i^T M r_i}{p_i^T A p_i}, \quad x_{i+1} = x_i + \alpha_i p_i, \quad
        r_{i+1} = r_i - \alpha_i A p_i, \quad p_{i+1} = M r_{i+1} + \frac{r_{i+1}^T M r_{i+1}}{r_i^T M r_i} p_i

    A row ends when its residual is within the tolerance; when :math:`p^T A p \le 0`, with the iterate so far and the
    direction :math:`p`; or by one of the rules below. In exact arithmetic it converges after as many steps as
    the preconditioned operator has distinct eigenvalues.

    Args:
        progress: The :math:`\epsilon` of Martens' rule: stop at step i when the model
            :math:`\phi(x) = x^T A x / 2 - b^T x` fell by less than :math:`k \epsilon |\phi(x_i)|` in the last
            :math:`k = \max(10, i / 10)` steps; Martens takes 5e-4. None is never.
        radius: The radius of a trust region around 0, above 0. A step that would leave it ends on it, and so does a
            direction of negative curvature. It is measured in the norm :math:`\sqrt{x^T M^{-1} x}` of the
            preconditioner, the Euclidean one without, in which iterates only grow. None is infinite.

    Raises:
        ValueError: ``progress`` or ``radius`` is not above 0; in a solve, ``radius`` comes with ``x0``.

    Example:
        The minimum of :math:`x^T x - b^T x` is :math:`b / 2`; within a radius of 1, it is :math:`b / |b|`:

        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.solvers.cg import CG
        >>> from metagrad.curvature.solvers.solve import solve
        >>> operator = SimpleNamespace(
        ...     shape=(2, 2), dtype=torch.float32, device=torch.device("cpu"), products=lambda rows: 2 * rows
        ... )
        >>> solution = solve(operator, torch.tensor([3.0, 4.0]), method=CG(radius=1.0))
        >>> solution.value, solution.result.name
        (tensor([0.6000, 0.8000]), 'BOUNDARY')

    References:
        Hestenes, Stiefel, "Methods of conjugate gradients for solving linear systems", J. Res. NBS 49, 1952;
        Steihaug, "The conjugate gradient method and trust regions in large scale optimization", SIAM J. Numer. Anal.
        20(3), 1983; Conn, Gould, Toint, "Trust-region methods", 2000, section 7.5.1 (norms by recurrence); Martens,
        "Deep learning via Hessian-free optimization", ICML 2010, section 4.4.
    """

    progress: float | None = None
    radius: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("progress", self.progress), ("radius", self.radius)):
            if value is not None and not value > 0:
                raise ValueError(f"CG(..., {name}): expected a number above 0, or None, got {value}.")

    def set_up(self, system: LinearSystem, precondition: Rows | None) -> tuple[CG, Rows | None]:
        """Return what :meth:`run` needs: nothing depends on the operator."""
        return self, precondition

    def run(
        self, products: Rows, b: Tensor, x0: Tensor | None, precondition: Rows | None, limits: Limits
    ) -> Run:
        """Solve for every row of ``b``."""
        if self.radius is not None and x0 is not None:
            raise ValueError(
                "solve(..., method=CG(radius=...), x0): a trust region is around 0, where the iteration must start. "
                "Leave out x0."
            )
        x, r = initial(products, b, x0)
        state = self._initial_state(x, r, b, precondition, limits)
        for _ in range(limits.max_steps):
            if not bool((state.status == RUNNING).any()):
                break
            state = self._step(state, products, b, precondition, limits)
        return Run(state.x, state.steps, ended(state.status), state.direction)

    def _initial_state(
        self, x: Tensor, r: Tensor, b: Tensor, precondition: Rows | None, limits: Limits
    ) -> CGState:
        status = fill(running(b), ~is_finite(r), Result.NON_FINITE)
        status = fill(status, norm(r) <= limits.tolerance, Result.CONVERGED)
        z = r if precondition is None else precondition(r)
        rz = dot(r, z)
        status = _checked_preconditioner(status, rz)
        zeros = torch.zeros_like(rz)
        return CGState(
            x,
            r,
            z,
            rz,
            steps=torch.zeros_like(status),
            status=status,
            direction=torch.zeros_like(b, requires_grad=False),
            norms=(zeros, zeros, rz.detach()),
            models=self._models((), x, b, r),
        )

    def _step(
        self, state: CGState, products: Rows, b: Tensor, precondition: Rows | None, limits: Limits
    ) -> CGState:
        q = multiply(products, state.p, state.status == RUNNING)
        status = fill(state.status, ~is_finite(q), Result.NON_FINITE)
        moves = status == RUNNING
        q = torch.where(moves[:, None], q, 0.0)
        pq = dot(state.p, q)
        status = fill(status, pq <= 0, Result.NEGATIVE_CURVATURE)
        meets_negative = moves & (status != RUNNING)
        alpha = divide(state.rz, pq, where=status == RUNNING)
        if self.radius is not None:
            to_boundary = _step_to_boundary(state.norms, self.radius)
            status = fill(status, alpha >= to_boundary, Result.BOUNDARY)
            alpha = torch.where(moves & (status != RUNNING), to_boundary, alpha)
        x, r = state.x + alpha[:, None] * state.p, state.r - alpha[:, None] * q
        status = fill(status, norm(r) <= limits.tolerance, Result.CONVERGED)
        models = self._models(state.models, x, b, r)
        status = fill(status, self._makes_no_progress(models), Result.PROGRESS)
        z = r if precondition is None else precondition(r)
        rz = dot(r, z)
        status = _checked_preconditioner(status, rz)
        goes_on = status == RUNNING
        beta = divide(rz, state.rz, where=goes_on)
        return CGState(
            x,
            r,
            torch.where(goes_on[:, None], z + beta[:, None] * state.p, state.p),
            torch.where(goes_on, rz, state.rz),
            steps=state.steps + (alpha.detach() != 0),
            status=status,
            direction=torch.where(meets_negative[:, None], _unit(state.p), state.direction),
            norms=_next_norms(state.norms, alpha.detach(), beta.detach(), rz.detach()),
            models=models,
        )

    def _models(self, models: tuple[Tensor, ...], x: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        if self.progress is None:
            return ()
        return (*models, -0.5 * dot(x.detach(), b.detach() + r.detach()))

    def _makes_no_progress(self, models: tuple[Tensor, ...]) -> Tensor:
        """Martens' rule, at step i = len(models) - 1."""
        step = len(models) - 1
        lag = max(10, math.ceil(step / 10))
        if step <= lag:
            return torch.tensor(False)
        now, before = models[-1], models[-1 - lag]
        return (now < 0) & (before - now < lag * self.progress * now.abs())  # type: ignore[operator]


def _checked_preconditioner(status: Tensor, rz: Tensor) -> Tensor:
    status = fill(status, ~rz.detach().isfinite(), Result.NON_FINITE)
    return fill(status, rz <= 0, Result.BREAKDOWN)


def _step_to_boundary(norms: tuple[Tensor, Tensor, Tensor], radius: float) -> Tensor:
    """Return the positive root t of |x + t p| = radius; in the form that does not cancel."""
    xx, xp, pp = norms
    room = (radius**2 - xx).clamp_min(0)
    root = torch.sqrt(xp * xp + pp * room)
    return torch.where(xp > 0, room / (xp + root), divide(root - xp, pp, where=pp > 0))


def _next_norms(
    norms: tuple[Tensor, Tensor, Tensor], alpha: Tensor, beta: Tensor, rz: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Conn, Gould, Toint, equations 7.5.5 to 7.5.7: M r is orthogonal to all earlier directions in this norm."""
    xx, xp, pp = norms
    return xx + alpha * (2 * xp + alpha * pp), beta * (xp + alpha * pp), rz + beta * beta * pp


def _unit(rows: Tensor) -> Tensor:
    return rows.detach() / norm(rows).clamp_min(torch.finfo(rows.dtype).tiny)[:, None]
