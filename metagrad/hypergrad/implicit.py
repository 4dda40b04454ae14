r"""Derivatives of a minimum by the implicit function theorem, with some inverse of the Hessian.

At :math:`\phi^*(\lambda) = \arg\min_\phi g(\phi, \lambda)` the gradient of g is zero for every :math:`\lambda`, hence

.. math::
    \frac{d}{d\lambda} f(\phi^*(\lambda), \lambda) = \nabla_\lambda f
        - \frac{\partial^2 g}{\partial\lambda \, \partial\phi} \, u, \qquad
    \frac{\partial^2 g}{\partial\phi^2} \, u = \nabla_\phi f.

Methods differ in how they find u.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from metagrad.autograd.derivatives.variables import (
    Variable,
    coordinates,
    find_variables,
    grouped,
    inputs_of,
)
from metagrad.core._torch import gradients_or_none, linalg
from metagrad.core.checks import warn
from metagrad.core.tree import widened, zeros_for_none
from metagrad.curvature.linear_map import LinearMap
from metagrad.curvature.operators.hessian import HessianOperator, hessian
from metagrad.curvature.operators.space import Coordinates
from metagrad.curvature.solvers.solution import Result, Solution, SolveError
from metagrad.hypergrad.problem import CALL, CREATE, Derivative, Problem, minus
from metagrad.optim.rule import Params

LOOSE = 1e-2
"""Residuals above this, relative to the right-hand side, are warned of."""

_NO_MINIMUM = (
    "It is not positive definite, so the parameters are at no minimum. Take more inner steps, give the inner loss a "
    "larger penalty, such as a proximal term, or give the method damping, as in CG(damping=1.0)."
)

_APPROXIMATE = (Result.CONVERGED, Result.PROGRESS, Result.MAX_STEPS, Result.STAGNATED)


@dataclass(frozen=True)
class ImplicitMethod:
    """A method that is an inverse of the Hessian of the inner loss; :func:`attach` takes it too.

    Attributes:
        is_exact: Whether it solves the system but for its ``damping``, so that the derivative may be differentiated.
    """

    is_exact: ClassVar[bool] = False

    @property
    def is_zero(self) -> bool:
        """Whether u is zero: the minimum is treated as a constant."""
        return False

    def inverse(self, operator: LinearMap, b: Tensor) -> Solution:
        """Solve for rows, with the Hessian; with gradients enabled, on the tape if the products are.

        Args:
            operator: The Hessian; or those of k tasks, as ``num_matrices`` says.
            b: A right-hand side ``[n]``, or one for each task, ``[k, n]``.
        """
        raise NotImplementedError

    def estimate(self, problem: Problem) -> Derivative:
        """Derivative the derivative at the parameters of the problem."""
        if problem.create_graph and not self.is_exact:
            raise ValueError(
                f"{CREATE}: {type(self).__name__} approximates the derivative, and what it leaves out has a "
                "derivative too. Take CG, Exact or Unroll."
            )
        with torch.enable_grad():
            values, hyper = problem.variables(), problem.hyper_leaves()
            if problem.create_graph:
                values = self._on_the_tape(problem, values, hyper)
                # Others of the same numbers: partial derivatives do not go through the minimum.
                hyper = [leaf.view_as(leaf) for leaf in hyper]
            return self._estimate(problem, values, hyper)

    def _estimate(self, problem: Problem, values: Params, hyper: Sequence[Tensor]) -> Derivative:
        variables, slopes, direct = _outer_gradients(problem, values, hyper)
        if self.is_zero:
            return Derivative(zeros_for_none(direct, hyper))
        with _inner_hessian(problem, values, hyper) as H:
            pairs = zip(H.space.entries, variables, slopes, strict=True)
            b = H.space.join([_at_entry(entry, variable, slope) for entry, variable, slope in pairs])
            solution = self.inverse(H, b)
            mixed = H.mixed(solution.value, hyper)
        gradient = [minus(a, b) for a, b in zip(direct, mixed, strict=True)]
        return Derivative(gradient, solution, relative_residual(solution, b))

    def _on_the_tape(self, problem: Problem, values: Params, hyper: Sequence[Tensor]) -> Params:
        """Return the parameters with their dependence on ``hyper``: a step of Newton's method, of no length.

        The gradient, which is zero at the minimum alone, gives its derivative without its value.
        """
        with _inner_hessian(problem, values, hyper) as H:
            if any(entry.table is not None for entry in H.space.entries):
                raise ValueError(
                    f"{CREATE}: tables that are taken by rows are constants of the derivative. Leave them out of "
                    "sparse, or use embeddings without sparse gradients."
                )
            undamped: ImplicitMethod = dataclasses.replace(self, damping=0.0)  # however damped u is
            step = undamped.inverse(H, H.gradient.detach() - H.gradient)
            check_solution(CALL, step)
            point = H.space.split(H.space.join(list(values.values())) + step.value)
        return dict(zip(values, point, strict=True))


def relative_residual(solution: Solution, b: Tensor) -> float:
    """Return the largest residual among those of the rows, relative to their right-hand sides."""
    b = widened(b.detach())
    size = linalg.vector_norm(b, dim=-1).clamp_min(torch.finfo(b.dtype).tiny)
    return float((solution.stats.residual_norms / size).max()) if size.numel() else 0.0


def check_solution(call: str, solution: Solution, residual: float = 0.0, loose: float = LOOSE) -> None:
    """Raise where a solve found no solution, and warn where it was to find one and is far from it.

    Raises:
        SolveError: The Hessian is not positive definite, the series diverged, or a product was not finite.
    """
    results = solution.stats.results
    for row, result in enumerate(results):
        if result not in _APPROXIMATE:
            which = f", of task {row} of {len(results)}" if len(results) > 1 else ""
            reason = _NO_MINIMUM if result is Result.NEGATIVE_CURVATURE else result.value
            raise SolveError(f"{call}: the solve with the Hessian of the inner loss{which}: {reason}")
    if residual > loose and solution.result is not Result.PROGRESS:  # which is the identity's, and no solve
        warn(
            f"{call}: the solve with the Hessian of the inner loss left a residual of {residual:.2g} of its "
            "right-hand side, so the derivative is as far from that of the minimum. Take more steps, a higher "
            "rank, or damping."
        )


@contextlib.contextmanager
def _inner_hessian(problem: Problem, values: Params, hyper: Sequence[Tensor]) -> Generator[HessianOperator]:
    """Open the Hessian of the inner loss; what is put on the tape keeps its graph."""
    H = hessian(
        problem.inner(values, hyper),
        problem.wrapped(values),
        sparse=problem.sparse,
        create_graph=problem.create_graph,
    )
    assert isinstance(H, HessianOperator)
    try:
        yield H
    finally:
        if not problem.create_graph:
            H.close()


def _outer_gradients(
    problem: Problem, values: Params, hyper: Sequence[Tensor]
) -> tuple[list[Variable], list[Tensor], list[Tensor | None]]:
    """Differentiate the outer loss; of tables it finds the rows that this looks up."""
    loss = problem.outer(values, hyper)
    if not loss.requires_grad:
        raise ValueError(f"{CALL}: outer_loss depends neither on params nor on hyper.")
    variables = find_variables(CALL, loss, problem.wrapped(values), problem.sparse)
    inputs = inputs_of(variables)
    found = gradients_or_none(loss, [*inputs, *hyper], create_graph=problem.create_graph, allow_unused=True)
    slopes = coordinates(variables, grouped(variables, found[: len(inputs)]))
    return variables, slopes, list(found[len(inputs) :])


def _at_entry(entry: Coordinates, variable: Variable, slope: Tensor) -> Tensor:
    """Return a gradient in the coordinates of the inner loss.

    Rows of a table that it does not look up do not depend on ``hyper``, so the gradient of the outer loss in them is
    dropped.
    """
    own = None if variable.lookups is None else variable.lookups.table.rows
    if entry.rows is None:
        return slope if own is None else slope.new_zeros(entry.shape).index_copy(0, own, slope)
    if own is None:
        return slope.index_select(0, entry.rows)
    if not len(own):
        return slope.new_zeros(entry.shape)
    place = torch.searchsorted(own, entry.rows).clamp_(max=len(own) - 1)
    known = (own[place] == entry.rows).view(-1, *[1] * (slope.ndim - 1))
    return torch.where(known, slope.index_select(0, place), 0.0)
