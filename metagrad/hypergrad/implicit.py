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
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from metagrad.autograd.derivatives.recorded import Recorded, recorded_gradient, rows_of, tensors_of
from metagrad.core._torch import linalg
from metagrad.core.capture import RandomState
from metagrad.core.checks import check_count, check_function, check_number, check_positive, is_a, warn
from metagrad.core.norms import every_order
from metagrad.core.substitution import checked_reruns
from metagrad.core.tape import graph_nodes, refuse_transforms
from metagrad.core.tree import Params, plus, widened, zeros_for_none
from metagrad.curvature.linear_map import LinearMap
from metagrad.curvature.operators.hessian import HessianOperator, hessian
from metagrad.curvature.operators.space import check_params
from metagrad.curvature.solvers import methods
from metagrad.curvature.solvers.implicit import Inverse, attach
from metagrad.curvature.solvers.methods import Solver
from metagrad.curvature.solvers.nystrom import nystrom
from metagrad.curvature.solvers.solution import Result, Solution, SolveError, Stats
from metagrad.curvature.solvers.solve import APPROXIMATE, solve
from metagrad.hypergrad.problem import CALL, CREATE, Derivative, Problem, partials

LOOSE = 1e-2
"""Residuals above this value, relative to the right-hand side, give a warning."""
LOOSE_FOR_TASKS = 0.1
"""The same limit for stacked tasks, whose gradients are noisy."""
IMPLICIT_DIFF = "implicit_diff(inner_loss, params)"

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
        with torch.enable_grad():
            values, hyper = problem.variables(), problem.hyper_leaves()
            if problem.create_graph:
                values = self._differentiable(problem, values, hyper)
                # New tensors with the same values, so partial derivatives do not go through the minimum.
                hyper = [leaf.view_as(leaf) for leaf in hyper]
            loss = problem.outer(values, hyper)
            if not loss.requires_grad:
                raise ValueError(f"{CALL}: outer_loss depends neither on params nor on hyper.")
            slopes, direct = partials(loss, values, hyper, create_graph=problem.create_graph)
            if self.is_zero:
                return Derivative(zeros_for_none(direct, hyper))
            inner = problem.inner(values, hyper)
            H = hessian(inner, problem.wrapped(values), create_graph=problem.create_graph)
            assert isinstance(H, HessianOperator)
            b = H.space.join(list(slopes.values()))
            solution = self.inverse(H, b)
            mixed = H.mixed(-solution.value, hyper)
        gradient = [plus(*pair) for pair in zip(direct, mixed, strict=True)]
        return Derivative(gradient, solution, relative_residual(solution, b))

    def _differentiable(self, problem: Problem, values: Params, hyper: Sequence[Tensor]) -> Params:
        """Return the parameters as a differentiable function of ``hyper``, without the damping of u."""
        undamped: ImplicitMethod = dataclasses.replace(self, damping=0.0)
        return implicit_diff(lambda at: problem.inner(at, hyper), values, method=undamped, call=CREATE)


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


class SplitLoss(NamedTuple):
    """A loss of a model's outputs plus a quadratic penalty. Its Gauss-Newton matrix replaces the Hessian.

    Attributes:
        losses: A scalar, or the losses ``[tasks]``, with the penalty.
        outputs: The outputs of the model, with their graph.
        penalty: Twice the factor of the squared distance in the penalty.
    """

    losses: Tensor
    outputs: Tensor
    penalty: float | Tensor


