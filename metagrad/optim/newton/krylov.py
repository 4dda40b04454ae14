"""Conjugate gradients as optimizers use them: row by row, each with its own matrix, and differentiable."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.curvature import Result
from metagrad.optim.newton.flat import Rows, divide, dot
from metagrad.optim.newton.sampled_pairs import Pairs, no_pairs

RESULTS = tuple(Result)
_RUNNING = -1


class Krylov(NamedTuple):
    """What conjugate gradients come to, for each row."""

    x: Tensor  # [tasks, n]
    model: Tensor  # x^T A x / 2 - b^T x, [tasks]
    steps: Tensor  # int64 [tasks]
    ending: Tensor  # index into RESULTS, int64 [tasks]
    products: int  # of all rows together
    pairs: Pairs  # of search directions p and products A p


class _State(NamedTuple):
    x: Tensor
    r: Tensor  # b - A x
    p: Tensor  # search directions
    rr: Tensor  # r^T r
    rz: Tensor  # r^T M^-1 r
    scale: Tensor  # the largest |A p| / |p| so far, in the norms of M
    steps: Tensor
    status: Tensor
    pairs: Pairs
    least: Tensor  # r^T r below which a direction is rounding, and makes no pair


def conjugate_gradients(
    products: Rows,
    b: Tensor,
    *,
    x0: Tensor | None = None,
    radius: Tensor | None = None,
    metric: Tensor | None = None,
    pairs: int = 0,
    rtol: float = 1e-10,
    progress: float | None = None,
    max_steps: int = 250,
) -> Krylov:
    r"""Minimise :math:`\phi(x) = x^\top A x / 2 - b^\top x` in each row, by conjugate gradients.

    A row ends at a residual of ``rtol`` times that of 0; by Martens' rule; on the trust radius; or at a direction
    :math:`p` with :math:`\kappa = p^\top A p / p^\top p \le 0`. Along that it takes one more step, to the radius if
    there is one, else of the length that :math:`|\kappa|` gives, so that the model falls all the same.

    With a preconditioner :math:`M` the steps are those for :math:`M^{-1/2} A M^{-1/2}`, as many as its eigenvalues
    ask for. The residual that ends a row is all the same :math:`b - A x`, in the Euclidean norm.

    Steps are on the tape if products are: a derivative of what was computed, however early it ended.
    :func:`metagrad.curvature.solve` differentiates solutions implicitly, and has one matrix for all rows.

    Args:
        products: Multiplies all rows, each with its own matrix.
        b: Right-hand sides ``[tasks, n]``.
        x0: Where to begin; rows in which that is worse than 0 begin there.
        radius: Of the trust region around 0, ``[tasks]``; without ``x0`` and ``metric``.
        metric: The diagonal of a preconditioner M that is like A, ``[tasks, n]``, above 0; may be on the tape.
        pairs: How many pairs of :math:`p_i` and :math:`A p_i` to keep of each row, evenly over its steps. None is of
            a direction with :math:`\kappa \le 0`, nor of one whose residual is below the cube root of the precision,
            relative to b: so late, directions have lost conjugacy to rounding.
        rtol: Relative tolerance of a residual; the precision of the dtype bounds it.
        progress: Stop at step i when :math:`\phi` fell by less than :math:`k \epsilon |\phi|` in the last
            :math:`k = \max(10, i / 10)` steps; None never does.
        max_steps: The most steps.

    Returns:
        Solutions, and how they ended.

    Example:
        >>> from metagrad.optim.newton.krylov import conjugate_gradients
        >>> found = conjugate_gradients(lambda rows: rows * torch.tensor([1.0, 4.0]), torch.tensor([[2.0, 4.0]]))
        >>> found.x.round(decimals=4), found.model, int(found.steps)
        (tensor([[2., 1.]]), tensor([-4.]), 2)

    References:
        Hestenes, Stiefel, J. Res. NBS 49, 1952; Steihaug, SIAM J. Numer. Anal. 20(3), 1983; Martens, "Deep learning
        via Hessian-free optimization", ICML 2010, section 4.4; Dauphin et al., "Identifying and attacking the saddle
        point problem", NeurIPS 2014, for the step by the absolute curvature.
    """
    tolerance = max(rtol, 2 * torch.finfo(b.dtype).eps) * torch.linalg.vector_norm(b.detach(), dim=-1)
    metric, is_known = _checked(metric, b)
    state, count = _begun(products, b, x0, metric, no_pairs(b, pairs))
    models = [_model(state, b).detach()]
    status = _fill(state.status, ~is_known, Result.NON_FINITE)
    status = _fill(status, state.rr.detach().sqrt() <= tolerance, Result.CONVERGED)
    state = state._replace(status=status)
    for step in range(max_steps):
        if not bool((state.status == _RUNNING).any()):
            break
        state = _step(state, step, products, radius, metric)
        count += 1
        models.append(_model(state, b).detach())
        status = _fill(state.status, state.rr.detach().sqrt() <= tolerance, Result.CONVERGED)
        status = _fill(status, _has_stalled(models, progress), Result.PROGRESS)
        state = state._replace(status=status)
    ending = _fill(state.status, state.status == _RUNNING, Result.MAX_STEPS)
    return Krylov(state.x, _model(state, b), state.steps, ending, count, state.pairs)


def _checked(metric: Tensor | None, b: Tensor) -> tuple[Tensor | None, Tensor]:
    """Put 1 in the rows that have no finite preconditioner, and say which have one, or need none."""
    if metric is None:
        return None, torch.ones(len(b), dtype=torch.bool, device=b.device)
    is_known = metric.detach().isfinite().all(-1)
    return torch.where(is_known[:, None], metric, 1.0), is_known


def _begun(
    products: Rows, b: Tensor, x0: Tensor | None, metric: Tensor | None, pairs: Pairs
) -> tuple[_State, int]:
    x, r, count = torch.zeros_like(b), b, 0
    if x0 is not None:
        residual, count = b - products(x0), 1
        is_better = (dot(x0, b + residual) > 0)[:, None]  # the model at x0 is below that at 0
        x, r = torch.where(is_better, x0, x), torch.where(is_better, residual, r)
    steps = torch.zeros(len(b), dtype=torch.int64, device=b.device)
    zeros = torch.zeros_like(r[:, 0]).detach()
    z, rr = _over(r, metric), dot(r, r)
    rz = rr if metric is None else dot(r, z)
    status = torch.full_like(steps, _RUNNING)
    least = torch.finfo(b.dtype).eps ** (2 / 3) * dot(b, b).detach()
    return _State(x, r, z, rr, rz, zeros, steps, status, pairs, least), count


def _step(state: _State, step: int, products: Rows, radius: Tensor | None, metric: Tensor | None) -> _State:
    goes = state.status == _RUNNING
    p = state.p
    q = products(p)
    is_finite = q.detach().isfinite().all(-1)
    status = _fill(state.status, ~is_finite, Result.NON_FINITE)
    q = torch.where(is_finite[:, None], q, 0.0)
    pq, pp = dot(p, q), dot(p, p if metric is None else metric * p)
    size = divide(dot(q, _over(q, metric)).detach(), pp.detach(), where=pp.detach() > 0).sqrt()
    scale = torch.maximum(state.scale, size)
    rounding = torch.finfo(pq.dtype).eps * scale * pp
    is_negative = (status == _RUNNING) & (pq <= rounding)
    # Without any curvature along p but that of rounding, the step is that of gradient descent.
    curvature = torch.where(pq.abs() <= rounding, pp, pq.abs())
    alpha = divide(state.rz, curvature, where=status == _RUNNING)
    makes_pair = (status == _RUNNING) & ~is_negative & (state.rr > state.least)
    pairs = state.pairs.with_pair(step, p, q, makes_pair)
    status = _fill(status, is_negative, Result.NEGATIVE_CURVATURE)
    if radius is not None:
        to_boundary = _to_boundary(state.x, p, pp, radius)
        leaves = goes & is_finite & (is_negative | (alpha >= to_boundary))
        alpha = torch.where(leaves, to_boundary, alpha)
        status = _fill(status, leaves, Result.BOUNDARY)
    x, r = state.x + alpha[:, None] * p, state.r - alpha[:, None] * q
    z, rr = _over(r, metric), dot(r, r)
    rz = rr if metric is None else dot(r, z)
    beta = divide(rz, state.rz, where=status == _RUNNING)
    steps = state.steps + (goes & is_finite)
    return _State(x, r, z + beta[:, None] * p, rr, rz, scale, steps, status, pairs, state.least)


def _over(rows: Tensor, metric: Tensor | None) -> Tensor:
    return rows if metric is None else rows / metric


def _model(state: _State, b: Tensor) -> Tensor:
    return -0.5 * dot(state.x, b + state.r)


def _to_boundary(x: Tensor, p: Tensor, pp: Tensor, radius: Tensor) -> Tensor:
    """Return the positive root t of |x + t p| = radius, in the form that does not cancel."""
    xp, room = dot(x, p), (radius**2 - dot(x, x)).clamp_min(0)
    discriminant = xp * xp + pp * room
    is_inside = discriminant > 0
    return divide(room, xp + torch.where(is_inside, discriminant, 1.0).sqrt(), where=is_inside)


def _has_stalled(models: list[Tensor], progress: float | None) -> Tensor:
    """Martens' rule, at step i = len(models) - 1."""
    step = len(models) - 1
    lag = max(10, math.ceil(step / 10))
    if progress is None or step <= lag:
        return torch.tensor(False, device=models[0].device)
    now, before = models[-1], models[-1 - lag]
    return (now < 0) & (before - now < lag * progress * now.abs())


def _fill(status: Tensor, where: Tensor, result: Result) -> Tensor:
    """Give rows that still run a result, where a condition holds."""
    return torch.where((status == _RUNNING) & where, RESULTS.index(result), status)


def check_solver(call: str, rtol: float, progress: float | None, max_steps: int) -> None:
    """Refuse numbers of the inner solver that are out of their range."""
    if not 0 < rtol < 1:
        raise ValueError(f"{call}: rtol must be between 0 and 1, got {rtol}.")
    if progress is not None and not progress > 0:
        raise ValueError(f"{call}: progress must be above 0, or None, got {progress}.")
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
        raise ValueError(f"{call}: max_steps must be a whole number of at least 1, got {max_steps!r}.")
