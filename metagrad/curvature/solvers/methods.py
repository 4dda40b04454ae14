"""The methods of linear solves, for rows that stop independently, and what they share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.checks import check_positive, progress, refuse
from metagrad.curvature.estimators.probes import draw_for
from metagrad.curvature.linear_map import LinearMap, Rows, SeparateMatrices, refuse_half, shaped_products
from metagrad.curvature.rows import dot, norm
from metagrad.curvature.solvers.solution import Result

RESULTS: tuple[Result, ...] = tuple(Result)
RUNNING = -1
CALL = "solve(operator, b)"
POWER_STEPS = 10
_LITTLE = 0.99  # above this reduction factor of a cycle, further cycles do not help


class LinearSystem:
    """``A + damping I`` as a linear map of rows, which counts its products and checks their shape.

    Attributes:
        matvecs: Number of products so far.
    """

    def __init__(
        self, operator: LinearMap, damping: float | Tensor, generator: torch.Generator | None
    ) -> None:
        self.operator, self.damping, self.generator = operator, damping, generator
        self.shape: tuple[int, int] = operator.shape
        self.dtype: torch.dtype = operator.dtype
        self.device: torch.device = operator.device
        self.num_matrices: int | None = getattr(operator, "num_matrices", None)
        self.matvecs: int = 0

    def undamped(self, vectors: Tensor) -> Tensor:
        """Multiply rows [k, n] by A."""
        products = shaped_products(CALL, self.operator, vectors)
        self.matvecs += len(vectors)
        return products

    def multiply(self, vectors: Tensor) -> Tensor:
        """Multiply rows [k, n]."""
        products = self.undamped(vectors)
        if isinstance(self.damping, Tensor) or self.damping:
            products = products + self.damping * vectors
        return products

    def constant(self, vectors: Tensor) -> Tensor:
        """Multiply rows without a graph."""
        with torch.no_grad():
            return self.multiply(vectors).detach()


class Start(NamedTuple):
    """Right-hand sides, first iterates and their residuals, [k, n] each."""

    b: Tensor
    x: Tensor
    r: Tensor


class Run(NamedTuple):
    """The result of a solver, row by row."""

    x: Tensor  # [k, n]
    steps: Tensor  # int64 [k]
    status: Tensor  # index into RESULTS, int64 [k]
    direction: Tensor  # direction of negative curvature, zero in rows that did not meet it, [k, n]
    residual: Tensor  # by the recurrence of the solver, [k, n]
    matvecs: int  # products of all rows together


class Solver:
    """Base class of the methods of solution. Each is a frozen dataclass of its hyperparameters.

    Attributes:
        no_preconditioner: Why the method takes no preconditioner, and what to do instead. None if it takes a
            preconditioner.
    """

    no_preconditioner: ClassVar[str | None] = None

    def set_up(self, system: LinearSystem) -> Solver:
        """Return the solver with the options that depend on the operator."""
        return self

    def run(
        self, products: Rows, start: Start, precondition: Rows | None, tolerance: Tensor, max_steps: int
    ) -> Run:
        """Solve for rows, until the norms of the residuals are at most ``tolerance``, [k]."""
        raise NotImplementedError


def length(rows: Tensor) -> Tensor:
    """Return the norm of each row as a constant, [k, n] to [k]."""
    return norm(rows.detach())


def divide(numerator: Tensor, denominator: Tensor, where: Tensor) -> Tensor:
    """Divide where ``where`` is True. Elsewhere the quotient and its derivative are zero."""
    return torch.where(where, numerator, 0.0) / torch.where(where, denominator, 1.0)


def multiply(products: Rows, rows: Tensor, active: Tensor) -> Tensor:
    """Multiply only the active rows. The products of other rows are zero."""
    index = active.nonzero().squeeze(1)
    if len(index) == len(rows):
        return products(rows)
    if isinstance(products, SeparateMatrices):
        return torch.where(active[:, None], products(rows), 0.0)
    return torch.zeros_like(rows).index_copy(0, index, products(rows[index]))


def is_finite(rows: Tensor) -> Tensor:
    """Return which rows are finite, [k, n] to [k]."""
    return rows.detach().isfinite().all(-1)


def fill(status: Tensor, where: Tensor | bool, result: Result) -> Tensor:
    """Give a result to the running rows for which a condition holds."""
    return torch.where((status == RUNNING) & where, RESULTS.index(result), status)


def ended(status: Tensor) -> Tensor:
    """Give ``MAX_STEPS`` to the rows that are still running."""
    return fill(status, status == RUNNING, Result.MAX_STEPS)


def begun(r: Tensor, tolerance: Tensor) -> Tensor:
    """Return the status of rows at their first residuals, [k]: running, converged or not finite."""
    status = torch.full((len(r),), RUNNING, dtype=torch.int64, device=r.device)
    status = fill(status, ~is_finite(r), Result.NON_FINITE)
    return fill(status, length(r) <= tolerance, Result.CONVERGED)


@dataclass(frozen=True)
class CG(Solver):
    r"""Conjugate gradients: one product a step, for positive definite operators.

    .. math:: \alpha_i = \frac{r_i^T M r_i}{p_i^T A p_i}, \quad x_{i+1} = x_i + \alpha_i p_i, \quad
        r_{i+1} = r_i - \alpha_i A p_i, \quad p_{i+1} = M r_{i+1} + \frac{r_{i+1}^T M r_{i+1}}{r_i^T M r_i} p_i

    A row ends when its residual is within the tolerance, or by the rule below. It also ends if :math:`p^T A p \le 0`,
    with the iterate so far and the direction :math:`p`. In exact arithmetic, the number of steps is at most the
    number of distinct eigenvalues of the preconditioned operator.

    Args:
        progress: The :math:`\epsilon` of Martens' rule. Stop at step i if the model :math:`\phi(x) = x^T A x / 2 -
            b^T x` fell by less than :math:`k \epsilon |\phi(x_i)|` in the last :math:`k = \max(10, i / 10)` steps.
            Martens uses 5e-4. None disables the rule.
        follows_negative: If the curvature :math:`\kappa = p^T A p / p^T M p` is not above rounding errors, take one
            last step along p by its absolute value (Dauphin et al., NeurIPS 2014). If the curvature is only rounding,
            the step is scaled by M, as in gradient descent. If False, a row ends with the previous iterate. M is the
            inverse of the preconditioner.

    Raises:
        ValueError: ``progress`` is not above 0.

    Example:
        The minimum of :math:`x^T x - b^T x` is :math:`b / 2`:

        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.solvers.methods import CG
        >>> from metagrad.curvature.solvers.solve import solve
        >>> operator = SimpleNamespace(
        ...     shape=(2, 2), dtype=torch.float32, device=torch.device("cpu"), multiply=lambda rows: 2 * rows
        ... )
        >>> solution = solve(operator, torch.tensor([3.0, 4.0]), method=CG())
        >>> solution.value, solution.result.name
        (tensor([1.5000, 2.0000]), 'CONVERGED')

    References:
        Hestenes, Stiefel, "Methods of conjugate gradients for solving linear systems", J. Res. NBS 49, 1952; Martens,
        "Deep learning via Hessian-free optimization", ICML 2010, section 4.4.
    """

    progress: float | None = None
    follows_negative: bool = False

    def __post_init__(self) -> None:
        check_positive("CG(progress)", self.progress, optional=True)

    def run(
        self, products: Rows, start: Start, precondition: Rows | None, tolerance: Tensor, max_steps: int
    ) -> Run:
        """Solve for every row. Differentiable if products are."""
        b, x, r = start
        z, rz, status = _preconditioned(precondition, r, begun(r, tolerance))
        p, p_image = z, r  # the search directions, and their products with M
        scale, steps, count = torch.zeros_like(rz.detach()), torch.zeros_like(status), 0
        direction = r.new_zeros(()).expand_as(r)  # a stand-in without memory until a direction is found
        models = [_model(x, b, r)]
        for _ in progress(range(max_steps), "conjugate gradients"):
            if not bool((status == RUNNING).any()):
                break
            q, count = multiply(products, p, status == RUNNING), count + 1
            status = fill(status, ~is_finite(q), Result.NON_FINITE)
            moves = status == RUNNING
            q = torch.where(moves[:, None], q, 0.0)
            pq = dot(p, q)
            curvature, rounding, scale = self._curvature(p, p_image, q, pq, scale, precondition)
            is_negative = moves & (pq <= rounding)
            status = fill(status, is_negative, Result.NEGATIVE_CURVATURE)
            if not self.follows_negative:
                direction = torch.where(is_negative[:, None], _unit(p), direction)
            alpha = divide(rz, curvature, where=moves if self.follows_negative else moves & ~is_negative)
            before, x, r = x, x + alpha[:, None] * p, r - alpha[:, None] * q
            del q  # without a graph, the next direction reuses its memory
            status = fill(status, length(r) <= tolerance, Result.CONVERGED)
            if self.progress is not None:
                models.append(_model(x, b, r))
                status = fill(status, _makes_no_progress(models, self.progress), Result.PROGRESS)
            z, following, status = _preconditioned(precondition, r, status)
            x = torch.where((moves & ~following.detach().isfinite())[:, None], before, x)  # is too far
            goes_on = status == RUNNING
            beta = divide(following, rz, where=goes_on)[:, None]
            p = torch.where(goes_on[:, None], z + beta * p, p)
            p_image = p if precondition is None else r + beta * p_image
            rz, steps = torch.where(goes_on, following, rz), steps + (alpha.detach() != 0)
        return Run(x, steps, ended(status), direction, r, count)

    def _curvature(
        self, p: Tensor, p_image: Tensor, q: Tensor, pq: Tensor, scale: Tensor, precondition: Rows | None
    ) -> tuple[Tensor, Tensor | float, Tensor]:
        """Return the divisor of r^T z, the bound for rounding in p^T A p, and the scale so far."""
        if not self.follows_negative:
            return pq, 0.0, scale
        pp = dot(p, p_image)
        images = dot(q, q if precondition is None else precondition(q)).detach()
        scale = torch.maximum(scale, divide(images, pp.detach(), where=pp.detach() > 0).sqrt())
        rounding = torch.finfo(pq.dtype).eps * scale * pp
        return torch.where(pq.abs() <= rounding, pp, pq.abs()), rounding, scale


def _preconditioned(precondition: Rows | None, r: Tensor, status: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return z = M^-1 r, r^T z, and the status."""
    z = r if precondition is None else precondition(r)
    rz = dot(r, z)
    status = fill(status, ~rz.detach().isfinite(), Result.NON_FINITE)
    return z, rz, fill(status, rz <= 0, Result.BREAKDOWN)


def _model(x: Tensor, b: Tensor, r: Tensor) -> Tensor:
    """Return the quadratic model x^T A x / 2 - b^T x, [k]."""
    return -0.5 * dot(x.detach(), b.detach() + r.detach())


def _makes_no_progress(models: list[Tensor], progress: float) -> Tensor | bool:
    """Apply Martens' rule, at step i = len(models) - 1."""
    step = len(models) - 1
    lag = max(10, math.ceil(step / 10))
    if step <= lag:
        return False
    now, before = models[-1], models[-1 - lag]
    return (now < 0) & (before - now < lag * progress * now.abs())


def _unit(rows: Tensor) -> Tensor:
    return rows.detach() / length(rows).clamp_min(torch.finfo(rows.dtype).tiny)[:, None]


@dataclass(frozen=True)
class Dense(Solver):
    """The Cholesky factor of the matrix: n products, for positive definite operators with few coordinates.

    If the matrix is not positive definite, the row ends as ``Result.NEGATIVE_CURVATURE``, without a direction.

    Raises:
        ValueError: In a solve: a preconditioner is given.
        TypeError: The operator has half precision, in which torch cannot factorize.

    Example:
        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.solvers.solve import solve
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> operator = SimpleNamespace(
        ...     shape=(2, 2), dtype=A.dtype, device=A.device, multiply=lambda rows: rows @ A
        ... )
        >>> solve(operator, torch.tensor([3.0, 3.0]), method="dense").value.round(decimals=3)
        tensor([1., 1.])

    References:
        Golub, Van Loan, "Matrix computations", 2013, section 4.2.
    """

    no_preconditioner = "a factorization needs none. Leave it out."

    def run(
        self, products: Rows, start: Start, precondition: Rows | None, tolerance: Tensor, max_steps: int
    ) -> Run:
        """Solve for every row."""
        _, x, r = start
        refuse_half('solve(..., method="dense")', r.dtype)
        status = begun(r, tolerance)
        matrices = matrices_of(products, r)
        are_sound = is_finite(matrices.flatten(1))
        status = torch.where(are_sound, status, RESULTS.index(Result.NON_FINITE))
        identity = torch.eye(r.shape[1], dtype=r.dtype, device=r.device)
        symmetric = torch.where(are_sound[:, None, None], (matrices + matrices.mT) / 2, identity)
        factors, info = linalg.cholesky_ex(symmetric)
        status = fill(status, info != 0, Result.NEGATIVE_CURVATURE)
        factors = torch.where((info == 0)[:, None, None], factors, identity)
        moves = status == RUNNING
        x = x + torch.cholesky_solve(torch.where(moves[:, None], r, 0.0)[..., None], factors)[..., 0]
        status = fill(status, moves, Result.CONVERGED)
        return Run(x, moves.long(), status, torch.zeros_like(r), r, r.shape[1])


def matrices_of(products: Rows, b: Tensor) -> Tensor:
    """Compute the matrix of a map, ``[1, n, n]``, or the matrices of the rows of ``b``, ``[k, n, n]``."""
    identity = torch.eye(b.shape[1], dtype=b.dtype, device=b.device)
    if not isinstance(products, SeparateMatrices):
        return products(identity)[None]
    matrices = torch.stack([products(row.expand_as(b)) for row in identity], -1)
    rows = torch.outer(torch.arange(len(b)).to(b), identity.diagonal())
    rest = products(rows) - (matrices @ rows[:, :, None])[:, :, 0]
    if bool(length(rest.flatten()) > torch.finfo(b.dtype).eps ** 0.25 * len(b) * length(matrices.flatten())):
        refuse(CALL, "separate problems in rows", "rows that depend on each other, as by batch statistics")
    return matrices


@dataclass(frozen=True)
class Neumann(Solver):
    r"""The Neumann series: one product a step, the simplest and slowest method.

    .. math:: x_k = \alpha \sum_{i=0}^{k-1} (I - \alpha A)^i \, b, \qquad
        b - A x_k = (I - \alpha A)^k \, b

    It converges for positive definite operators with :math:`0 < \alpha < 2 / \lambda_{\max}`. For a symmetric
    operator the norm of the residual is log-convex in k, so a residual that grows once grows forever. Such a row ends
    as ``Result.DIVERGED``. Truncated by ``max_steps``, the series equals ``max_steps`` steps of gradient descent.
    Hypergradients use this approximation. :class:`CG` needs about the square root of the steps.

    Args:
        scale: The factor :math:`\alpha`, above 0. The learning rate, if the operator is the Hessian of a trained
            loss. None means 1 over the largest eigenvalue, estimated by 10 steps of the power method.

    Raises:
        ValueError: ``scale`` is not above 0. In a solve: a preconditioner is given.

    Example:
        The series of 1 / (1 - 0.5) after 4 terms is 1 + 1/2 + 1/4 + 1/8:

        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.solvers.methods import Neumann
        >>> from metagrad.curvature.solvers.solve import solve
        >>> operator = SimpleNamespace(
        ...     shape=(1, 1), dtype=torch.float32, device=torch.device("cpu"), multiply=lambda rows: 0.5 * rows
        ... )
        >>> solution = solve(operator, torch.ones(1), method=Neumann(scale=1.0), max_steps=4)
        >>> solution.value, solution.result.name
        (tensor([1.8750]), 'MAX_STEPS')

    References:
        Lorraine, Vicol, Duvenaud, "Optimizing millions of hyperparameters by implicit differentiation", AISTATS 2020,
        section 2.3 and algorithm 3.
    """

    no_preconditioner = 'the series has no preconditioner. Use method="cg", or scale the operator.'
    scale: float | None = None

    def __post_init__(self) -> None:
        check_positive("Neumann(scale)", self.scale, optional=True)

    def set_up(self, system: LinearSystem) -> Neumann:
        """Estimate the scale, unless it is given."""
        if self.scale is not None:
            return self
        size = _largest_eigenvalue(system)
        return Neumann(scale=1 / size if size > 0 else 1.0)

    def run(
        self, products: Rows, start: Start, precondition: Rows | None, tolerance: Tensor, max_steps: int
    ) -> Run:
        """Sum the series, after :meth:`set_up`."""
        assert self.scale is not None
        _, x, r = start
        status = begun(r, tolerance)
        steps, slack, count = torch.zeros_like(status), 1 + 100 * torch.finfo(r.dtype).eps, 0
        for _ in range(max_steps):
            active = status == RUNNING
            if not bool(active.any()):
                break
            step, count = self.scale * r, count + 1
            following = r - multiply(products, step, active)
            status = fill(status, ~is_finite(following), Result.NON_FINITE)
            status = fill(status, length(following) > length(r) * slack, Result.DIVERGED)
            moves = (status == RUNNING)[:, None]
            x = x + torch.where(moves, step, 0.0)
            r = torch.where(moves, following, r)
            steps = steps + moves[:, 0]
            status = fill(status, length(r) <= tolerance, Result.CONVERGED)
        return Run(x, steps, ended(status), torch.zeros_like(r), r, count)


def _largest_eigenvalue(system: LinearSystem) -> float:
    """Estimate the largest eigenvalue of positive operators from below, usually to within a factor of two."""
    v = draw_for(system, system.num_matrices or 1, "rademacher", system.generator)
    size = v.new_zeros(())
    for _ in range(POWER_STEPS):
        v = system.constant(v / length(v).clamp_min(torch.finfo(v.dtype).tiny)[:, None])
        size = length(v).max()
    return float(size) if bool(size.isfinite()) else 0.0


SOLVERS: dict[str, type[Solver]] = {"auto": CG, "cg": CG, "dense": Dense, "neumann": Neumann}
"""The methods of :func:`~metagrad.curvature.solve` by name."""


def gmres(products: Rows, b: Tensor, *, tolerance: Tensor, max_steps: int, restart: int = 50) -> Run:
    r"""Solve :math:`A_i x_i = b_i` for rows, each with its own matrix, without a graph.

    Step j minimizes the residual over :math:`\operatorname{span}(b, A b, \dots, A^{j-1} b)`. Rows stop independently.

    Args:
        products: Multiplies rows [k, n], row i with :math:`A_i`.
        b: The right-hand sides, [k, n].
        tolerance: A row stops when its residual norm is at most this, [k].
        max_steps: Maximum number of products.
        restart: Number of steps after which the basis is dropped. It bounds the memory.

    Example:
        >>> from metagrad.curvature.solvers.methods import gmres
        >>> A, b = torch.tensor([[0.0, 2.0], [-1.0, 0.0]]), torch.tensor([[2.0, 3.0]])
        >>> run = gmres(lambda rows: rows @ A.T, b, tolerance=torch.tensor([1e-4]), max_steps=10)
        >>> run.x, int(run.steps)
        (tensor([[-3.,  1.]]), 2)

    References:
        Saad, Schultz, "GMRES: a generalized minimal residual algorithm for solving nonsymmetric linear systems",
        SIAM J. Sci. Stat. Comput. 7(3), 1986.
    """
    b = b.detach()
    x, r, steps, count = torch.zeros_like(b), b, b.new_zeros(len(b), dtype=torch.int64), 0
    status = begun(r, tolerance)
    with torch.no_grad():
        while bool((status == RUNNING).any()) and count < max_steps:
            active, before = status == RUNNING, length(r)
            size = min(restart, b.shape[1], max_steps - count)
            change, taken = _cycle(products, r, active, tolerance, size)
            x, steps, count = x + change, steps + taken, count + int(taken.max()) + 1
            r = torch.where(active[:, None], b - products(x), r)
            status = fill(status, ~is_finite(r), Result.NON_FINITE)
            # The residual of the recurrence differs from the true residual by rounding.
            status = fill(status, length(r) <= 2 * tolerance, Result.CONVERGED)
            status = fill(status, length(r) > _LITTLE * before, Result.STAGNATED)
    return Run(x, steps, ended(status), torch.zeros_like(x), r, count)


def _cycle(products: Rows, r: Tensor, active: Tensor, tolerance: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the change of the solution after at most ``size`` steps, and the steps of each row."""
    k, n = r.shape
    first = length(r)
    Q, H = r.new_zeros(k, size + 1, n), r.new_zeros(k, size + 1, size)
    Q[:, 0] = r / torch.where(first > 0, first, 1.0)[:, None]
    right = r.new_zeros(k, size + 1)
    right[:, 0] = first
    found, steps = r.new_zeros(k, size), torch.zeros_like(active, dtype=torch.int64)
    for j in range(size):
        w = products(Q[:, j])
        for _ in range(2):  # one pass leaves rounding errors of the size of the residual
            h = (Q[:, : j + 1] @ w[:, :, None])[:, :, 0]
            H[:, : j + 1, j] += h
            w = w - (h[:, None] @ Q[:, : j + 1])[:, 0]
        H[:, j + 1, j] = length(w)
        Q[:, j + 1] = w / torch.where(H[:, j + 1, j] > 0, H[:, j + 1, j], 1.0)[:, None]
        part, goal = H[:, : j + 2, : j + 1], right[:, : j + 2, None]
        y = linalg.lstsq(part, goal).solution.nan_to_num(0.0, 0.0, 0.0)
        found[:, : j + 1] = torch.where(active[:, None], y[:, :, 0], found[:, : j + 1])
        steps = steps + active
        active = active & (length((goal - part @ y)[:, :, 0]) > tolerance)
        if not bool(active.any()):
            break
    return (found[:, None] @ Q[:, :size])[:, 0], steps
