"""Iterations to the roots of rows, which stop independently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from metagrad.autograd.derivatives.recorded import Recorded
from metagrad.core._torch import linalg
from metagrad.core.checks import check_count
from metagrad.curvature.linear_map import Rows
from metagrad.curvature.solvers.methods import RUNNING, begun, ended, fill, gmres, is_finite, length
from metagrad.curvature.solvers.solution import Result

_SUFFICIENT, _HALVINGS = 1e-4, 25  # decrease that a step must achieve, and how often it is halved


class Iterate(NamedTuple):
    """Rows with their residuals."""

    x: Tensor  # [k, n]
    f: Tensor  # [k, n]


class RootMethod(Protocol):
    """A method that computes the steps of an iteration."""

    def begin(self, f: Rows) -> Callable[[Iterate, Tensor], Iterate]:
        """Return a function that maps an iterate, and the mask of rows that still run, to the next iterate."""
        ...


def iterated(
    f: Rows, method: RootMethod, start: Iterate, tolerance: Tensor, max_steps: int
) -> tuple[Iterate, Tensor, Tensor]:
    """Iterate until the norm of the residual of each row is at most its tolerance, ``[k]``.

    Returns:
        The last iterate, and for each row the number of steps and the index into RESULTS, int64 ``[k]``.
    """
    step, now = method.begin(f), start
    status = begun(now.f, tolerance)
    steps = torch.zeros_like(status)
    for _ in range(max_steps):
        active = status == RUNNING
        if not bool(active.any()):
            break
        found = step(now, active)
        has_moved = (found.x != now.x).any(-1)
        sound = active & is_finite(found.f) & is_finite(found.x)
        status = fill(status, active & ~sound, Result.NON_FINITE)
        status = fill(status, active & ~has_moved, Result.STAGNATED)
        now = Iterate(*(torch.where(sound[:, None], a, b) for a, b in zip(found, now, strict=True)))
        steps = steps + active
        status = fill(status, length(now.f) <= tolerance, Result.CONVERGED)
    return now, steps, ended(status)


@dataclass(frozen=True)
class NewtonKrylov:
    r"""Newton's method with a line search. GMRES solves its systems :math:`\partial f(x) \, d = -f(x)`.

    A step is halved until :math:`|f|` decreases. The system of a step is solved to a tolerance that decreases
    with :math:`|f|`.

    Args:
        krylov_steps: Maximum number of products of a system.

    Raises:
        ValueError: The number is not positive.

    Example:
        >>> metagrad.hypergrad.root(lambda x: x**2 - 2, torch.tensor([1.0]),
        ...     method=metagrad.hypergrad.NewtonKrylov(krylov_steps=1)).value
        tensor([1.4142])

    References:
        Knoll, Keyes, "Jacobian-free Newton-Krylov methods", J. Comput. Phys. 193, 2004; Eisenstat, Walker, "Choosing
        the forcing terms in an inexact Newton method", SIAM J. Sci. Comput. 17, 1996, choice 2.
    """

    krylov_steps: int = 50

    def __post_init__(self) -> None:
        check_count("NewtonKrylov(krylov_steps)", self.krylov_steps)

    def begin(self, f: Rows) -> Callable[[Iterate, Tensor], Iterate]:
        """Return the step."""
        last: list[Tensor] = []

        def step(now: Iterate, active: Tensor) -> Iterate:
            size = length(now.f)
            forcing = 0.9 * (size / last[-1]).square() if last else torch.full_like(size, 0.1)
            last[:] = [size.clamp_min(torch.finfo(size.dtype).tiny)]
            right = torch.where(active[:, None], -now.f, 0.0)
            tolerance = forcing.clamp(1e-8, 0.1) * size
            d = gmres(_jacobian(f, now.x), right, tolerance=tolerance, max_steps=self.krylov_steps).x
            return _searched(f, now, d, active)

        return step


@dataclass(frozen=True)
class Anderson:
    r"""Anderson's acceleration of :math:`x \leftarrow x + f(x)`, for fixed points :math:`f(x) = g(x) - x`.

    Args:
        memory: Number of earlier iterates that are combined.

    Raises:
        ValueError: The number is not positive.

    Example:
        >>> g = torch.cos
        >>> metagrad.hypergrad.fixed_point(g, torch.tensor([1.0]), method=metagrad.hypergrad.Anderson(memory=2)).value
        tensor([0.7391])

    References:
        Walker, Ni, "Anderson acceleration for fixed-point iterations", SIAM J. Numer. Anal. 49, 2011.
    """

    memory: int = 10

    def __post_init__(self) -> None:
        check_count("Anderson(memory)", self.memory)

    def begin(self, f: Rows) -> Callable[[Iterate, Tensor], Iterate]:
        """Return the step."""
        earlier: list[Iterate] = []

        def step(now: Iterate, active: Tensor) -> Iterate:
            x = now.x + now.f
            if earlier:
                changes = [Iterate(now.x - old.x, now.f - old.f) for old in earlier]
                dx, df = (torch.stack(parts, 1) for parts in zip(*changes, strict=True))
                weights = _least_squares(df, now.f)
                x = x - (weights[:, None] @ (dx + df))[:, 0]
            earlier.append(now)
            del earlier[: -self.memory]
            return Iterate(x, f(x))

        return step


@dataclass(frozen=True)
class Broyden:
    r"""Broyden's method from the Jacobian :math:`-I`, for fixed points :math:`f(x) = g(x) - x`.

    Args:
        memory: Number of updates, after which the method starts again from :math:`-I`.

    Raises:
        ValueError: The number is not positive.

    Example:
        >>> g = torch.cos
        >>> metagrad.hypergrad.fixed_point(g, torch.tensor([1.0]), method=metagrad.hypergrad.Broyden()).value
        tensor([0.7391])

    References:
        Broyden, "A class of methods for solving nonlinear simultaneous equations", Math. Comp. 19, 1965, method 1.
    """

    memory: int = 50

    def __post_init__(self) -> None:
        check_count("Broyden(memory)", self.memory)

    def begin(self, f: Rows) -> Callable[[Iterate, Tensor], Iterate]:
        """Return the step."""
        pairs: list[tuple[Tensor, Tensor]] = []  # the inverse is -I plus products of columns and rows

        def step(now: Iterate, active: Tensor) -> Iterate:
            x = now.x - sum(((v * now.f).sum(-1, True) * u for u, v in pairs), -now.f)
            found = Iterate(x, f(x))
            s, y = found.x - now.x, found.f - now.f
            image = sum(((v * y).sum(-1, True) * u for u, v in pairs), -y)
            row = sum(((s * u).sum(-1, True) * v for u, v in pairs), -s)
            product = (s * image).sum(-1, True)
            is_sound = product.abs() > torch.finfo(s.dtype).tiny
            if len(pairs) == self.memory:  # later pairs depend on the first one
                pairs.clear()
            else:
                column = (s - image) / torch.where(is_sound, product, 1.0)
                pairs.append((torch.where(is_sound, column, 0.0), row))
            return found

        return step


def _jacobian(f: Rows, x: Tensor) -> Rows:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        graph = Recorded("root(f, x0)", [f(leaf)], {"x": leaf})
    return lambda rows: graph.push(rows.reshape(-1)).view_as(rows)


def _searched(f: Rows, now: Iterate, d: Tensor, active: Tensor) -> Iterate:
    """Halve the step of each row until its residual decreases. A row without a decrease does not change."""
    size, lengths = length(now.f), torch.ones_like(length(now.f))
    found, is_done = now, ~active
    for _ in range(_HALVINGS):
        x = now.x + torch.where(is_done, 0.0, lengths)[:, None] * d
        f_x = f(x)
        is_lower = ~is_done & (length(f_x) <= (1 - _SUFFICIENT * lengths) * size)
        found = Iterate(*(torch.where(is_lower[:, None], a, b) for a, b in zip((x, f_x), found, strict=True)))
        is_done = is_done | is_lower
        if bool(is_done.all()):
            break
        lengths = torch.where(is_done, lengths, lengths / 2)
    return found


def _least_squares(rows: Tensor, b: Tensor) -> Tensor:
    """Return the weights [k, m] of rows [k, m, n] whose sum is nearest to b [k, n]."""
    dtype, rows, b = b.dtype, rows.double(), b.double()
    scale = linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    rows = rows / scale
    gram = rows @ rows.mT + 1e-14 * torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    weights = linalg.solve(gram, rows @ b[:, :, None]) / scale
    return weights[:, :, 0].to(dtype)
