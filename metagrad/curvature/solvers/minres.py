"""MINRES: the least residual in a Krylov space, for symmetric operators, indefinite or singular."""

from __future__ import annotations

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


class Lanczos(NamedTuple):
    """Two neighbouring Lanczos vectors, not normalised; letters are the paper's.

    The solution needs no others, so none are kept, and in the norm of the preconditioner, so they are not those of
    :class:`~metagrad.curvature.spectrum.lanczos.LanczosVectors`.
    """

    before: Tensor  # [k, n]
    now: Tensor  # [k, n]
    image: Tensor  # the preconditioner's of ``now``, [k, n]
    beta: Tensor  # sqrt(now^T image), [k]
    beta_before: Tensor  # [k]


class Rotation(NamedTuple):
    """The last plane rotation, and what it leaves for the next, [k] each."""

    cs: Tensor
    sn: Tensor
    delta_bar: Tensor
    epsilon: Tensor


class MinresState(NamedTuple):
    """The state of MINRES; every row is a right-hand side."""

    x: Tensor  # [k, n]
    r: Tensor  # residuals, [k, n]
    lanczos: Lanczos
    rotation: Rotation
    phi_bar: Tensor  # norms of the residuals, in that of the preconditioner, [k]
    w: tuple[Tensor, Tensor]  # last two directions, [k, n] each
    size: Tensor  # largest norm of a column of the tridiagonal matrix so far, [k]
    steps: Tensor  # int64 [k]
    status: Tensor  # int64 [k]


@dataclass(frozen=True)
class MINRES(Solver):
    r"""MINRES: one product a step; the operator is symmetric, and may be indefinite or singular.

    .. math:: x_i = \arg\min_{x \in x_0 + \mathcal{K}_i(A, r_0)} | b - A x |

    For a singular operator it finds a solution if there is one. If there is none, it ends with
    ``Result.INCONSISTENT`` at a least-squares solution, which it knows by :math:`|A r|` being small relative to
    :math:`|A| |r|`; one step more would throw it far off. The preconditioner must be positive definite also where the
    operator is not.

    Args:
        singular: The ratio of :math:`|A r|` to :math:`|A| |r|` below which the operator counts as singular and the
            residual as the least. None is the square root of the machine epsilon. Lower it for consistent systems
            with condition numbers beyond its inverse.

    Raises:
        ValueError: ``singular`` is negative.

    Example:
        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.solvers.minres import MINRES
        >>> from metagrad.curvature.solvers.solve import solve
        >>> A = torch.diag(torch.tensor([2.0, -4.0]))
        >>> operator = SimpleNamespace(
        ...     shape=(2, 2), dtype=A.dtype, device=A.device, products=lambda rows: rows @ A
        ... )
        >>> solve(operator, torch.tensor([2.0, 2.0]), method=MINRES()).value
        tensor([ 1.0000, -0.5000])

    References:
        Paige, Saunders, "Solution of sparse indefinite systems of linear equations", SIAM J. Numer. Anal. 12(4),
        1975, sections 5 and 6; Choi, Paige, Saunders, "MINRES-QLP", SIAM J. Sci. Comput. 33(4), 2011, section 2
        (singular systems).
    """

    name = "minres"
    summary = "symmetric, indefinite and singular ones too; the least residual"
    singular: float | None = None

    def __post_init__(self) -> None:
        if self.singular is not None and not self.singular >= 0:
            raise ValueError(f"MINRES(singular): expected 0 or more, or None, got {self.singular}.")

    def run(
        self, products: Rows, b: Tensor, x0: Tensor | None, precondition: Rows | None, limits: Limits
    ) -> Run:
        """Solve for every row of ``b``."""
        x, r = initial(products, b, x0)
        singular = torch.finfo(b.dtype).eps ** 0.5 if self.singular is None else self.singular
        state = _initial_state(x, r, precondition, limits)
        for _ in range(limits.max_steps):
            if not bool((state.status == RUNNING).any()):
                break
            state = _step(state, products, precondition, limits, singular)
        return Run(state.x, state.steps, ended(state.status), torch.zeros_like(b, requires_grad=False))


def _initial_state(x: Tensor, r: Tensor, precondition: Rows | None, limits: Limits) -> MinresState:
    status = begun(r, is_finite(r), limits.tolerance)
    image = r if precondition is None else precondition(r)
    status, beta = _length(status, r, image)
    zero, zeros = torch.zeros_like(beta), torch.zeros_like(r)
    return MinresState(
        x,
        r,
        Lanczos(zeros, r, image, beta, torch.ones_like(beta)),
        Rotation(zero - 1, zero, zero, zero),
        beta,
        (zeros, zeros),
        size=zero.detach(),
        steps=torch.zeros_like(status),
        status=fill(status, beta <= 0, Result.BREAKDOWN),
    )