def implicit_diff(
    inner_loss: Callable[[Params], Tensor | SplitLoss],
    params: Params,
    *,
    method: ImplicitMethod,
    order: int = 1,
    call: str = IMPLICIT_DIFF,
) -> Params:
    r"""Make the minimum of a loss differentiable by the implicit function theorem.

    .. math:: \frac{d\phi^*}{d\lambda} = -\left( \frac{\partial^2 g}{\partial\phi^2} \right)^{-1}
              \frac{\partial^2 g}{\partial\phi \, \partial\lambda}

    :math:`\lambda` is every other tensor that the loss was computed from, and gradients flow to all of them. A
    backward pass costs the products of the method and two more. The way in which the minimum was found does not
    matter. Only the graph of one gradient is stored.

    Args:
        inner_loss: ``inner_loss(params)``, a scalar. It may also return losses ``[tasks]`` of stacked parameters, if
            each loss depends only on its own parameters. Then the Hessians of all tasks are inverted together and
            independently.
        params: The minimum by name, dense floating point tensors of one dtype. Stacked tasks have ``[tasks, ...]``
            each. A parameter that the loss does not depend on is a constant.
        method: An inverse of the Hessian: CG, Neumann, Exact or FirstOrder with a scale. Only CG and Exact,
            without damping, are correct at a higher order.
        order: How often the minimum can be differentiated. Above 1, the loss is evaluated again for each order,
            with the same random numbers.
        call: Name of the caller in errors.

    Returns:
        Parameters with the same values, differentiable ``order`` times if grad mode is enabled. One more
        derivative raises.

    Raises:
        TypeError: ``method`` is not an inverse of the Hessian, or ``params`` are not such tensors.
        ValueError: The losses are neither a scalar nor one for each task, an operation has no second derivative, or
            the method has no inverse.
        SolveError: In the backward pass, the Hessian is not positive definite.

    Example:
        :math:`\phi^* = \lambda^2`, however it was found:

        >>> lam = torch.tensor(3.0, requires_grad=True)
        >>> def inner(params): return (params["phi"] - lam**2) ** 2
        >>> found = metagrad.hypergrad.implicit_diff(
        ...     inner, {"phi": torch.tensor(9.0)}, method=metagrad.hypergrad.CG()
        ... )
        >>> metagrad.grad(found["phi"], lam)
        tensor(6.)

    References:
        Rajeswaran, Finn, Kakade, Levine, "Meta-learning with implicit gradients", NeurIPS 2019, section 3; Griewank,
        Walther, "Evaluating derivatives", 2008, section 15.1.
    """
    check_inverse(call, method)
    check_count(f"{call}, order", order)
    check_function(call, "inner_loss", inner_loss)
    check_params(call, params)
    if not torch.is_grad_enabled():
        return {name: p.detach() for name, p in params.items()}
    refuse_transforms(call)
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    random = RandomState()
    # iMAML calls copies of the model, which may run again.
    with checked_reruns(call, nested=call != IMPLICIT_DIFF):
        losses = inner_loss(leaves)
    random.close()
    split = losses if isinstance(losses, SplitLoss) else None
    losses = losses if split is None else split.losses
    hessians = _TaskHessians(call, losses, _entering(losses, leaves) or leaves, split)

    def solve(cotangents: Tensor) -> Tensor:
        """Invert the Hessian.

        A row with NaN or Inf remains unchanged, and later checks of gradients report it.
        """
        sound = cotangents.isfinite().all(-1, keepdim=True)
        b = torch.where(sound, cotangents, 0.0)
        solution = method.inverse(hessians, b)
        check_solution(call, solution, relative_residual(solution, b), LOOSE_FOR_TASKS)
        return torch.where(sound, solution.value, torch.nan)

    if order > 1 and (not method.is_exact or getattr(method, "damping", 0.0) or split is not None):
        raise ValueError(
            f"{call}: order above 1 needs the inverse of the Hessian itself. Take CG or Exact, without damping, and "
            "a loss in place of a SplitLoss."
        )

    def residual(rows: Tensor) -> Tensor:
        with torch.enable_grad(), every_order(), random.restored():
            again = inner_loss(hessians.by_name(rows))
        assert isinstance(again, Tensor)
        return -torch.autograd.grad(again.sum(), rows, create_graph=True)[0]

    inverse = Inverse(residual, solve, solve, order, None, f"{call[:-1]}, order={{}})")
    x = rows_of(hessians.leaves, hessians.num_matrices).detach()
    found = hessians.by_name(attach(inverse, x, -hessians.slopes, order))
    return {name: found.get(name, leaf.detach()) for name, leaf in leaves.items()}


def _entering(losses: object, leaves: Params) -> Params:
    """Return the leaves that losses were computed from. Every other leaf has no minimum and stays constant."""
    nodes: set[Node] = set(graph_nodes([losses])) if is_a(losses, Tensor) else set()
    return {name: leaf for name, leaf in leaves.items() if get_gradient_edge(leaf).node in nodes}


def check_inverse(call: str, method: object) -> None:
    """Raise unless a method is an inverse that :func:`implicit_diff` can use."""
    if not isinstance(method, ImplicitMethod):
        raise TypeError(
            f"{call}: expected an implicit method, CG, Neumann, Exact or FirstOrder(scale=...) of mg.hypergrad, got "
            f"{method!r}."
        )
    if method.is_zero:
        raise ValueError(
            f"{call}: FirstOrder() treats the minimum as a constant, so nothing is learned. Pass a scale, such as "
            "the inner learning rate."
        )


class _TaskHessians:
    """The Hessian of one loss, or of the loss of each stacked task, as a linear map of rows ``[tasks, n]``.

    The Hessian of the sum is block-diagonal, so one backward pass multiplies all rows.
    """

    def __init__(self, call: str, losses: object, params: Params, split: SplitLoss | None) -> None:
        if not isinstance(losses, Tensor) or losses.ndim > 1 or not losses.requires_grad:
            got = tuple(losses.shape) if is_a(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"{call}: the losses must be a scalar, or one for each task, with a graph, got {got}."
            )
        for name, p in params.items():
            if losses.ndim and p.shape[:1] != losses.shape:
                raise ValueError(
                    f"{call}: there are {len(losses)} losses, so parameters must be [{len(losses)}, ...], but "
                    f"{name!r} is {tuple(p.shape)}."
                )
        self._names, self.leaves = list(params), list(params.values())
        self.num_matrices: int = len(losses) if losses.ndim else 1
        self.dtype: torch.dtype = self.leaves[0].dtype
        self.device: torch.device = self.leaves[0].device
        size = sum(leaf.numel() for leaf in self.leaves) // self.num_matrices
        self.shape: tuple[int, int] = (size, size)
        self._recorded = recorded_gradient(call, losses.sum(), params)
        self.slopes: Tensor = self._rows(self._recorded.outputs)
        self._split = split
        if split is not None:
            self._model = Recorded(call, [split.outputs], params)
            self._loss = recorded_gradient(call, losses.sum(), {"outputs": split.outputs})

    def by_name(self, rows: Tensor) -> Params:
        """Return rows as parameters."""
        return dict(zip(self._names, tensors_of(rows, self.leaves), strict=True))

    def multiply(self, vectors: Tensor) -> Tensor:
        """Multiply each row with its own matrix."""
        v = torch.cat([part.reshape(-1) for part in tensors_of(vectors, self.leaves)])
        if self._split is None:
            return self._rows(self._recorded.pull(v))
        products = self._model.pull(self._loss.pull(self._model.push(v)))
        return self._rows(products) + self._split.penalty * vectors

    def _rows(self, flat: Tensor) -> Tensor:
        parts = flat.split_with_sizes([leaf.numel() for leaf in self.leaves])
        return rows_of(parts, self.num_matrices)
