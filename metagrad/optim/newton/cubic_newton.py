"""Newton's method with a cubic term in place of damping."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad.curvature.rows import dot, norm
from metagrad.optim.newton.krylov import check_solver
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
from metagrad.optim.newton.subproblems import minimize_cubic
from metagrad.optim.rule import Hyperparameter, Params, functional_optimizer, hyperparameter, option
from metagrad.optim.torch_optim.newton_optimizer import NewtonOptimizer

_SUFFICIENT = 1e-4


class CubicNewtonState(NamedTuple):
    """The state of :class:`CubicNewtonRule`; numbers are ``[]``, or ``[tasks]``.

    Attributes:
        step: Steps taken.
        factor: Of the cubic term: what the ratios of reduction have made of 1.
        report: What the last step did.
    """

    step: int
    factor: Tensor
    report: Report


@functional_optimizer
class CubicNewtonRule(SecondOrder):
    r"""The functional form of Newton's method with cubic regularisation.

    .. math::
        d_t = \operatorname*{argmin}_d \; g_t^\top d + \tfrac{1}{2} d^\top H_t d + \tfrac{M_t}{6} |d|^3, \qquad
        w_t = w_{t-1} + \eta \, d_t

    the least of all minima, in the Krylov space of the gradient. Where the Hessian changes by at most
    :math:`M |d|` over a step, the model bounds the loss from above, and every step descends, from saddle points too,
    unless the gradient has no part along the negative curvature. With ``adapt``, :math:`M` doubles where the
    ratio of the reduction of the loss by that of the model is below 1/4, and halves above 3/4 (between
    :math:`10^{-10}` and :math:`10^{10}` of where it began); a step is taken where the ratio is above :math:`10^{-4}`.

    Ratio and model are those of the step :math:`\eta d`.

    Derivatives go through the Lanczos process, and are right up to the third; factors are constants.

    Example:
        The model of :math:`w + w^2 / 2` with M = 2 is least at -0.618, where :math:`1 + d - d^2 = 0`:

        >>> from metagrad.optim.newton.cubic_newton import cubic_newton
        >>> from metagrad.optim.objective import TapeObjective
        >>> rule, params = cubic_newton(cubic=2.0, adapt=False), {"w": torch.zeros(1, requires_grad=True)}
        >>> objective = TapeObjective(lambda p: (p["w"] + p["w"] ** 2 / 2).sum(), params)
        >>> rule.update(objective.grads, rule.init(params), params, objective)[0]["w"].detach()
        tensor([-0.6180])

    References:
        Nesterov, Polyak, "Cubic regularization of Newton method and its global performance", Mathematical
        Programming 108, 2006, equations 2.4 and 2.5; Cartis, Gould, Toint, Mathematical Programming 127, 2011, for
        the adaptation and the Krylov space.
    """

    _: KW_ONLY
    cubic: Hyperparameter = hyperparameter(
        default=1.0,
        doc=":math:`M_0`, above 0: a bound of the Hessian's Lipschitz constant, or a first guess of it. A "
        "schedule of it is multiplied by what the ratios have made of 1.",
    )
    adapt: bool = option(
        default=True,
        doc="Look at the loss at the end of a step; else every step is taken and :math:`M` stays.",
    )
    rtol: float = option(
        default=1e-10,
        doc="The process ends when the gradient of the model is so small, relative to that of the loss.",
    )
    max_steps: int = option(
        default=50, doc="The most steps of the Lanczos process, which keeps a vector of each."
    )

    call, matrix, above_zero = "cubic_newton(...)", "products", ("cubic",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_solver(self.call, self.rtol, None, self.max_steps)

    def init(self, params: Params) -> Any:
        """Return the state before the first step."""
        factor = self.begun(params, 1.0)
        return CubicNewtonState(0, factor, no_report(factor))

    def stepped(self, problem: StepProblem, state: CubicNewtonState) -> tuple[Params, Any]:
        """Take the step to the minimum of the model."""
        each = problem.space.each
        factor = each(state.factor)
        cubic = factor * each(self.value("cubic", state.step))
        found = minimize_cubic(problem.products, problem.g, cubic, rtol=self.rtol, max_steps=self.max_steps)
        curved = 2 * (found.model - dot(problem.g, found.x) - cubic * norm(found.x) ** 3 / 6)
        step = problem.step(found.x, curved)
        ratio, length = None, torch.ones_like(factor)
        if self.adapt:
            predicted = step.predicted + cubic * norm(step.d) ** 3 / 6
            ratio = problem.ratio(problem.after(step.d), predicted)
            length = (ratio > _SUFFICIENT).to(factor)
            less = torch.where(ratio > GOOD, factor / 2, factor)
            factor = torch.where(ratio < POOR, 2 * factor, less).clamp(LEAST_FACTOR, MOST_FACTOR)
        products = found.products + problem.products_of_step
        report = problem.report(None, ratio, length, products=products)
        report = report._replace(steps=problem.for_task(found.steps))
        return problem.moved(step.times(length).d), CubicNewtonState(
            state.step + 1, problem.for_task(factor), report
        )


cubic_newton = CubicNewtonRule


class CubicNewton(NewtonOptimizer, rule=CubicNewtonRule):
    r"""Optimize by Newton's method with cubic regularisation.

    .. math:: w_t = w_{t-1} + \eta \operatorname*{argmin}_d \;
        g_t^\top d + \tfrac{1}{2} d^\top H_t d + \tfrac{M_t}{6} |d|^3

    Raises:
        ValueError: As for :class:`NewtonCG`.
        TypeError: As for :class:`NewtonCG`.

    Example:
        >>> from metagrad.optim import CubicNewton
        >>> w = torch.tensor([0.0, 0.1], requires_grad=True)
        >>> opt = CubicNewton([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = w[0] ** 2 - w[1] ** 2 + w[1] ** 4 / 2
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(15):
        ...     loss = opt.step(closure)
        >>> round(float(loss), 4)
        -0.5

    References:
        Nesterov, Polyak, Mathematical Programming 108, 2006.
    """

    adapted = "cubic"
