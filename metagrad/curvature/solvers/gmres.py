"""The generalized minimal residual method, for systems that are not symmetric."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.curvature.linear_map import Rows
from metagrad.curvature.solvers.iteration import RUNNING, Run, begun, ended, fill, is_finite, length
from metagrad.curvature.solvers.solution import Result

_LITTLE = 0.99  # above this reduction factor of a cycle, further cycles do not help


def gmres(products: Rows, b: Tensor, *, tolerance: Tensor, max_steps: int, restart: int = 50) -> Run:
    r"""Solve :math:`A_i x_i = b_i` for rows, each with its own matrix, without a graph.

    Step j minimizes the residual over :math:`\operatorname{span}(b, A b, \dots, A^{j-1} b)`. Rows stop independently.

    Args:
        products: Multiplies rows [k, n], row i with :math:`A_i`.
        b: The right-hand sides, [k, n].
        tolerance: A row stops when its residual norm is at most this, [k].
        max_steps: Maximum number of products.
        restart: Number of steps after which the basis is dropped. It bounds the memory.

    Example:
        >>> from metagrad.curvature.solvers.gmres import gmres
        >>> A, b = torch.tensor([[0.0, 2.0], [-1.0, 0.0]]), torch.tensor([[2.0, 3.0]])
        >>> run = gmres(lambda rows: rows @ A.T, b, tolerance=torch.tensor([1e-4]), max_steps=10)
        >>> run.x, int(run.steps)
        (tensor([[-3.,  1.]]), 2)

    References:
        Saad, Schultz, "GMRES: a generalized minimal residual algorithm for solving nonsymmetric linear systems",
        SIAM J. Sci. Stat. Comput. 7(3), 1986.
    """
    b = b.detach()
    x, r, steps, count = torch.zeros_like(b), b, b.new_zeros(len(b), dtype=torch.int64), 0
    status = begun(r, tolerance)
    with torch.no_grad():
        while bool((status == RUNNING).any()) and count < max_steps:
            active, before = status == RUNNING, length(r)
            size = min(restart, b.shape[1], max_steps - count)
            change, taken = _cycle(products, r, active, tolerance, size)
            x, steps, count = x + change, steps + taken, count + int(taken.max()) + 1
            r = torch.where(active[:, None], b - products(x), r)
            status = fill(status, ~is_finite(r), Result.NON_FINITE)
            # The residual of the recurrence differs from the true residual by rounding.
            status = fill(status, length(r) <= 2 * tolerance, Result.CONVERGED)
            status = fill(status, length(r) > _LITTLE * before, Result.STAGNATED)
    return Run(x, steps, ended(status), torch.zeros_like(x), r, count)


def _cycle(products: Rows, r: Tensor, active: Tensor, tolerance: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the change of the solution after at most ``size`` steps, and the steps of each row."""
    k, n = r.shape
    first = length(r)
    Q, H = r.new_zeros(k, size + 1, n), r.new_zeros(k, size + 1, size)
    Q[:, 0] = r / torch.where(first > 0, first, 1.0)[:, None]
    right = r.new_zeros(k, size + 1)
    right[:, 0] = first
    found, steps = r.new_zeros(k, size), torch.zeros_like(active, dtype=torch.int64)
    for j in range(size):
        w = products(Q[:, j])
        for _ in range(2):  # one pass leaves rounding errors of the size of the residual
            h = (Q[:, : j + 1] @ w[:, :, None])[:, :, 0]
            H[:, : j + 1, j] += h
            w = w - (h[:, None] @ Q[:, : j + 1])[:, 0]
        H[:, j + 1, j] = length(w)
        Q[:, j + 1] = w / torch.where(H[:, j + 1, j] > 0, H[:, j + 1, j], 1.0)[:, None]
        part, goal = H[:, : j + 2, : j + 1], right[:, : j + 2, None]
        y = linalg.lstsq(part, goal).solution.nan_to_num(0.0, 0.0, 0.0)
        found[:, : j + 1] = torch.where(active[:, None], y[:, :, 0], found[:, : j + 1])
        steps = steps + active
        active = active & (length((goal - part @ y)[:, :, 0]) > tolerance)
        if not bool(active.any()):
            break
    return (found[:, None] @ Q[:, :size])[:, 0], steps
