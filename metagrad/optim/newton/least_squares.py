"""Nonlinear least squares of residuals written by hand: Levenberg's and Marquardt's method, run to a minimum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from metagrad.core._torch import backward, linalg
from metagrad.core.checks import check_count, check_number, check_type, is_mapping
from metagrad.curvature.solvers.solution import SolveError
from metagrad.optim.newton.gauss_newton import GaussNewton
from metagrad.optim.newton.vector import flat

P = TypeVar("P", Tensor, dict[str, Tensor])

_AGREES = 0.25  # below this ratio of reductions, a short step does not indicate a minimum


class LeastSquaresResult(Enum):
    """The reason why a fit ended. The value of each member is a sentence for the user.

    Example:
        >>> from metagrad.optim import LeastSquaresResult
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


@dataclass(frozen=True, eq=False)
class LeastSquares(Generic[P]):
    """The result of :func:`least_squares`.

    Attributes:
        value: The final parameters, in the form of the initial parameters, without a graph.
        result: The reason why the fit ended.
        loss: Half the final sum of squared residuals.
        gradient: The largest absolute element of its gradient.
        steps: Steps taken.
        products: Total number of products with the Gauss-Newton matrix.
    """

    value: P
    result: LeastSquaresResult
    loss: float
    gradient: float
    steps: int
    products: int

    def __repr__(self) -> str:
        return f"LeastSquares({self.result.name}: loss {self.loss:.3g} after {self.steps} steps)"


class _Point(NamedTuple):
    """The parameters at the beginning of a step, as a vector, with the loss and the largest slope there."""

    at: Tensor
    loss: float
    gradient: float


class _Fit(GaussNewton):
    """Gauss-Newton steps that end before a step if the last one met a tolerance."""

    limits: tuple[float, float, float, int]  # ftol, xtol, gtol and max_steps
    point: _Point | None = None
    products = 0
    result: LeastSquaresResult | None = None

    def _move(self) -> None:
        params = self._all_params()
        slopes = flat([params[0].new_zeros(1), *(p.grad for p in params if p.grad is not None)]).abs()
        loss = float(self._losses[-1])  # what the closure returned
        before, self.point = self.point, _Point(flat(params), loss, float(slopes.max()))
        self.result = self._ending(before, self.point)
        if self.result is None:
            super()._move()
            self.products += self.stats.get("products", 0)
        if self.stats["skipped"]:
            self.result = LeastSquaresResult.NON_FINITE

    def _ending(self, before: _Point | None, now: _Point) -> LeastSquaresResult | None:
        """Return how a fit ends before a step, or None if it continues. The conditions are the same as in SciPy."""
        ftol, xtol, gtol, max_steps = self.limits
        if not math.isfinite(now.loss + now.gradient):
            return LeastSquaresResult.NON_FINITE
        if now.gradient <= gtol:
            return LeastSquaresResult.GRADIENT
        if before is None:
            return None
        if self.stats["length"] == 0:
            return LeastSquaresResult.NO_DESCENT
        eps = torch.finfo(now.at.dtype).eps
        agrees = not self.stats["ratio"] <= _AGREES
        if agrees and before.loss - now.loss < max(ftol, eps) * before.loss:
            return LeastSquaresResult.LOSS
        xtol = max(xtol, eps)
        size, moved = (float(linalg.vector_norm(v)) for v in (now.at, now.at - before.at))
        if agrees and moved < xtol * (xtol + size):
            return LeastSquaresResult.STEP
        return LeastSquaresResult.MAX_STEPS if self.param_groups[0]["step"] == max_steps else None


_Fit.__name__ = "least_squares"  # in errors


