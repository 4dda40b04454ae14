"""Conjugate gradients, row by row, with negative curvature, a trust radius and stopping rules of optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.curvature.linear_map import Rows
from metagrad.curvature.rows import dot
from metagrad.curvature.solvers.iteration import (
    RUNNING,
    Limits,
    Run,
    Solver,
    begun,
    divide,
    ended,
    fill,
    initial,
    is_finite,
    length,
    multiply,
)
from metagrad.curvature.solvers.solution import Result


class CGState(NamedTuple):
    """The state of conjugate gradients; every row is a right-hand side."""

    x: Tensor  # iterates, [k, n]
    r: Tensor  # residuals b - A x, [k, n]
    p: Tensor  # search directions, [k, n]
    x_image: Tensor  # M x, of the matrix M whose inverse preconditions, [k, n]
    p_image: Tensor  # M p, likewise
    rz: Tensor  # r^T M^-1 r, [k]
    scale: Tensor  # the largest |A p| / |p| so far, in the norms of M, [k]
    steps: Tensor  # int64 [k]
    status: Tensor  # int64 [k]
    direction: Tensor  # of negative curvature, [k, n]
    models: tuple[Tensor, ...]  # values x^T A x / 2 - b^T x of the model at all iterates so far, [k] each
    products: int  # with all rows together


@dataclass(frozen=True)
class ConjugateGradients:
    r"""The iteration, on the tape if products are; every row may have a matrix of its own.

    Norms :math:`|x|^2 = x^T M x` are those of the preconditioner, which multiplies with the inverse of M.

    Args:
        products: Multiplies rows; those that have ended are False in its second argument, and may give anything.
        tolerance: Norms of residuals at which rows have converged, [k].
        precondition: A map of rows.
        radius: Of the trust region around 0, where the iteration must start then, [k].
        progress: As of :class:`CG`.
        follows_negative: Where the curvature :math:`\kappa = p^T A p / p^T M p` is not above rounding errors, take
            one last step along p by its absolute value (Dauphin et al., NeurIPS 2014); or by that of M where there
            is none but rounding, as gradient descent does. Else the iterate before is what a row ends with.
        observe: Called at each step with its number, residuals, directions p, products A p, and the rows in which p
            has positive curvature.
    """

    products: Callable[[Tensor, Tensor], Tensor]
    tolerance: Tensor
    precondition: Rows | None = None
    radius: Tensor | None = None
    progress: float | None = None
    follows_negative: bool = False
    observe: Callable[[int, Tensor, Tensor, Tensor, Tensor], None] | None = None

    def run(self, b: Tensor, x: Tensor, r: Tensor, max_steps: int, is_sound: Tensor) -> CGState:
        """Iterate from x with the residual r, in the rows where ``is_sound``; the others are not finite."""
        state = self._initial_state(b, x, r, is_sound)
        for step in range(max_steps):
            if not bool((state.status == RUNNING).any()):
                break
            state = self._step(step, state, b)
        return state._replace(status=ended(state.status))

    def _initial_state(self, b: Tensor, x: Tensor, r: Tensor, is_sound: Tensor) -> CGState:
        z, rz, status = self._preconditioned(r, begun(r, is_sound, self.tolerance))
        return CGState(
            x,
            r,
            z,
            x_image=x,
            p_image=r,
            rz=rz,
            scale=torch.zeros_like(rz.detach()),
            steps=torch.zeros_like(status),
            status=status,
            direction=b.new_zeros(()).expand_as(b),  # of no memory until there is one
            models=self._models((), x, b, r),
            products=0,
        )

    def _step(self, step: int, state: CGState, b: Tensor) -> CGState:
        q = self.products(state.p, state.status == RUNNING)
        status = fill(state.status, ~is_finite(q), Result.NON_FINITE)
        moves = status == RUNNING
        q = torch.where(moves[:, None], q, 0.0)
        pq = dot(state.p, q)
        curvature, rounding, scale = self._curvature(state, q, pq)
        is_negative = moves & (pq <= rounding)
        if self.observe is not None:
            self.observe(step, state.r, state.p, q, moves & ~is_negative)
        status = fill(status, is_negative, Result.NEGATIVE_CURVATURE)
        alpha = divide(state.rz, curvature, where=moves if self.follows_negative else moves & ~is_negative)
        if self.radius is not None:
            to_boundary = _step_to_boundary(state, self.radius)
            leaves = moves & (is_negative | (alpha >= to_boundary))
            alpha = torch.where(leaves, to_boundary, alpha)
            status = fill(status, leaves, Result.BOUNDARY)
        x, r = state.x + alpha[:, None] * state.p, state.r - alpha[:, None] * q
        del q  # off the tape, its memory is that of the next direction
        status = fill(status, length(r) <= self.tolerance, Result.CONVERGED)
        models = self._models(state.models, x, b, r)
        if self.progress is not None:
            status = fill(status, _makes_no_progress(models, self.progress), Result.PROGRESS)
        z, rz, status = self._preconditioned(r, status)
        is_too_far = moves & ~rz.detach().isfinite()
        x = torch.where(is_too_far[:, None], state.x, x)
        goes_on = status == RUNNING
        beta = divide(rz, state.rz, where=goes_on)[:, None]
        p = torch.where(goes_on[:, None], z + beta * state.p, state.p)
        return CGState(
            x,
            r,
            p,
            x_image=x if self.precondition is None else state.x_image + alpha[:, None] * state.p_image,
            p_image=p if self.precondition is None else r + beta * state.p_image,
            rz=torch.where(goes_on, rz, state.rz),
            scale=scale,
            steps=state.steps + (alpha.detach() != 0),
            status=status,
            direction=state.direction
            if self.follows_negative
            else torch.where(is_negative[:, None], _unit(state.p), state.direction),
            models=models,
            products=state.products + 1,
        )

    def _preconditioned(self, r: Tensor, status: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z = M^-1 r, r^T z, and the status."""
        z = r if self.precondition is None else self.precondition(r)
        rz = dot(r, z)
        status = fill(status, ~rz.detach().isfinite(), Result.NON_FINITE)
        return z, rz, fill(status, rz <= 0, Result.BREAKDOWN)

    def _curvature(self, state: CGState, q: Tensor, pq: Tensor) -> tuple[Tensor, Tensor | float, Tensor]:
        """Return the divisor of r^T z, the bound below which p^T A p is rounding, and the scale so far."""
        if not self.follows_negative:
            return pq, 0.0, state.scale
        pp = dot(state.p, state.p_image)
        images = dot(q, q if self.precondition is None else self.precondition(q)).detach()
        scale = torch.maximum(state.scale, divide(images, pp.detach(), where=pp.detach() > 0).sqrt())
        rounding = torch.finfo(pq.dtype).eps * scale * pp
        return torch.where(pq.abs() <= rounding, pp, pq.abs()), rounding, scale

    def _models(self, models: tuple[Tensor, ...], x: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        if self.progress is None:
            return ()
        return (*models, -0.5 * dot(x.detach(), b.detach() + r.detach()))


def _makes_no_progress(models: tuple[Tensor, ...], progress: float) -> Tensor | bool:
    """Martens' rule, at step i = len(models) - 1."""
    step = len(models) - 1
    lag = max(10, math.ceil(step / 10))
    if step <= lag:
        return False
    now, before = models[-1], models[-1 - lag]
    return (now < 0) & (before - now < lag * progress * now.abs())


def _step_to_boundary(state: CGState, radius: Tensor) -> Tensor:
    """Return the positive root t of |x + t p| = radius; in the form that does not cancel, as iterates only grow."""
    xp, pp = dot(state.x, state.p_image), dot(state.p, state.p_image)
    rest = (radius**2 - dot(state.x, state.x_image)).clamp_min(0)
    discriminant = xp * xp + pp * rest
    is_inside = discriminant > 0
    return divide(rest, xp + torch.where(is_inside, discriminant, 1.0).sqrt(), where=is_inside)


def _unit(rows: Tensor) -> Tensor:
    return rows.detach() / length(rows).clamp_min(torch.finfo(rows.dtype).tiny)[:, None]


@dataclass(frozen=True)
class CG(Solver):
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
        iteration = ConjugateGradients(
            lambda rows, active: multiply(products, rows, active),
            limits.tolerance,
            precondition,
            None if self.radius is None else torch.full_like(limits.tolerance, self.radius),
            self.progress,
        )
        state = iteration.run(b, x, r, limits.max_steps, is_finite(r))
        return Run(state.x, state.steps, state.status, state.direction)
