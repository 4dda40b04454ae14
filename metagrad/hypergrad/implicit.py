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
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.checks import check_count, check_number, check_positive, warn
from metagrad.core.tree import Params, plus, widened, zeros_for_none
from metagrad.curvature.linear_map import LinearMap
from metagrad.curvature.operators.hessian import HessianOperator, hessian
from metagrad.curvature.solvers import methods
from metagrad.curvature.solvers.iteration import Solver
from metagrad.curvature.solvers.nystrom import nystrom
from metagrad.curvature.solvers.solution import Result, Solution, SolveError, Stats
from metagrad.curvature.solvers.solve import APPROXIMATE, solve
from metagrad.hypergrad.problem import CALL, CREATE, Derivative, Problem, partials

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
        mixed = H.mixed(-solution.value, hyper)
        gradient = [plus(*pair) for pair in zip(direct, mixed, strict=True)]
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


@dataclass(frozen=True)
class CG(ImplicitMethod):
    r"""Conjugate gradients: :math:`(H + \mu I) u = \nabla_\phi f`, one Hessian-vector product per step.

    Each task stops independently, so tasks that run together have the same result as tasks that run separately. A
    Hessian that is not positive definite raises. A residual above one hundredth after all steps gives a warning.

    Args:
        steps: Maximum number of products, 1 or more.
        damping: The number :math:`\mu`, 0 or more. It makes an indefinite Hessian definite, and biases u.
        rtol: The iteration stops early if its residual is at most this number, relative to :math:`\nabla_\phi f`.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        The minimum of :math:`(\phi - \lambda)^2` is :math:`\lambda`, so :math:`f = \phi^2` has the derivative
        :math:`2 \lambda`:

        >>> params, hyper = {"phi": torch.tensor(3.0)}, {"lam": torch.tensor(3.0)}
        >>> metagrad.hypergradient(
        ...     lambda p, h: p["phi"] ** 2,
        ...     lambda p, h: (p["phi"] - h["lam"]) ** 2,
        ...     params, hyper, method=metagrad.hypergrad.CG(steps=5),
        ... )
        {'lam': tensor(6.)}

    References:
        Pedregosa, "Hyperparameter optimization with approximate gradient", ICML 2016; Rajeswaran, Finn, Kakade,
        Levine, "Meta-learning with implicit gradients", NeurIPS 2019, section 3.
    """

    is_exact = True
    steps: int = 20
    _: KW_ONLY
    damping: float = 0.0
    rtol: float = 1e-10

    def __post_init__(self) -> None:
        check_count("CG(steps)", self.steps)
        check_number("CG(..., damping)", self.damping, 0.0)
        check_number("CG(..., rtol)", self.rtol, 0.0)

    def inverse(self, operator: LinearMap, b: Tensor) -> Solution:
        """Solve."""
        # If the residual is below rounding errors, directions consist only of errors.
        rtol = max(self.rtol, 4 * torch.finfo(b.dtype).eps)
        return _solved(operator, b, methods.CG(), self.damping, rtol=rtol, max_steps=self.steps)


@dataclass(frozen=True)
class Neumann(ImplicitMethod):
    r"""The Neumann series :math:`u = \alpha \sum_{i < k} (I - \alpha (H + \mu I))^i \, \nabla_\phi f`, truncated.

    At the minimum it equals the unrolled derivative of the last k steps of gradient descent with learning rate
    :math:`\alpha`. Its error decreases by the factor :math:`1 - \alpha \lambda_{\min}` per step.

    Args:
        steps: The number k of terms, 1 or more.
        scale: The factor :math:`\alpha`. It must be below 2 over the largest eigenvalue. Otherwise the series
            diverges, which raises an error. None means 1 over the largest eigenvalue of all tasks, estimated by 10
            products.
        damping: The number :math:`\mu`, 0 or more.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        With :math:`H = 2` and :math:`\alpha = 1/4`, each step halves the error:

        >>> method = metagrad.hypergrad.Neumann(steps=7, scale=0.25)
        >>> metagrad.hypergradient(
        ...     lambda p, h: p["phi"] ** 2,
        ...     lambda p, h: (p["phi"] - h["lam"]) ** 2,
        ...     {"phi": torch.tensor(3.0)}, {"lam": torch.tensor(3.0)}, method=method,
        ... )
        {'lam': tensor(5.9531)}

    References:
        Lorraine, Vicol, Duvenaud, "Optimizing millions of hyperparameters by implicit differentiation", AISTATS 2020,
        algorithms 1 and 3.
    """

    steps: int = 20
    scale: float | None = None
    _: KW_ONLY
    damping: float = 0.0

    def __post_init__(self) -> None:
        check_count("Neumann(steps)", self.steps)
        check_number("Neumann(..., damping)", self.damping, 0.0)
        methods.Neumann(self.scale)  # checks it

    def inverse(self, operator: LinearMap, b: Tensor) -> Solution:
        """Sum the series."""
        return _solved(operator, b, methods.Neumann(self.scale), self.damping, max_steps=self.steps)


@dataclass(frozen=True)
class Exact(ImplicitMethod):
    r"""The dense Hessian and its Cholesky factor, for few parameters. It costs a product for each parameter.

    Args:
        damping: The number :math:`\mu` that is added to the diagonal, 0 or more.

    Raises:
        ValueError: ``damping`` is negative.

    Example:
        >>> metagrad.hypergradient(
        ...     lambda p, h: p["phi"] ** 2,
        ...     lambda p, h: (p["phi"] - h["lam"]) ** 2,
        ...     {"phi": torch.tensor(3.0)}, {"lam": torch.tensor(3.0)}, method=metagrad.hypergrad.Exact(),
        ... )["lam"].round(decimals=3)
        tensor(6.)

    References:
        Griewank, Walther, "Evaluating derivatives", 2008, section 15.1.
    """

    is_exact = True
    _: KW_ONLY
    damping: float = 0.0

    def __post_init__(self) -> None:
        check_number("Exact(damping)", self.damping, 0.0)

    def inverse(self, operator: LinearMap, b: Tensor) -> Solution:
        """Solve."""
        return _solved(operator, b, methods.Dense(), self.damping)


