"""Newton's method within a trust region, by conjugate gradients and the Lanczos process on its boundary."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad.core.checks import is_integer
from metagrad.curvature.rows import dot, norm
from metagrad.optim.newton.krylov import Krylov, check_solver, conjugate_gradients
from metagrad.optim.newton.second_order import (
    GOOD,
    LEAST_FACTOR,
    MOST_FACTOR,
    POOR,
    Report,
    SecondOrder,
    StepProblem,
    no_report,
)
from metagrad.optim.newton.subproblems import minimize_in_ball
from metagrad.optim.rule import Hyperparameter, Params, functional_optimizer, hyperparameter, option
from metagrad.optim.torch_optim.newton_optimizer import NewtonOptimizer

_ON_BOUNDARY = 0.99


class TrustRegionState(NamedTuple):
    """The state of :class:`TrustRegionNewtonRule`; numbers are ``[]``, or ``[tasks]``.

    Attributes:
        step: Steps taken.
        factor: Of the radius: what the ratios of reduction have made of 1.
        report: What the last step did.
    """

    step: int
    factor: Tensor
    report: Report


@functional_optimizer
class TrustRegionNewtonRule(SecondOrder):
    r"""The functional form of Newton steps within a trust region.

    .. math::
        d_t \approx \operatorname*{argmin}_{|d| \le \Delta_t} \; m_t(d) = g_t^\top d + \tfrac{1}{2} d^\top H_t d,
        \qquad \rho_t = \frac{f(w_{t-1} + d_t) - f(w_{t-1})}{m_t(d_t)}

    by conjugate gradients. Where they leave the region, or meet negative curvature and follow it to the boundary, the
    model is minimised anew in the Krylov space of the gradient, on the boundary: the first crossing is often after
    two or three steps, and little better than gradient descent where curvatures differ much. The step is taken where
    :math:`\rho > \mathrm{accept}`; the radius :math:`\Delta` doubles where :math:`\rho > 3/4` and the step reaches
    the boundary, and where :math:`\rho < 1/4` becomes a quarter of the step.

    With a step size :math:`\eta`, ratio and step are those of :math:`\eta d`.

    Derivatives are those of the steps that conjugate gradients took, or of the minimum on the boundary, there right
    up to the third; ratios and factors are constants.

    Raises:
        ValueError: ``max_radius``, ``accept``, ``rtol``, ``progress``, ``max_steps`` or ``boundary_steps`` is out of
            its range.

    Example:
        The minimum at distance 5 is beyond the radius of 1, and the step ends on it:

        >>> from metagrad.optim.objective import TapeObjective
        >>> from metagrad.optim.newton.trust_region_newton import trust_region_newton
        >>> rule, params = trust_region_newton(), {"w": torch.zeros(2, requires_grad=True)}
        >>> objective = TapeObjective(lambda p: (p["w"] - torch.tensor([3.0, 4.0])).pow(2).sum(), params)
        >>> new, state = rule.update(objective.grads, rule.init(params), params, objective)
        >>> new["w"], float(state.factor)
        (tensor([0.6000, 0.8000], grad_fn=<AddBackward0>), 2.0)

    References:
        Steihaug, "The conjugate gradient method and trust regions in large scale optimization", SIAM J. Numer. Anal.
        20(3), 1983; Gould, Lucidi, Roma, Toint, "Solving the trust-region subproblem using the Lanczos method", SIAM
        J. Optim. 9(2), 1999; Nocedal, Wright, "Numerical optimization", 2006, algorithms 4.1 and 7.2.
    """

    _: KW_ONLY
    radius: Hyperparameter = hyperparameter(
        default=1.0,
        doc=r":math:`\Delta_0`, above 0. A schedule of it is multiplied by what the ratios have made of 1.",
    )
    max_radius: float = option(default=1e3, doc="The largest radius.")
    accept: float = option(default=1e-4, doc="The ratio above which a step is taken, below 1/4.")
    adapt: bool = option(
        default=True,
        doc="Look at the loss at the end of a step; else every step is taken and the radius stays.",
    )
    rtol: float = option(
        default=1e-10, doc="Conjugate gradients end at this residual, relative to the gradient."
    )
    progress: float | None = option(
        default=None,
        doc="They end when the model falls by less than this for each step (Martens' rule); None never does.",
    )
    max_steps: int = option(default=250, doc="The most steps of conjugate gradients.")
    boundary_steps: int = option(
        default=50,
        doc="The most steps of the Lanczos process on the boundary, which keeps a vector of each; with 0 the "
        "step ends where conjugate gradients leave the region (Steihaug).",
    )

    call, matrix, above_zero = "trust_region_newton(...)", "products", ("radius",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.max_radius > 0:
            raise ValueError(f"{self.call}: max_radius must be above 0, got {self.max_radius}.")
        if not 0 <= self.accept < POOR:
            raise ValueError(f"{self.call}: accept must be from 0 to below 1/4, got {self.accept}.")
        check_solver(self.call, self.rtol, self.progress, self.max_steps)
        if not is_integer(self.boundary_steps) or self.boundary_steps < 0:
            raise ValueError(f"{self.call}: boundary_steps must be at least 0, got {self.boundary_steps}.")

    def init(self, params: Params) -> Any:
        """Return the state before the first step."""
        factor = self.begun(params, 1.0)
        return TrustRegionState(0, factor, no_report(factor))

    def stepped(self, problem: StepProblem, state: TrustRegionState) -> tuple[Params, Any]:
        """Take the step to the minimum of the model in the region."""
        each = problem.space.each
        factor = each(state.factor)
        given = each(self.value("radius", state.step))
        radius = (factor * given).clamp(max=self.max_radius)
        run = self._minimum(problem, radius)
        slope = dot(problem.g, run.x)
        step = problem.step(run.x, 2 * (run.model - slope))
        ratio, length = None, torch.ones_like(radius)
        if self.adapt:
            ratio = problem.ratio(problem.after(step.d), step.predicted)
            length = (ratio > self.accept).to(radius)
            reach = norm(run.x)
            grows = (ratio > GOOD) & (reach > _ON_BOUNDARY * radius) & (2 * radius <= self.max_radius)
            # A poor step shorter than the radius shrinks it to a quarter of the step, for it to be felt at once.
            shrunk = 0.25 * torch.minimum(reach, radius) / given
            factor = torch.where(ratio < POOR, shrunk, torch.where(grows, 2 * factor, factor))
            factor = factor.clamp(LEAST_FACTOR, MOST_FACTOR)
        report = problem.report(run, ratio, length, products=problem.products_of_step)
        return problem.moved(step.times(length).d), TrustRegionState(
            state.step + 1, problem.for_task(factor), report
        )

    def _minimum(self, problem: StepProblem, radius: Tensor) -> Krylov:
        """Minimise the model in the region; where conjugate gradients leave it, in a Krylov space on its boundary."""
        run = conjugate_gradients(
            problem.products,
            -problem.g,
            radius=radius,
            rtol=self.rtol,
            progress=self.progress,
            max_steps=self.max_steps,
        )
        leaves = norm(run.x.detach()) > _ON_BOUNDARY * radius
        if not self.boundary_steps or not bool(leaves.any()):
            return run
        found = minimize_in_ball(
            problem.products, problem.g, radius, rtol=self.rtol, max_steps=self.boundary_steps
        )
        # Where the first crossing is as low, to rounding, it stays.
        lower = leaves & (found.model < run.model).detach()
        return run._replace(
            x=torch.where(lower[:, None], found.x, run.x),
            model=torch.where(lower, found.model, run.model),
            steps=torch.where(leaves, run.steps + found.steps, run.steps),
            products=run.products + found.products,
        )


trust_region_newton = TrustRegionNewtonRule


class TrustRegionNewton(NewtonOptimizer, rule=TrustRegionNewtonRule):
    r"""Optimize by Newton's method within a trust region, with conjugate gradients.

    .. math:: w_t = w_{t-1} + \operatorname*{argmin}_{|d| \le \Delta_t} \; g_t^\top d + \tfrac{1}{2} d^\top H_t d

    Raises:
        ValueError: As for :class:`NewtonCG`.
        TypeError: As for :class:`NewtonCG`.

    Example:
        >>> from metagrad.optim import TrustRegionNewton
        >>> w = torch.tensor([0.0, 0.0], requires_grad=True)
        >>> opt = TrustRegionNewton([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (w - torch.tensor([3.0, 4.0])).pow(2).sum()
        ...     loss.backward()
        ...     return loss
        >>> loss = opt.step(closure)
        >>> w.detach(), opt.stats["direction"], opt.stats["radius"]
        (tensor([0.6000, 0.8000]), 'boundary', 2.0)

    References:
        Steihaug, SIAM J. Numer. Anal. 20(3), 1983; Gould, Lucidi, Roma, Toint, SIAM J. Optim. 9(2), 1999.
    """

    adapted = "radius"
