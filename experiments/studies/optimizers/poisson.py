r"""Poisson's equation in the unit square, whose solution is known, and its residuals at points.

.. math:: \Delta u = -2 \pi^2 \sin(\pi x) \sin(\pi y), \quad u = 0 \text{ on the boundary}, \qquad
          u = \sin(\pi x) \sin(\pi y)

References:
    Müller, Zeinhofer, "Achieving high accuracy with PINNs via energy natural gradient descent", ICML 2023, section 4.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import metagrad as mg

if TYPE_CHECKING:
    from collections.abc import Callable

TESTED = 50  # points along a side that a solution is compared at


def laplacian(model: nn.Module | Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return :math:`u(x)` and :math:`\Delta u(x) = \sum_i \partial_i^2 u(x)`, ``[n]``, differentiable at any order.

    Args:
        model: Points ``[n, d]`` to values ``[n, 1]``, each of its own point.
        x: The points.
    """
    x = x.detach().requires_grad_()
    u = model(x)
    slope = mg.grad(u.sum(), x, create_graph=True)
    second = [mg.grad(part.sum(), x, create_graph=True)[:, i] for i, part in enumerate(slope.unbind(1))]
    return u[:, 0], torch.stack(second).sum(0)


def residuals(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return what each point is wrong by, ``[n]``, times its weight.

    Args:
        model: Points ``[n, 2]`` to values ``[n, 1]``.
        x: The points.
        y: What there should be, ``[n, 3]``: the Laplacian and its weight, and the weight of the value, which is 0; of
            each point one weight is 0.
    """
    u, laplace = laplacian(model, x)
    return y[:, 1] * (laplace - y[:, 0]) + y[:, 2] * u


def solution(x: Tensor) -> Tensor:
    """Return the solution at points ``[..., 2]``."""
    return (math.pi * x).sin().prod(-1)


def points(number: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return points to train on with what there should be, and points of the test with the solution, in float64.

    Inside there are ``number`` squared, on a grid, and four times ``number`` on the boundary; in the mean of squares
    both count as two means would.
    """
    middle = (torch.arange(number, dtype=torch.float64) + 0.5) / number
    inside, edge = torch.cartesian_prod(middle, middle), boundary(number)
    total, zeros = len(inside) + len(edge), torch.zeros(len(edge), dtype=torch.float64)
    right = -2 * math.pi**2 * solution(inside)
    of_inside = [right, torch.full_like(right, (total / len(inside)) ** 0.5), torch.zeros_like(right)]
    of_edge = [zeros, zeros, zeros + (total / len(edge)) ** 0.5]
    y = torch.cat([torch.stack(columns, 1) for columns in (of_inside, of_edge)])
    grid = torch.linspace(0, 1, TESTED, dtype=torch.float64)
    test = torch.cartesian_prod(grid, grid)
    return (torch.cat([inside, edge]), y), (test, solution(test))


def boundary(number: int) -> Tensor:
    """Return points on the boundary, evenly, so many on a side, ``[4 * number, 2]``."""
    along = torch.arange(number, dtype=torch.float64) / number
    zero, one = torch.zeros_like(along), torch.ones_like(along)
    sides = ((along, zero), (one, along), (1 - along, one), (zero, 1 - along))
    return torch.cat([torch.stack(side, 1) for side in sides])
