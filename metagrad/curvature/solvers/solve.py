"""Linear systems with an operator that is given by its matrix-vector products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.core._torch import to_list
from metagrad.core.checks import check_count, check_function, check_number, check_scalar, is_a, refuse, warn
from metagrad.core.tree import widened
from metagrad.curvature.estimators.probes import draw_for
from metagrad.curvature.linear_map import LinearMap, Rows, SeparateMatrices, checked_size
from metagrad.curvature.rows import dot, norm
from metagrad.curvature.solvers.implicit import Inverse, attach_linear, is_batched, refuse_derivatives
from metagrad.curvature.solvers.methods import (
    CALL,
    RESULTS,
    SOLVERS,
    LinearSystem,
    Run,
    Solver,
    Start,
    length,
)
from metagrad.curvature.solvers.solution import Result, Solution, SolveError, Stats, overall, raise_failure

_FIX = (
    "Symmetrize it, or solve the normal equations with x -> A^T A x. If the difference is noise that you accept, "
    "pass check_symmetry=False."
)

APPROXIMATE = (Result.CONVERGED, Result.PROGRESS, Result.MAX_STEPS, Result.STAGNATED)
"""Results whose value approximates a solution, so the implicit function theorem holds approximately."""


def solve(
    operator: LinearMap,
    b: Tensor,
    *,
    method: str | Solver = "auto",
    damping: float | Tensor = 0.0,
    rtol: float = 1e-6,
    atol: float = 0.0,
    max_steps: int | None = None,
    preconditioner: Rows | None = None,
    x0: Tensor | None = None,
    throw: bool = False,
    generator: torch.Generator | None = None,
    order: int = 3,
    check_symmetry: bool = True,
) -> Solution:
    r"""Solve :math:`(A + \mu I) x = b` from products with a symmetric operator.

    A right-hand side is solved when :math:`|b - (A + \mu I) x| \le \max(\mathrm{rtol} |b|, \mathrm{atol})`.

    =========== ====================================================================================================
    method      operators
    =========== ====================================================================================================
    "cg"        positive definite. Conjugate gradients, which detect and report negative curvature. "auto" is the
                same.
    "dense"     positive definite, few parameters. It costs n products and a Cholesky factor.
    "neumann"   positive definite. The series of gradient descent, which is slow and can be truncated.
    =========== ====================================================================================================

    A solver of ``metagrad.curvature.solvers`` in place of its name has its own options, as ``Neumann(scale=0.1)``.

    **Derivatives.** With gradients enabled, the value is differentiable with respect to ``b``, ``damping`` and every
    tensor that the products depend on. The products must be differentiable: metagrad's operators need
    ``create_graph=True``. Otherwise they count as constants, which a solve cannot detect. The implicit function
    theorem gives :math:`dx = A^{-1} (db - dA \, x)`. Each backward pass is one more solve of the same kind, and no
    step is stored. Neither ``x0`` nor ``preconditioner`` has a gradient. If the solve of a derivative fails, it
    raises. Forward mode is not supported.

    Args:
        operator: A symmetric map of n-vectors, or k such maps, each for one row of ``b``.
        b: A right-hand side [n], or k right-hand sides as rows [k, n]. Rows are multiplied together and stop
            independently.
        method: A name or a solver.
        damping: The number :math:`\mu`, 0 or more. It may be a tensor with one element that requires grad.
        rtol: Tolerance relative to the norm of ``b``.
        atol: Absolute tolerance. The right-hand sides of derivatives have another scale, so ``atol`` is converted to
            a relative tolerance for them.
        max_steps: Maximum number of steps for one right-hand side, 1 or more. None means 10 n, and at most 10 000.
        preconditioner: A symmetric positive definite map of rows, close to the inverse, such as
            ``lambda rows: rows / (diagonal + damping)``.
        x0: The start, in the shape of ``b``. None means 0.
        throw: Raise unless the solve succeeds.
        generator: Draws the random vectors of methods that need them.
        order: Number of derivatives. Each order stores the graph of one product, and a derivative of higher
            order raises. There is no limit if only ``b`` requires grad.
        check_symmetry: Check a single operator and the preconditioner on a random pair of vectors. It costs two
            products.

    Returns:
        The solution in the shape of ``b``, its result and its cost. Residuals are recomputed at the end with one more
        product, so rounding errors are not mistaken for convergence.

    Raises:
        ValueError: An argument is out of its range, ``b`` or ``x0`` has another shape or is not finite, a method
            takes no ``preconditioner``, or a map is not symmetric.
        TypeError: The operator is not a linear map, or a dtype differs from the operator's.
        SolveError: The solve failed and ``throw`` is set, or a solve of a derivative failed.

    Note:
        A product with NaN or Inf gives ``Result.NON_FINITE``. The operators of :mod:`metagrad.curvature` raise an
        error earlier, with the name of the parameter. In a backward pass the preconditioner is a constant.

    Example:
        :math:`x = b / (a + \mu)` has :math:`dx / d\mu = -b / (a + \mu)^2`:

        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.solvers.solve import solve
        >>> operator = SimpleNamespace(
        ...     shape=(2, 2), dtype=torch.float32, device=torch.device("cpu"), multiply=lambda rows: 3 * rows
        ... )
        >>> damping = torch.tensor(1.0, requires_grad=True)
        >>> x = solve(operator, torch.tensor([4.0, 8.0]), damping=damping).value
        >>> x.tolist(), torch.autograd.grad(x.sum(), damping)
        ([1.0, 2.0], (tensor(-0.7500),))

    References:
        Rajeswaran, Finn, Kakade, Levine, "Meta-learning with implicit gradients", NeurIPS 2019, section 3; Griewank,
        Walther, "Evaluating derivatives", 2008, chapter 15 (implicit and iterative differentiation).
    """
    check_number("solve(..., rtol)", rtol, 0)
    check_number("solve(..., atol)", atol, 0)
    check_count("solve(..., max_steps)", max_steps, optional=True)
    check_count("solve(..., order)", order)
    n = checked_size(CALL, operator)
    check_vector("b", b, operator)
    if x0 is not None:
        check_vector("x0", x0, operator, like=b)
    check_scalar("solve(..., damping)", damping, 0)
    system = LinearSystem(operator, damping, generator)
    if preconditioner is not None:
        check_function(CALL, "preconditioner", preconditioner)
        if check_symmetry:
            check_symmetric(CALL, "preconditioner", operator, preconditioner)
    if check_symmetry and system.num_matrices is None:
        check_symmetric(CALL, "operator", system, system.undamped)
    solver = _solver(method)
    if preconditioner is not None and solver.no_preconditioner is not None:
        raise ValueError(f"solve(..., preconditioner): {solver.no_preconditioner}")
    solver = solver.set_up(system)
    rows, start = b.reshape(-1, n), None if x0 is None else x0.reshape(-1, n)
    work = _SystemSolver(system, solver, preconditioner, max_steps or min(10 * n, 10_000))
    run, scaled, scale, tolerance = work.run(rows, rtol, atol, start)
    x, product = run.x * scale, system.multiply(run.x.detach())
    status, residuals = _true_residuals(run.status, product, scaled, tolerance)
    results = tuple(RESULTS[int(index)] for index in to_list(status))
    if torch.is_grad_enabled():
        relative = (tolerance / length(scaled)).nan_to_num(0.0, posinf=0.0)
        rtol = max(rtol, float(relative.max()) if len(rows) else 0.0)
        x = work.attached(x, product * scale, rows, results, rtol, order)
    direction = run.direction.reshape(b.shape) if Result.NEGATIVE_CURVATURE in results else None
    norms = widened(residuals) * widened(scale.squeeze(1))
    steps, norms = (own.reshape(b.shape[:-1]) for own in (run.steps, norms))
    stats = Stats(results, steps, norms, system.matvecs, direction)
    if throw:
        raise_failure(CALL, stats)
    return Solution(x.reshape(b.shape), overall(results), stats)


@dataclass(frozen=True)
class _SystemSolver:
    """A system and the solver that was set up for it."""

    system: LinearSystem
    solver: Solver
    precondition: Rows | None
    max_steps: int

    def run(
        self, b: Tensor, rtol: float, atol: float = 0.0, x0: Tensor | None = None
    ) -> tuple[Run, Tensor, Tensor, Tensor]:
        """Solve without a graph for rows of size one, whose squares neither vanish nor overflow.

        Returns:
            The run, the scaled rows, their scales ``[k, 1]``, and the tolerances ``[k]``. Scales are powers of two.
        """
        with torch.no_grad():
            largest = widened(b.detach()).abs().amax(-1, keepdim=True)
            scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1).to(b.dtype)
            rows = b.detach() / scale
            tolerance = torch.maximum(rtol * length(rows), (atol / widened(scale)).to(b.dtype).squeeze(1))
            if x0 is not None:
                # A right-hand side of 0 starts from 0, because no residual is small relative to it.
                x0 = torch.where((rows != 0).any(-1, keepdim=True), x0.detach() / scale, 0.0)
            constant = self.system.constant
            products = constant if self.system.num_matrices is None else SeparateMatrices(constant)
            start = Start(rows, torch.zeros_like(rows), rows)
            if x0 is not None:
                start = Start(rows, x0, rows - products(x0))
            found = self.solver.run(products, start, self.precondition, tolerance, self.max_steps)
        return found, rows, scale, tolerance

    def attached(
        self, x: Tensor, product: Tensor, b: Tensor, results: Sequence[Result], rtol: float, order: int
    ) -> Tensor:
        """Make the solution differentiable by the implicit function theorem, if it holds."""
        for result in results:
            if result not in APPROXIMATE:
                sentence = (
                    f"{CALL}: the value is not a solution, so the implicit function theorem gives no derivative: "
                    f"{result.value}"
                )
                return refuse_derivatives(x, sentence, b, product)
        converges = all(result is Result.CONVERGED for result in results)

        def adjoint(g: Tensor) -> Tensor:
            """Solve for a cotangent."""
            run, _, scale, _ = self.run(g, rtol)
            found = {RESULTS[int(index)] for index in to_list(run.status)}
            for result in found:
                if result not in APPROXIMATE:
                    raise SolveError(f"{CALL}: the solve of its derivative failed: {result.value}")
            if converges and Result.MAX_STEPS in found:
                warn(
                    f"{CALL}: the solution converged and the solve of its derivative did not within "
                    f"{self.max_steps} steps. Raise max_steps, or rtol for both."
                )
            return run.x * scale

        products = self.system.multiply
        inverse = Inverse(products, adjoint, adjoint, order, products)  # of a symmetric map
        return attach_linear(products, inverse, b, x, product, order)


def _true_residuals(status: Tensor, product: Tensor, b: Tensor, tolerance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the status and the norms of the true residuals.

    A row has stagnated if it has converged only by the recurrence.
    """
    residuals = length(b - product)
    # In a correct solve, the sum of many small steps also differs from the recurrence by rounding.
    slack = 10 * tolerance + 10 * torch.finfo(b.dtype).eps * length(b)
    is_false = (status == RESULTS.index(Result.CONVERGED)) & (residuals > slack)
    return torch.where(is_false, RESULTS.index(Result.STAGNATED), status), residuals


