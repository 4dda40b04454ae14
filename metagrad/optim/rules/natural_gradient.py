"""Natural gradient descent: the gradient in the metric of the Fisher matrix, by conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from metagrad.optim.rules.damped import check_solver
from metagrad.optim.rules.flat import divide, dot
from metagrad.optim.rules.hyperparameters import is_used
from metagrad.optim.rules.krylov import conjugate_gradients
from metagrad.optim.rules.rule import Hyperparameter, Params
from metagrad.optim.rules.second_order import Report, SecondOrder, no_report


class NaturalGradientState(NamedTuple):
    """What :class:`NaturalGradient` carries from step to step."""

    step: int  # steps taken
    solution: Params  # of the last system, in the shapes of the parameters: where the next one begins
    report: Report  # what the last step did


@dataclass(frozen=True, eq=False)
class NaturalGradient(SecondOrder):
    """The rule that :func:`natural_gradient` makes."""

    lr: Hyperparameter = 1.0
    damping: Hyperparameter = 1e-3
    max_divergence: Hyperparameter | None = None
    warm_start: Hyperparameter = 0.0
    rtol: float = 1e-10
    progress: float | None = 5e-4
    max_steps: int = 250
    maximize: bool = False
    batch_ndim: int = 0

    call, hyper = "natural_gradient(...)", ("lr", "damping", "max_divergence", "warm_start")
    above_zero = ("max_divergence",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_solver(self.call, self.rtol, self.progress, self.max_steps)

    def init(self, params: Params) -> Any:
        """Return the state before the first step."""
        number = self.begun(params)
        zeros = {key: torch.zeros_like(p) for key, p in params.items()}
        return NaturalGradientState(0, zeros, no_report(number))

    def update(
        self, grads: Params, state: NaturalGradientState, params: Params, curvature: object | None = None
    ) -> tuple[Params, Any]:
        """Take one step; ``curvature`` has ``fisher_products``."""
        if not params:
            return {}, state._replace(step=state.step + 1)
        problem = self.problem(grads, params, curvature, "fisher_products")
        space, each = problem.space, problem.space.each
        # The Fisher matrix is a metric: it has no other sign where one climbs.
        multiply = space.multiplied(curvature.fisher_products)  # type: ignore[union-attr]
        damping, decay = each(self.value("damping", state.step)), self.value("warm_start", state.step)
        warm = state.step > 0 and is_used(decay)
        run = conjugate_gradients(
            lambda rows: multiply(rows) + damping[:, None] * rows,
            -problem.g,
            x0=each(decay)[:, None] * space.rows(state.solution) if warm else None,
            rtol=self.rtol,
            progress=self.progress,
            max_steps=self.max_steps,
        )
        length = each(self.value("lr", state.step))
        if self.max_divergence is not None:
            xx = dot(run.x, run.x)
            squared = 2 * (run.model - dot(problem.g, run.x)) - damping * xx  # x^T F x
            moves = squared > 0
            bound = divide(2 * each(self.value("max_divergence", state.step)), squared, where=moves)
            length = torch.where(moves & (bound < length**2), torch.where(moves, bound, 1.0).sqrt(), length)
        return problem.moved(length[:, None] * run.x), NaturalGradientState(
            state.step + 1, space.tensors(run.x), problem.report(run, None, length)
        )


def natural_gradient(
    lr: Hyperparameter = 1.0,
    *,
    damping: Hyperparameter = 1e-3,
    max_divergence: Hyperparameter | None = None,
    warm_start: Hyperparameter = 0.0,
    rtol: float = 1e-10,
    progress: float | None = 5e-4,
    max_steps: int = 250,
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

    Derivatives are those of :func:`~metagrad.optim.rules.newton_cg.newton_cg`.

    Args:
        lr: The step size :math:`\eta`, in the forms of :data:`Hyperparameter` without the dict; may require grad, as
            may the next three.
        damping: :math:`\lambda`.
        max_divergence: :math:`\delta`; None bounds nothing.
        warm_start: Conjugate gradients begin at so much of their last solution; 0 begins at 0.
        rtol: Conjugate gradients end at this residual, relative to the gradient.
        progress: They end when the model falls by less than this for each step (Martens' rule); None never does.
        max_steps: The most steps of conjugate gradients.
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
        insights and perspectives on the natural gradient method", JMLR 21, 2020, sections 5 and 6.
    """
    return NaturalGradient(
        lr=lr,
        damping=damping,
        max_divergence=max_divergence,
        warm_start=warm_start,
        rtol=rtol,
        progress=progress,
        max_steps=max_steps,
        maximize=maximize,
    )
