r"""Derivatives of a minimum by the implicit function theorem, with some inverse of the Hessian.

At :math:`\phi^*(\lambda) = \arg\min_\phi g(\phi, \lambda)` the gradient of g is zero for every :math:`\lambda`, hence

.. math::
    \frac{d}{d\lambda} f(\phi^*(\lambda), \lambda) = \nabla_\lambda f
        - \frac{\partial^2 g}{\partial\lambda \, \partial\phi} \, u, \qquad
    \frac{\partial^2 g}{\partial\phi^2} \, u = \nabla_\phi f.

Methods differ in how they compute u.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.checks import warn
from metagrad.core.tree import Params, widened, zeros_for_none
from metagrad.curvature.linear_map import LinearMap
from metagrad.curvature.operators.hessian import HessianOperator, hessian
from metagrad.curvature.solvers.solution import Result, Solution, SolveError
from metagrad.curvature.solvers.solve import APPROXIMATE
from metagrad.hypergrad.problem import CALL, CREATE, Derivative, Problem, minus, partials

LOOSE = 1e-2
"""Residuals above this value, relative to the right-hand side, give a warning."""

_NO_MINIMUM = (
    "It is not positive definite, so the parameters are at no minimum. Take more inner steps, give the inner loss a "
    "larger penalty, such as a proximal term, give the method damping, as in CG(damping=1.0), or give iMAML "
    "matrix='ggn'."
)


@dataclass(frozen=True)
class ImplicitMethod:
    """A method given by an inverse of the Hessian of the inner loss. :func:`implicit_diff` also accepts it.

    Attributes:
        is_exact: Whether the method solves the system exactly, up to its ``damping``. Only then is the derivative
            differentiable.
    """

    is_exact: ClassVar[bool] = False

    @property
    def is_zero(self) -> bool:
        """Whether u is zero, so that the minimum counts as a constant."""
        return False

    def inverse(self, operator: LinearMap, b: Tensor) -> Solution:
        """Solve for rows with the Hessian. The solution is differentiable if the products are.

        Args:
            operator: The Hessian, or the Hessians of k tasks if it has ``num_matrices``.
            b: A right-hand side ``[n]``, or one for each task, ``[k, n]``.
        """
        raise NotImplementedError

    def estimate(self, problem: Problem) -> Derivative:
        """Estimate the derivative at the parameters of the problem."""
        if problem.create_graph and not self.is_exact:
            raise ValueError(
                f"{CREATE}: {type(self).__name__} approximates the derivative, so its own derivative is not correct. "
                "Take CG, Exact or Unroll."
            )
        with torch.enable_grad():
            values, hyper = problem.variables(), problem.hyper_leaves()
            if problem.create_graph:
                values = self._differentiable(problem, values, hyper)
                # New tensors with the same values, so partial derivatives do not go through the minimum.
                hyper = [leaf.view_as(leaf) for leaf in hyper]
            return self._estimate(problem, values, hyper)

    def _estimate(self, problem: Problem, values: Params, hyper: Sequence[Tensor]) -> Derivative:
        loss = problem.outer(values, hyper)
        if not loss.requires_grad:
            raise ValueError(f"{CALL}: outer_loss depends neither on params nor on hyper.")
        slopes, direct = partials(loss, values, hyper, create_graph=problem.create_graph)
        if self.is_zero:
            return Derivative(zeros_for_none(direct, hyper))
        H = _inner_hessian(problem, values, hyper)
        b = H.space.join(list(slopes.values()))
        solution = self.inverse(H, b)
        mixed = H.mixed(solution.value, hyper)
        gradient = [minus(a, b) for a, b in zip(direct, mixed, strict=True)]
        return Derivative(gradient, solution, relative_residual(solution, b))

    def _differentiable(self, problem: Problem, values: Params, hyper: Sequence[Tensor]) -> Params:
        """Return the parameters as a differentiable function of ``hyper``: a Newton step of length zero.

        The gradient is zero only at the minimum. Therefore its derivative is used, but not its value.
        """
        H = _inner_hessian(problem, values, hyper)
        undamped: ImplicitMethod = dataclasses.replace(self, damping=0.0)  # for any damping of u
        step = undamped.inverse(H, H.gradient.detach() - H.gradient)
        check_solution(CALL, step)
        point = H.space.split(H.space.join(list(values.values())) + step.value)
        return dict(zip(values, point, strict=True))


def relative_residual(solution: Solution, b: Tensor) -> float:
    """Return the largest residual of the rows, relative to their right-hand sides."""
    b = widened(b.detach())
    size = linalg.vector_norm(b, dim=-1).clamp_min(torch.finfo(b.dtype).tiny)
    return float((solution.stats.residual_norms / size).max()) if size.numel() else 0.0


def check_solution(call: str, solution: Solution, residual: float = 0.0, loose: float = LOOSE) -> None:
    """Raise if a solve found no solution. Warn if an iterative solve ended with a large residual.

    Raises:
        SolveError: The Hessian is not positive definite, the series diverged, or a product was not finite.
    """
    results = solution.stats.results
    for row, result in enumerate(results):
        if result not in APPROXIMATE:
            which = f", of task {row} of {len(results)}" if len(results) > 1 else ""
            reason = _NO_MINIMUM if result is Result.NEGATIVE_CURVATURE else result.value
            raise SolveError(f"{call}: the solve with the Hessian of the inner loss{which}: {reason}")
    if residual > loose and solution.result is not Result.PROGRESS:  # the result of the identity
        warn(
            f"{call}: the solve with the Hessian of the inner loss left a residual of {residual:.2g} of its "
            "right-hand side, so the derivative is as far from that of the minimum. Take more steps, a higher "
            "rank, or damping."
        )


def _inner_hessian(problem: Problem, values: Params, hyper: Sequence[Tensor]) -> HessianOperator:
    """Return the Hessian of the inner loss, which owns its graph."""
    loss = problem.inner(values, hyper)
    H = hessian(loss, problem.wrapped(values), create_graph=problem.create_graph)
    assert isinstance(H, HessianOperator)
    return H