def _step(
    state: MinresState, products: Rows, precondition: Rows | None, limits: Limits, singular: float
) -> MinresState:
    active = state.status == RUNNING
    v = state.lanczos.image * _inverse(state.lanczos.beta, active)
    product = multiply(products, v, active)
    status = fill(state.status, ~is_finite(product), Result.NON_FINITE)
    # A row that is not finite takes no part in this step, for 0 * nan is nan.
    active = status == RUNNING
    status, alpha, lanczos = _next_lanczos(state.lanczos, v, product, precondition, status)
    active = active & (status == RUNNING)
    rotation, delta, gamma, size, regular = _rotate(state, alpha, lanczos.beta, active, singular)
    status = fill(status, active & ~regular, Result.INCONSISTENT)
    before, last = state.w
    # Paige and Saunders, section 6: w_i of  v_i = gamma_i w_i + delta_i w_{i-1} + epsilon_i w_{i-2}.
    mix = v - state.rotation.epsilon[:, None] * before - delta[:, None] * last
    w = mix * _inverse(gamma, regular)
    phi = torch.where(regular, rotation.cs * state.phi_bar, 0.0)
    phi_bar = torch.where(regular, rotation.sn * state.phi_bar, state.phi_bar)
    following = lanczos.now * _inverse(lanczos.beta, regular & (lanczos.beta > 0))
    r = rotation.sn.square()[:, None] * state.r - (phi_bar * rotation.cs)[:, None] * following
    r = torch.where(regular[:, None], r, state.r)
    status = fill(status, active & (length(r) <= limits.tolerance), Result.CONVERGED)
    is_exhausted = lanczos.beta.detach() <= torch.finfo(r.dtype).eps * size
    status = fill(status, active & is_exhausted, Result.STAGNATED)
    return MinresState(
        state.x + phi[:, None] * w,
        r,
        lanczos,
        rotation,
        phi_bar,
        (last, w),
        size=size,
        steps=state.steps + regular,
        status=status,
    )


def _inverse(x: Tensor, where: Tensor) -> Tensor:
    """Return 1 / x as a column, 0 elsewhere."""
    return divide(torch.ones_like(x), x, where)[:, None]


def _next_lanczos(
    lanczos: Lanczos, v: Tensor, product: Tensor, precondition: Rows | None, status: Tensor
) -> tuple[Tensor, Tensor, Lanczos]:
    """Orthogonalise the product against the last two vectors; return the status, alpha and the new pair."""
    active = status == RUNNING
    product = torch.where(active[:, None], product, 0.0)
    alpha = dot(v, product)
    back = divide(lanczos.beta, lanczos.beta_before, where=active)
    forth = divide(alpha, lanczos.beta, where=active)
    following = product - back[:, None] * lanczos.before - forth[:, None] * lanczos.now
    image = following if precondition is None else precondition(following)
    status, beta = _length(status, following, image)
    return status, alpha, Lanczos(lanczos.now, following, image, beta, lanczos.beta)


def _length(status: Tensor, rows: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of rows in the preconditioner's norm, and the status: it may be negative or not finite."""
    square = dot(rows, image)
    status = fill(status, ~square.detach().isfinite(), Result.NON_FINITE)
    status = fill(status, square < 0, Result.BREAKDOWN)
    positive = square > 0
    return status, torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def _rotate(
    state: MinresState, alpha: Tensor, beta: Tensor, active: Tensor, singular: float
) -> tuple[Rotation, Tensor, Tensor, Tensor, Tensor]:
    """Annihilate beta; return the rotation, delta, gamma, the size of the matrix, and where the step goes on.

    It does not where the iterate so far is a least-squares solution: ``|A r| = phi_bar |(gamma_bar, delta_bar)|``
    (Choi, Paige, Saunders, 2011, section 2) vanishes.
    """
    cs, sn, delta_bar, _ = state.rotation
    delta, gamma_bar = cs * delta_bar + sn * alpha, sn * delta_bar - cs * alpha
    square = gamma_bar.square() + beta.square()
    column = alpha.square() + beta.square() + state.lanczos.beta.square() * (state.steps > 0)
    size = torch.maximum(state.size, torch.where(active, column.detach().sqrt(), 0.0))
    image_of_residual = torch.hypot(gamma_bar.detach(), (cs * beta).detach())
    regular = active & (image_of_residual > singular * size)
    gamma = torch.where(regular, square, 1.0).sqrt()
    rotation = Rotation(
        divide(gamma_bar, gamma, where=regular), divide(beta, gamma, where=regular), -cs * beta, sn * beta
    )
    return rotation, delta, gamma, size, regular
