"""Natural gradient descent: the gradient in the metric of the Fisher matrix, by conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.optim.rules.flat import divide, dot
from metagrad.optim.rules.newton_system import Memory, NewtonSystem
from metagrad.optim.rules.rule import Hyperparameter, Params
from metagrad.optim.rules.second_order import Problem, Report, no_report


class NaturalGradientState(NamedTuple):
    """What :class:`NaturalGradient` carries from step to step."""

    step: int  # steps taken
    solution: Params  # of the last system, in the shapes of the parameters: where the next one begins
    moves: Params | None  # search directions of its solve, [tasks, pairs, ...]; None if each step solves
    changes: Params | None  # their products with its matrix, likewise
    report: Report  # what the last step did

    @property
    def memory(self) -> Memory:
        """What is remembered of the last system."""
        return Memory(self.solution, self.moves, self.changes)


@dataclass(frozen=True, eq=False)
class NaturalGradient(NewtonSystem):
    """The rule that :func:`natural_gradient` makes."""

    lr: Hyperparameter = 1.0
    damping: Hyperparameter = 1e-3
    max_divergence: Hyperparameter | None = None
    warm_start: Hyperparameter = 0.0
    rtol: float = 1e-10
    progress: float | None = 5e-4
    max_steps: int = 250
    curvature_every: int = 1
    pairs: int = 16
    preconditioner: Literal["diagonal"] | None = None
    exponent: Hyperparameter = 0.75
    samples: int = 8
    maximize: bool = False
    batch_ndim: int = 0

    call, hyper = "natural_gradient(...)", ("lr", "damping", "max_divergence", "warm_start", "exponent")
    above_zero, diagonal = ("max_divergence",), "gauss_newton"

    def init(self, params: Params) -> Any:
        """Return the state before the first step."""
        return NaturalGradientState(0, *self.no_memory(params), no_report(self.begun(params)))

    def update(
        self, grads: Params, state: NaturalGradientState, params: Params, curvature: object | None = None
    ) -> tuple[Params, Any]:
        """Take one step; ``curvature`` has ``fisher_products``."""
        if not params:
            return {}, state._replace(step=state.step + 1)
        if self.multiplies(state.step):
            return self._solved_step(self.problem(grads, params, curvature, "fisher_products"), state)
        return self._recalled_step(self.problem(grads, params, curvature, None), state)

    def _solved_step(self, problem: Problem, state: NaturalGradientState) -> tuple[Params, Any]:
        # The Fisher matrix is a metric: it has no other sign where one climbs.
        multiply = problem.space.multiplied(problem.objective.fisher_products)
        damping = problem.space.each(self.value("damping", state.step))
        run, memory = self.solved(problem, multiply, damping, state.step, state.memory)
        xx = dot(run.x, run.x)
        squared = 2 * (run.model - dot(problem.g, run.x)) - damping * xx  # x^T F x
        length = self._bounded(problem, squared, state.step)
        report = problem.report(run, None, length)
        return problem.moved(length[:, None] * run.x), NaturalGradientState(state.step + 1, *memory, report)

    def _recalled_step(self, problem: Problem, state: NaturalGradientState) -> tuple[Params, Any]:
        d = self.recalled(problem, state.memory)
        # With the matrix of BFGS, this is its d^T (F + damping I) d: a stricter bound, by the damping.
        length = self._bounded(problem, -dot(problem.g, d), state.step)
        report = problem.report(None, None, length)
        return problem.moved(length[:, None] * d), state._replace(step=state.step + 1, report=report)

    def _bounded(self, problem: Problem, squared: Tensor, step: int) -> Tensor:
        """Return the step size, or that at which a direction of so large a square reaches the bound."""
        each = problem.space.each
        length = each(self.value("lr", step))
        if self.max_divergence is None:
            return length
        moves = squared > 0
        bound = divide(2 * each(self.value("max_divergence", step)), squared, where=moves)
        return torch.where(moves & (bound < length**2), torch.where(moves, bound, 1.0).sqrt(), length)


def natural_gradient(
    lr: Hyperparameter = 1.0,
    *,
    damping: Hyperparameter = 1e-3,
    max_divergence: Hyperparameter | None = None,
    warm_start: Hyperparameter = 0.0,
    rtol: float = 1e-10,
    progress: float | None = 5e-4,
    max_steps: int = 250,
    curvature_every: int = 1,
    pairs: int = 16,
    preconditioner: Literal["diagonal"] | None = None,
    exponent: Hyperparameter = 0.75,
    samples: int = 8,
    maximize: bool = False,
) -> NaturalGradient:
    r"""Make the rule of natural gradient descent.

    .. math::
        (F_t + \lambda I) \, d_t \approx -g_t, \qquad
        w_t = w_{t-1} + \min\Bigl(\eta, \sqrt{2 \delta / d_t^\top F_t d_t}\Bigr) \, d_t

    with the Fisher matrix :math:`F = \sum_n s_n \, \mathbb{E}_{y \sim p(y | x_n)} \nabla\ell_n \nabla\ell_n^\top`,
    exact, of the likelihood that the loss is the negative logarithm of. For losses that are means, the bound
    :math:`\delta` is one of the Kullback-Leibler divergence of what the model predicts, to second order. The step
    does not look at the loss again.

    With ``curvature_every`` above 1, the steps between two solves multiply with nothing. Their directions are by the
    limited-memory BFGS matrix of pairs :math:`p_i, (F + \lambda I) p_i` that the last solve went through. Their
    bound is one of :math:`d^\top (F + \lambda I) d / 2`, as this matrix knows it.

    Derivatives are those of :func:`~metagrad.optim.rules.newton_cg.newton_cg`.

    Args:
        lr: The step size :math:`\eta`, in the forms of :data:`Hyperparameter` without the dict; may require grad, as
            may the next three and ``exponent``.
        damping: :math:`\lambda`.
        max_divergence: :math:`\delta`; None bounds nothing.
        warm_start: Conjugate gradients begin at so much of their last solution; 0 begins at 0.
        rtol: Conjugate gradients end at this residual, relative to the gradient.
        progress: They end when the model falls by less than this for each step (Martens' rule); None never does.
        max_steps: The most steps of conjugate gradients.
        curvature_every: Steps from one solve to the next; the first step makes one.
        pairs: How many pairs of a solve are kept for the steps up to the next, evenly over its steps; one of them is
            as large as the parameters twice.
        preconditioner: As for :func:`~metagrad.optim.rules.gauss_newton.gauss_newton`.
        exponent: Its :math:`\alpha`.
        samples: How many draws of the labels the estimate of the diagonal is the mean of.
        maximize: Climb; the metric is the same.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params, curvature)``; ``state.report`` says
        what the step did.

    Raises:
        ValueError: As for :func:`~metagrad.optim.rules.gauss_newton.gauss_newton`.
        TypeError: In ``update``, the curvature has no ``fisher_products``; else as there.

    Example:
        The logit :math:`w` of a coin that showed heads: :math:`g = p - 1`, :math:`F = p (1 - p)`.

        >>> from types import SimpleNamespace
        >>> from metagrad.optim.rules.natural_gradient import natural_gradient
        >>> coin = SimpleNamespace(fisher_products=lambda v: {"w": 0.25 * v["w"]})
        >>> rule, params = natural_gradient(lr=0.5, damping=0.0), {"w": torch.zeros(1)}
        >>> rule.update({"w": torch.tensor([-0.5])}, rule.init(params), params, coin)[0]
        {'w': tensor([1.])}

    References:
        Amari, "Natural gradient works efficiently in learning", Neural Computation 10(2), 1998; Martens, "New
        insights and perspectives on the natural gradient method", JMLR 21, 2020, sections 5 and 6; Morales, Nocedal,
        "Automatic preconditioning by limited memory quasi-Newton updating", SIAM J. Optim. 10(4), 2000.
    """
    return NaturalGradient(
        lr=lr,
        damping=damping,
        max_divergence=max_divergence,
        warm_start=warm_start,
        rtol=rtol,
        progress=progress,
        max_steps=max_steps,
        curvature_every=curvature_every,
        pairs=pairs,
        preconditioner=preconditioner,
        exponent=exponent,
        samples=samples,
        maximize=maximize,
    )