def _solver(method: str | Solver) -> Solver:
    if isinstance(method, Solver):
        return method
    if method not in SOLVERS:
        known = ", ".join(f'"{name}"' for name in SOLVERS)
        raise ValueError(f"solve(..., method): expected one of {known} or a solver, got {method!r}.")
    return SOLVERS[method]()


def check_vector(name: str, vector: Tensor, operator: LinearMap, like: Tensor | None = None) -> None:
    """Raise unless a right-hand side, or a start for it, fits the operator."""
    n = operator.shape[0]
    if not is_a(vector, Tensor):
        raise TypeError(f"{CALL}: {name} must be a tensor, got {type(vector).__name__}.")
    count = getattr(operator, "num_matrices", None)
    expected = f"{[n]} or rows [k, {n}]" if count is None else f"rows {[count, n]}, one for each matrix"
    fits = vector.ndim in (1, 2) and vector.shape[-1] == n and count in (None, len(vector))
    if not fits or (like is not None and vector.shape != like.shape):
        expected = expected if like is None else f"{list(like.shape)} as b"
        raise ValueError(f"{CALL}: {name} must be {expected}, got {list(vector.shape)}.")
    for what, error in (("dtype", TypeError), ("device", ValueError)):
        got, expected = getattr(vector, what), getattr(operator, what)
        if got != expected:
            raise error(
                f"{CALL}: {name} must be of the operator's {what} {expected}, got {got}. Use {name}.to({expected})."
            )
    if is_batched(vector):
        raise ValueError(
            f"{CALL}: {name} has a dimension of vmap, under which rows cannot stop one by one. Pass rows [k, {n}]."
        )
    if not bool(vector.detach().isfinite().all()):
        raise ValueError(f"{CALL}: {name} has NaN or inf.")


def check_symmetric(call: str, name: str, operator: LinearMap, products: Rows, *, fix: str = _FIX) -> None:
    """Raise ``ValueError`` unless x^T A y and y^T A x agree on one random pair.

    An asymmetric map passes with probability 0. The numbers are drawn from a separate generator.
    """
    pair = draw_for(operator, 2, "normal", torch.Generator().manual_seed(0))
    with torch.no_grad():
        images = products(pair).detach()
    if images.shape != pair.shape:
        refuse(f"{call}: {name}", f"rows of the shape it receives, {tuple(pair.shape)}", tuple(images.shape))
    if not bool(images.isfinite().all()):
        return  # the solve reports it, with the row and the step
    forth, back = to_list(dot(pair, images.flip(0)))
    scale = float((norm(pair) * norm(images.flip(0))).sum())
    # For independent x and y, x^T A y has the size |x| |A y| / sqrt(n).
    tolerance = 10 * math.sqrt(torch.finfo(operator.dtype).eps) * scale / math.sqrt(operator.shape[0])
    if abs(forth - back) > tolerance:
        raise ValueError(
            f"{call}: {name} must be symmetric, but for random x and y, x^T A y = {forth:.6g} and "
            f"y^T A x = {back:.6g}. {fix}"
        )