def least_squares(
    residual_fn: Callable[[P], Tensor] | Mapping[str, tuple[Any, ...]],
    params: P,
    *,
    max_steps: int = 100,
    ftol: float = 1e-8,
    xtol: float = 1e-8,
    gtol: float = 1e-8,
    throw: bool = False,
    **options: Any,
) -> LeastSquares[P]:
    r"""Minimize half the sum of squared residuals, by Levenberg's and Marquardt's method.

    .. math:: \min_w \; f(w) = \tfrac{1}{2} \sum_i r_i(w)^2

    by the steps of :class:`GaussNewton`. Systems of few residuals or parameters are factorized. Larger systems are
    solved by conjugate gradients, without a Jacobian in memory. Tolerances mean the same as in
    ``scipy.optimize.least_squares``. A tolerance below the precision of the dtype is replaced by that precision.

    There are no bounds and no robust losses. The result has no graph. For derivatives with respect to other inputs of
    the residuals, see :func:`metagrad.hypergradient`.

    Args:
        residual_fn: Deterministic function of parameters, in the form of ``params``, to residuals of any shape. It
            may also be a dict of terms by name, ``{"equation": (fn, points), "boundary": (fn, points)}``, where
            ``fn(params, point)`` returns the residuals of one point, as for :meth:`GaussNewton.residuals`. Rows of
            the Jacobian are then cheap, and systems are factorized up to 5,000 residuals or parameters.
        params: Initial parameters: a tensor, or a dict of tensors by name, of one dtype and device.
        max_steps: Maximum number of steps.
        ftol: Stop when a step reduces the loss by less than this, relative to the loss, and the quadratic model
            predicted the reduction well.
        xtol: Stop when a step is shorter than this, relative to the norm of the parameters, and the quadratic model
            predicted the reduction well.
        gtol: Stop when the absolute value of every element of the gradient is at most this.
        throw: Raise an error if no tolerance was met.
        **options: Arguments of :class:`GaussNewton`. Here the default of ``progress`` is None.

    Returns:
        The parameters, the reason why the fit ended, and its cost.

    Raises:
        ValueError: ``max_steps`` or a tolerance is out of its range, or residuals do not depend on the parameters.
        TypeError: Residuals are not a real tensor, or a parameter is complex.
        SolveError: With ``throw``, no tolerance was met.

    Example:
        :math:`y = 2 e^{-x}`, from elsewhere:

        >>> from metagrad.optim import least_squares
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
    check_count("least_squares(..., max_steps)", max_steps)
    for name, tolerance in (("ftol", ftol), ("xtol", xtol), ("gtol", gtol)):
        check_number(f"least_squares(..., {name})", tolerance, 0)
    check_type("least_squares(..., params)", params, Tensor, Mapping)
    given = {"params": params} if isinstance(params, Tensor) else params
    variables = {key: p.detach().clone().requires_grad_() for key, p in given.items()}
    settings: dict[str, Any] = {"progress": None, "nonfinite": "skip", **options}
    opt = _Fit(list(variables.items()), **settings)
    terms = _terms(residual_fn, is_tensor=isinstance(params, Tensor))
    opt.limits = ftol, xtol, gtol, max_steps

    def closure() -> Tensor:
        opt.zero_grad()
        parts = [opt.residuals(fn, *data, reduction="sum") for fn, *data in terms]
        value = torch.stack(parts).sum() / 2
        backward(value)
        return value

    while opt.result is None:
        opt.step(closure)
    assert opt.point is not None
    steps, (_, loss, gradient) = opt.param_groups[0]["step"], opt.point
    if throw and not opt.result.is_success:
        raise SolveError(f"least_squares, after {steps} steps at a loss of {loss:.3g}: {opt.result.value}")
    values = {key: p.detach() for key, p in variables.items()}
    value = cast(P, values["params"] if isinstance(params, Tensor) else values)
    return LeastSquares(value, opt.result, loss, gradient, steps, opt.products)


def _terms(residual_fn: Any, *, is_tensor: bool) -> list[tuple[Any, ...]]:
    """Return functions of parameters by name, each with its data."""
    given: list[Any] = list(residual_fn.values()) if is_mapping(residual_fn) else [(residual_fn,)]
    if not given or not all(isinstance(term, tuple) for term in given):
        raise TypeError(
            "least_squares: residual_fn must be a function of parameters, or a dict of tuples (fn, *data), got "
            f"{residual_fn!r}."
        )

    return [(partial(_of_tensor, fn) if is_tensor else fn, *data) for fn, *data in given]


def _of_tensor(fn: Callable[..., Tensor], values: dict[str, Tensor], *data: Any) -> Tensor:
    return fn(values["params"], *data)
