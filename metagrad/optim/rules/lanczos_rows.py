"""The Lanczos process row by row, each with its own matrix, and differentiable; and cubic models in its spaces."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.optim.rules.flat import Rows, divide, dot, norm

_BISECTIONS = 64
_NEWTON_STEPS = 2


class CubicStep(NamedTuple):
    """The minimum of a cubic model in a Krylov space, for each row."""

    x: Tensor  # [tasks, n]
    model: Tensor  # its value there, [tasks]
    steps: Tensor  # dimensions of the spaces, int64 [tasks]
    products: int  # of all rows together


def minimize_cubic(products: Rows, g: Tensor, cubic: Tensor, *, rtol: float, max_steps: int) -> CubicStep:
    r"""Minimise :math:`g^\top x + x^\top H x / 2 + M |x|^3 / 6` in the Krylov space of the gradient, row by row.

    .. math:: x = Q^\top y, \qquad (T + \tfrac{M r}{2} I) \, y = -|g| \, e_1, \qquad r = |y|, \qquad T = Q H Q^\top

    with the least root r at which the matrix is positive definite. A row ends when the gradient of the model at x is
    ``rtol`` times g, when its space is invariant, or after ``max_steps``.

    Args:
        products: Multiplies all rows, each with its own matrix.
        g: Gradients ``[tasks, n]``.
        cubic: :math:`M`, ``[tasks]``, above 0.
        rtol: Relative tolerance.
        max_steps: The largest dimension of the space.

    Returns:
        Steps, on the tape if products are.

    Example:
        :math:`x + x^2 / 2 + |x|^3 / 3`: at -0.618, where :math:`1 + x - x^2 = 0`.

        >>> from metagrad.optim.rules.lanczos_rows import minimize_cubic
        >>> minimize_cubic(lambda rows: rows, torch.ones(1, 1), torch.full((1,), 2.0), rtol=1e-6, max_steps=5).x
        tensor([[-0.6180]])

    References:
        Cartis, Gould, Toint, "Adaptive cubic regularisation methods for unconstrained optimization, part I",
        Mathematical Programming 127, 2011, section 6.
    """
    length = norm(g)
    alive = length > 0
    basis = [divide(g, length[:, None].expand_as(g), where=alive[:, None].expand_as(g))]
    diagonal: list[Tensor] = []
    off_diagonal: list[Tensor] = []
    steps = torch.zeros(len(g), dtype=torch.int64, device=g.device)
    count = 0
    while True:
        image = products(basis[-1])
        count, steps = count + 1, steps + alive
        # A row that has ended goes on with a 1 on its diagonal, which changes nothing.
        diagonal.append(torch.where(alive, dot(basis[-1], image), 1.0))
        rest = _orthogonalised(image, basis)
        beta = torch.where(alive, norm(rest), 0.0)
        T = _tridiagonal(diagonal, off_diagonal)
        r = _length_of_minimum(T.detach(), length.detach(), cubic.detach())
        y = _at(T, length, cubic, r)
        tolerance = max(rtol, 2 * torch.finfo(g.dtype).eps) * length
        alive = alive & (beta * y[:, -1].abs() > tolerance) & (beta > 0)
        if len(diagonal) == max_steps or len(diagonal) == g.shape[1] or not bool(alive.any()):
            break
        off_diagonal.append(torch.where(alive, beta, 0.0))
        row = alive[:, None].expand_as(rest)
        basis.append(divide(rest, beta[:, None].expand_as(rest), where=row))
    for _ in range(_NEWTON_STEPS):
        r = _newton_step(T, length, cubic, r)
    y = _at(T, length, cubic, r)
    quadratic = 0.5 * dot(y, (T @ y[:, :, None]).squeeze(-1))
    model = length * y[:, 0] + quadratic + cubic * norm(y) ** 3 / 6
    x = (y[:, None] @ torch.stack(basis, 1)).squeeze(1)
    return CubicStep(x, model, steps, count)


def _orthogonalised(image: Tensor, basis: list[Tensor]) -> Tensor:
    """Take out the parts along the basis, twice, as is enough."""
    rows = torch.stack(basis, 1)
    for _ in range(2):
        parts = rows @ image[:, :, None]
        image = image - (parts.transpose(1, 2) @ rows).squeeze(1)
    return image


def _tridiagonal(diagonal: list[Tensor], off_diagonal: list[Tensor]) -> Tensor:
    T = torch.diag_embed(torch.stack(diagonal, 1))
    if not off_diagonal:
        return T
    off = torch.stack(off_diagonal, 1)
    return T + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)


def _length_of_minimum(T: Tensor, length: Tensor, cubic: Tensor) -> Tensor:
    """Find the root r by bisection, a constant."""
    if not bool(T.isfinite().all()):
        return torch.full_like(length, torch.nan)
    values, vectors = torch.linalg.eigh(T)
    parts, least = length[:, None] * vectors[:, 0], values[:, 0]
    low = (-2 * least / cubic).clamp_min(0)
    high = (-least + (least**2 + 2 * cubic * length).sqrt()) / cubic
    for _ in range(_BISECTIONS):
        r = (low + high) / 2
        y = divide(parts, values + 0.5 * (cubic * r)[:, None], where=parts != 0)
        is_long = torch.linalg.vector_norm(y, dim=1) > r
        low, high = torch.where(is_long, r, low), torch.where(is_long, high, r)
    return high


def _shifted(T: Tensor, cubic: Tensor, r: Tensor) -> Tensor:
    return T + torch.diag_embed((0.5 * cubic * r)[:, None].expand(T.shape[:2]))


def _at(T: Tensor, length: Tensor, cubic: Tensor, r: Tensor) -> Tensor:
    unit = torch.zeros_like(T[:, 0])
    unit[:, 0] = 1
    return -torch.linalg.solve(_shifted(T, cubic, r), length[:, None] * unit)


def _newton_step(T: Tensor, length: Tensor, cubic: Tensor, r: Tensor) -> Tensor:
    """Improve a root, and its derivatives: k steps from a constant have those of order 2^k - 1 right."""
    y = _at(T, length, cubic, r)
    size = norm(y)
    moves = size > 0
    inner = dot(y, torch.linalg.solve(_shifted(T, cubic, r), y))
    slope = -0.5 * cubic * divide(inner, size, where=moves) - 1
    return r - (size - r) / slope
