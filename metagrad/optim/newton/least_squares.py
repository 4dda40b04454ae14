"""Nonlinear least squares of residuals written by hand: Levenberg's and Marquardt's method, run to a minimum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from metagrad.curvature.likelihoods.output_losses import Gaussian
from metagrad.curvature.solvers.solution import SolveError
from metagrad.optim.hyperparameters import check_count
from metagrad.optim.newton.gauss_newton import GaussNewtonRule, gauss_newton
from metagrad.optim.objective import TapeObjective
from metagrad.optim.rule import Params
from metagrad.optim.tape_curvature import WeightedLoss

P = TypeVar("P", Tensor, dict[str, Tensor])

_AGREES = 0.25  # a ratio of reductions below which the length of a step says nothing about a minimum


class LeastSquaresResult(Enum):
    """How a fit ended; the value of each member is a sentence for the user.

    Example:
        >>> from metagrad.optim.newton.least_squares import LeastSquaresResult
        >>> LeastSquaresResult.GRADIENT.value, LeastSquaresResult.MAX_STEPS.is_success
        ('The gradient is within gtol.', False)
    """

    GRADIENT = "The gradient is within gtol."
    LOSS = "The last step lowered the loss by less than ftol, relative to it."
    STEP = "The last step was shorter than xtol, relative to the parameters."
    MAX_STEPS = "max_steps was reached before a tolerance. Allow more steps or larger tolerances."
    NO_DESCENT = (
        "The last direction did not lower the loss at any length: rounding errors dominate, or the residuals are "
        "not differentiable there. Use float64 or larger tolerances."
    )
    NON_FINITE = (
        "The residuals or their derivatives at the first parameters have NaN or inf. Begin elsewhere, or look for "
        "them in residual_fn."
    )

    @property
    def is_success(self) -> bool:
        """Whether a tolerance was met."""
        return self in (LeastSquaresResult.GRADIENT, LeastSquaresResult.LOSS, LeastSquaresResult.STEP)


@dataclass(frozen=True)
class LeastSquaresStats:
    """What a fit came to and cost.

    Attributes:
        loss: Half the sum of the squared residuals at the end.
        gradient: The largest absolute element of its gradient.
        steps: Steps taken.
        products: Products with the Gauss-Newton matrix in all.
    """

    loss: float
    gradient: float
    steps: int
    products: int


@dataclass(frozen=True, eq=False)
class LeastSquares(Generic[P]):
    """What :func:`least_squares` returns.

    Attributes:
        value: The parameters at the end, in the form that they were given in, without a graph.
        result: How it ended.
        stats: What it came to and cost.
    """

    value: P
    result: LeastSquaresResult
    stats: LeastSquaresStats

    def __repr__(self) -> str:
        stats = self.stats
        return f"LeastSquares({self.result.name}: loss {stats.loss:.3g} after {stats.steps} steps)"


def least_squares(
    residual_fn: Callable[[P], Tensor],
    params: P,
    *,
    rule: GaussNewtonRule | None = None,
    max_steps: int = 100,
    ftol: float = 1e-8,
    xtol: float = 1e-8,
    gtol: float = 1e-8,
    throw: bool = False,
) -> LeastSquares[P]:
    r"""Minimise half the sum of squared residuals, by Levenberg's and Marquardt's method.

    .. math:: \min_w \; f(w) = \tfrac{1}{2} \sum_i r_i(w)^2

    by the steps of :func:`~metagrad.optim.newton.gauss_newton.gauss_newton`, whose systems are solved by conjugate
    gradients: residuals and parameters may be many, and no Jacobian is ever formed. Tolerances are those of
    ``scipy.optimize.least_squares``, and none is taken below the precision of the dtype.

    There are no bounds and no robust losses. The value has no graph: for its derivative with respect to what the
    residuals depend on, see :func:`metagrad.hypergradient`. Very different scales of parameters ask for a
    preconditioner, ``rule=gauss_newton(preconditioner="diagonal", progress=None)``.

    Args:
        residual_fn: Parameters, in the form of ``params``, to residuals of any shape; deterministic.
        params: Where to begin: a tensor, or a dict of tensors by name, of one dtype and device.
        rule: Whose steps to take; ``gauss_newton(progress=None)`` if None.
        max_steps: The most steps.
        ftol: Stop when a step lowers the loss by less than this, relative to the loss, and its model agrees.
        xtol: Stop when a step is shorter than this, relative to the norm of the parameters, and its model agrees.
        gtol: Stop when no element of the gradient is larger.
        throw: Raise an exception where no tolerance was met.

    Returns:
        The parameters, how it ended, and what it cost.

    Raises:
        ValueError: ``max_steps`` or a tolerance is out of its range, or residuals do not depend on the parameters.
        TypeError: Residuals are no real tensor, or a parameter is complex.
        SolveError: With ``throw``, no tolerance was met.

    Example:
        :math:`y = 2 e^{-x}`, from elsewhere:

        >>> from metagrad.optim.newton.least_squares import least_squares
        >>> x = torch.linspace(0, 2, 9, dtype=torch.float64)
        >>> fit = least_squares(
        ...     lambda w: w["scale"] * torch.exp(w["rate"] * x) - 2 * torch.exp(-x),
        ...     {"scale": torch.ones((), dtype=x.dtype), "rate": torch.zeros((), dtype=x.dtype)},
        ... )
        >>> fit.result.is_success, round(float(fit.value["scale"]), 6), round(float(fit.value["rate"]), 6)
        (True, 2.0, -1.0)

    References:
        Marquardt, "An algorithm for least-squares estimation of nonlinear parameters", J. SIAM 11(2), 1963; Nocedal,
        Wright, "Numerical optimization", 2006, section 10.3.
    """
    _check(max_steps, ftol=ftol, xtol=xtol, gtol=gtol)
    rule = gauss_newton(progress=None) if rule is None else rule
    given: Params = {"params": params} if isinstance(params, Tensor) else dict(params)

    def residuals(values: Params) -> Tensor:
        return _checked(residual_fn(cast(P, values["params"] if isinstance(params, Tensor) else values)))

    values, result, stats = _run(rule, residuals, given, max_steps, ftol, xtol, gtol)
    if throw and not result.is_success:
        raise SolveError(
            f"least_squares, after {stats.steps} steps at a loss of {stats.loss:.3g}: {result.value}"
        )
    return LeastSquares(cast(P, values["params"] if isinstance(params, Tensor) else values), result, stats)


def _run(
    rule: GaussNewtonRule,
    residuals: Callable[[Params], Tensor],
    values: Params,
    max_steps: int,
    ftol: float,
    xtol: float,
    gtol: float,
) -> tuple[Params, LeastSquaresResult, LeastSquaresStats]:
    state, products, before, step = rule.init(values), 0, None, 0
    while True:
        objective, values = _objective(residuals, values)
        loss, gradient = float(objective.value), _largest(objective.grads)
        result = _ending(state.report, values, before, loss, gradient, ftol, xtol, gtol)
        if result is None and step == max_steps:
            result = LeastSquaresResult.MAX_STEPS
        if result is not None:
            break
        before = (loss, values)
        with torch.no_grad():
            values, state = rule.update(objective.grads, state, values, objective)
        products += int(state.report.products)
        step += 1
    values = {key: value.detach() for key, value in values.items()}
    return values, result, LeastSquaresStats(loss, gradient, step, products)


def _objective(residuals: Callable[[Params], Tensor], values: Params) -> tuple[TapeObjective, Params]:
    variables = {key: value.detach().clone().requires_grad_() for key, value in values.items()}

    def loss(values: Params) -> tuple[Tensor, list[WeightedLoss]]:
        r = residuals(values).reshape(-1)
        one = r.new_ones(())
        return (r * r).sum() / 2, [WeightedLoss(Gaussian(r, one, one), one)]

    return TapeObjective(loss, variables), variables


def _ending(
    report: Any,
    values: Params,
    before: tuple[float, Params] | None,
    loss: float,
    gradient: float,
    ftol: float,
    xtol: float,
    gtol: float,
) -> LeastSquaresResult | None:
    """Say how a fit ends after a step, None where it goes on; conditions are SciPy's."""
    if not (torch.tensor([loss, gradient]).isfinite().all()):
        return LeastSquaresResult.NON_FINITE
    if gradient <= gtol:
        return LeastSquaresResult.GRADIENT
    if before is None:
        return None
    if float(report.length) == 0:
        return LeastSquaresResult.NO_DESCENT
    old_loss, old = before
    eps = torch.finfo(next(iter(values.values())).dtype).eps
    agrees = not float(report.ratio) <= _AGREES
    if agrees and old_loss - loss < max(ftol, eps) * old_loss:
        return LeastSquaresResult.LOSS
    xtol = max(xtol, eps)
    if agrees and _distance(values, old) < xtol * (xtol + _distance(values)):
        return LeastSquaresResult.STEP
    return None


def _largest(tensors: Params) -> float:
    return max(float(t.abs().max()) if t.numel() else 0.0 for t in tensors.values())


def _distance(one: Params, other: Params | None = None) -> float:
    squares = [(p - other[key] if other else p).detach().pow(2).sum() for key, p in one.items()]
    return float(torch.stack(squares).sum().sqrt())


def _checked(residuals: object) -> Tensor:
    if not isinstance(residuals, Tensor) or not residuals.is_floating_point():
        found = residuals.dtype if isinstance(residuals, Tensor) else type(residuals).__name__
        raise TypeError(
            f"least_squares: residual_fn must return a real floating point tensor of residuals, got {found}."
        )
    if torch.is_grad_enabled() and not residuals.requires_grad:
        raise ValueError(
            "least_squares: the residuals do not depend on the parameters that residual_fn was given. Compute them "
            "of these, by torch operations, without detach() or numpy."
        )
    return residuals


def _check(max_steps: int, **tolerances: float) -> None:
    check_count("least_squares", "max_steps", max_steps)
    for name, tolerance in tolerances.items():
        if not tolerance >= 0:
            raise ValueError(f"least_squares: {name} must be at least 0, got {tolerance}.")