@dataclass(frozen=True)
class Nystrom(ImplicitMethod):
    r"""A low-rank Hessian, inverted in closed form: :math:`(\hat H_r + \rho I)^{-1} \nabla_\phi f`.

    :math:`\hat H_r = (H \Omega)(\Omega^\top H \Omega)^\dagger (H \Omega)^\top` comes from r products with random
    orthonormal vectors :math:`\Omega`. The paper uses columns of the Hessian instead. No series can diverge, and
    there is no step to choose. The error is at most :math:`|E| / (\rho (\rho + |E|))` times :math:`|\nabla_\phi f|`,
    where E is the error of the approximation. A residual above one hundredth gives a warning. The method approximates
    one matrix, so tasks of MAML need CG.

    Args:
        rank: Number of products, from 1 to the number of parameters.
        damping: The number :math:`\rho`, above 0.
        generator: Draws the vectors.

    Raises:
        ValueError: An argument is out of its range, or the Hessian is not positive semi-definite.

    Example:
        A Hessian of this rank is represented exactly, so the damping :math:`\rho` is the only error:

        >>> metagrad.hypergradient(
        ...     lambda p, h: p["phi"] ** 2,
        ...     lambda p, h: (p["phi"] - h["lam"]) ** 2,
        ...     {"phi": torch.tensor(3.0)}, {"lam": torch.tensor(3.0)},
        ...     method=metagrad.hypergrad.Nystrom(rank=1, damping=1.0),
        ... )["lam"].round(decimals=3)
        tensor(4.)

    References:
        Hataya, Yamada, "Nystrom method for accurate and scalable implicit differentiation", AISTATS 2023, section 3;
        Frangella, Tropp, Udell, SIAM J. Matrix Anal. Appl. 44(2), 2023, proposition 3.1 (the bound).
    """

    rank: int = 10
    _: KW_ONLY
    damping: float = 1e-2
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        check_count("Nystrom(rank)", self.rank)
        check_positive("Nystrom(..., damping)", self.damping)

    def inverse(self, operator: LinearMap, b: Tensor) -> Solution:
        """Approximate the Hessian and invert the approximation."""
        if getattr(operator, "num_matrices", None) is not None:
            raise ValueError(
                "Nystrom(...): it approximates one Hessian, and tasks have one each. Take CG, Neumann or Exact."
            )
        rank = min(self.rank, operator.shape[0])
        found = nystrom(operator, rank, generator=self.generator)
        u = found.inverse(self.damping)(b[None])[0]
        residual = b - operator.multiply(u[None])[0] - self.damping * u
        return _approximation(u, residual, Result.MAX_STEPS, found.matvecs + 1)


@dataclass(frozen=True)
class FirstOrder(ImplicitMethod):
    r"""The gradient of the outer loss without an inverse, or with a multiple of the identity in its place.

    .. math:: \nabla_\lambda f - s \, \frac{\partial^2 g}{\partial\lambda \, \partial\phi} \nabla_\phi f

    If ``scale`` :math:`s` is the learning rate of the inner steps, this is T1-T2, the derivative of the last step.
    With 0 the minimum is a constant, and hyperparameters of only the inner loss have a derivative of zero.

    Args:
        scale: The number s, 0 or more.

    Raises:
        ValueError: ``scale`` is negative.

    Example:
        >>> params, hyper = {"phi": torch.tensor(3.0)}, {"lam": torch.tensor(3.0)}
        >>> losses = lambda p, h: p["phi"] ** 2, lambda p, h: (p["phi"] - h["lam"]) ** 2
        >>> metagrad.hypergradient(*losses, params, hyper, method=metagrad.hypergrad.FirstOrder())
        {'lam': tensor(0.)}
        >>> metagrad.hypergradient(*losses, params, hyper, method=metagrad.hypergrad.FirstOrder(scale=0.5))
        {'lam': tensor(6.)}

    References:
        Luketina, Berglund, Greff, Raiko, "Scalable gradient-based tuning of continuous regularization
        hyperparameters", ICML 2016, section 2.2 (T1-T2).
    """

    scale: float = 0.0

    def __post_init__(self) -> None:
        check_number("FirstOrder(scale)", self.scale, 0.0)

    @property
    def is_zero(self) -> bool:
        """Whether ``scale`` is zero, so that u is zero."""
        return self.scale == 0

    def inverse(self, operator: LinearMap, b: Tensor) -> Solution:
        """Scale."""
        return _approximation(self.scale * b, torch.zeros_like(b), Result.PROGRESS, 0)


def _solved(operator: LinearMap, b: Tensor, solver: Solver, damping: float, **options: Any) -> Solution:
    """Solve for a right-hand side ``[n]``, or one for each matrix of the operator, ``[k, n]``."""
    options = {"rtol": 0.0, "order": 1, "check_symmetry": False, **options}
    return solve(operator, b, method=solver, damping=damping, **options)


def _approximation(value: Tensor, residuals: Tensor, result: Result, matvecs: int) -> Solution:
    """Return a value that no iteration computed as a solution of rows."""
    norms = linalg.vector_norm(residuals.detach(), dim=-1)
    stats = Stats((result,) * max(1, norms.numel()), torch.zeros_like(norms).long(), norms, matvecs, None)
    return Solution(value, result, stats)
