"""Inverses of the Hessian of the inner loss: exact, iterative, of low rank, or the identity."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.checks import check_count, check_number, check_positive
from metagrad.curvature.linear_map import LinearMap
from metagrad.curvature.solvers import cg, dense, neumann
from metagrad.curvature.solvers.iteration import Solver
from metagrad.curvature.solvers.nystrom import nystrom
from metagrad.curvature.solvers.solution import Result, Solution, Stats
from metagrad.curvature.solvers.solve import solve
from metagrad.hypergrad.implicit import ImplicitMethod


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
        return _solved(operator, b, cg.CG(), self.damping, rtol=rtol, max_steps=self.steps)


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
        neumann.Neumann(self.scale)  # checks it

    def inverse(self, operator: LinearMap, b: Tensor) -> Solution:
        """Sum the series."""
        return _solved(operator, b, neumann.Neumann(self.scale), self.damping, max_steps=self.steps)


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
        return _solved(operator, b, dense.Dense(), self.damping)


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
