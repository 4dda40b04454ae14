"""Roots and fixed points with derivatives of any order, by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.autograd.derivatives.recorded import Recorded, rows_of, tensors_of
from metagrad.core._torch import linalg
from metagrad.core.capture import RandomState
from metagrad.core.checks import check_choice, check_count, check_function, check_number, is_a, refuse, warn
from metagrad.core.norms import every_order
from metagrad.core.reach import ReachableObjects
from metagrad.core.substitution import checked_reruns, own_buffers
from metagrad.core.tape import refuse_transforms
from metagrad.core.tree import Tree, tree_flatten, tree_unflatten
from metagrad.curvature.linear_map import FACTORIZED, SeparateMatrices
from metagrad.curvature.solvers.implicit import Inverse, attach, refuse_derivatives
from metagrad.curvature.solvers.methods import RESULTS, gmres, length, matrices_of
from metagrad.curvature.solvers.solution import Result, SolveError, overall
from metagrad.hypergrad.implicit import LOOSE
from metagrad.hypergrad.iterations import Anderson, Iterate, NewtonKrylov, RootMethod, iterated

LinearSolver = Literal["gmres", "lu"]


class RootStats(NamedTuple):
    """Cost and results of a root.

    Attributes:
        results: The result of each row.
        steps: Steps of each row, int64 [k].
        residual_norms: Norms of f at the end, [k].
        evaluations: Evaluations of f for all rows together, without derivatives.
    """

    results: tuple[Result, ...]
    steps: Tensor
    residual_norms: Tensor
    evaluations: int


@dataclass(frozen=True, eq=False)
class Root:
    """The result of :func:`root` and :func:`fixed_point`.

    Attributes:
        value: The root, in the form of the start. Differentiable.
        result: The result of the solve. For several rows, the first failure if there is one.
        stats: Steps, residuals and evaluations.
    """

    value: Any
    result: Result
    stats: RootStats

    def __repr__(self) -> str:
        return f"Root({self.result.name}: {int(self.stats.steps.max())} steps, {self.stats.evaluations} evaluations)"


def root(
    f: Callable[[Any], Any],
    x0: Tree,
    *,
    method: RootMethod | None = None,
    order: int = 1,
    solver: LinearSolver = "gmres",
    rtol: float = 1e-6,
    atol: float = 0.0,
    max_steps: int = 100,
    batch_ndim: Literal[0, 1] = 0,
    throw: bool = False,
    call: str = "root(f, x0)",
) -> Root:
    r"""Find a root of a function, with its derivatives by the implicit function theorem.

    .. math:: f(x^*, \theta) = 0, \qquad
              \frac{dx^*}{d\theta} = -\left( \frac{\partial f}{\partial x} \right)^{-1}
              \frac{\partial f}{\partial \theta}

    :math:`\theta` is every tensor that requires grad and that ``f`` uses. A backward pass costs one linear solve with
    the transposed Jacobian, for any ``order``. The way in which the root was found does not matter.

    Args:
        f: A deterministic function that maps a tensor, or a pytree of tensors, to values of the same shapes.
        x0: The start, a constant.
        method: ``NewtonKrylov()`` by default. ``Anderson`` and ``Broyden`` are for functions that are close to
            ``g(x) - x``.
        order: How often the root can be differentiated. Each order keeps the graph of one evaluation.
        solver: ``"gmres"``, or ``"lu"``, which materializes the dense Jacobian.
        rtol: Rows stop at this norm of f, relative to the norm at the start. It is also the relative residual of the
            linear solves of derivatives.
        atol: Rows also stop at this norm of f.
        max_steps: Maximum number of steps.
        batch_ndim: 1 for independent roots: all tensors are ``[k, ...]``, and row i of the values depends only on row
            i. Rows stop independently.
        throw: Raise an error if a row does not converge.
        call: Name of the caller in errors.

    Raises:
        ValueError: An argument is out of its range, or the values of ``f`` differ in shape from ``x0``.
        TypeError: ``f`` is not callable, or the tensors of ``x0`` are not all float32 or all float64.
        SolveError: With ``throw``, a row did not converge. In a backward pass, the linear solve failed, for
            example because the Jacobian is singular.

    Note:
        If a row does not converge, its norm of f may be at most a hundredth of the norm at the start, which gives a
        warning. Otherwise a derivative raises an error.

    Example:
        The root of :math:`x^2 = \theta` has the second derivative :math:`-\theta^{-3/2} / 4`:

        >>> theta = torch.tensor([4.0], requires_grad=True)
        >>> found = metagrad.hypergrad.root(lambda x: x**2 - theta, torch.tensor([1.0]), order=2)
        >>> (first,) = torch.autograd.grad(found.value.sum(), theta, create_graph=True)
        >>> (second,) = torch.autograd.grad(first.sum(), theta)
        >>> found.value.item(), first.item(), second.item()
        (2.0, 0.25, -0.03125)

    References:
        Griewank, Walther, "Evaluating derivatives", 2008, chapter 15; Bai, Kolter, Koltun, "Deep equilibrium
        models", NeurIPS 2019; Blondel et al., "Efficient and modular implicit differentiation", NeurIPS 2022.
    """
    problem = RootProblem(call, f, x0, batch_ndim, order, solver, rtol)
    if method is not None and (isinstance(method, type) or not hasattr(method, "begin")):
        refuse(f"{call}: method", "a method such as metagrad.hypergrad.Anderson()", method, TypeError)
    check_count(f"{call}, max_steps", max_steps)
    check_number(f"{call}: atol", atol, 0.0)
    with torch.no_grad():
        start = Iterate(problem.start, problem.residual(problem.start))
        first = length(start.f)
        tolerance = (rtol * first).clamp_min(atol)
        end, steps, status = iterated(problem.residual, method or NewtonKrylov(), start, tolerance, max_steps)
    results = tuple(RESULTS[int(index)] for index in status)
    result, x, norms = overall(results), end.x, length(end.f)
    stats = RootStats(results, steps, norms, problem.evaluations)
    if not result.is_success:
        row = results.index(result)
        failure = f"{call}: row {row} of {len(results)}, |f| = {float(norms[row]):.3g}: {result.value}"
        if throw:
            raise SolveError(failure)
        if torch.is_grad_enabled() and not bool((norms <= LOOSE * first).all()):
            sentence = (
                f"{failure} The value is no root, so the implicit function theorem gives no derivative."
            )
            return Root(problem.tree(refuse_derivatives(x, sentence, problem.residual(x))), result, stats)
        if torch.is_grad_enabled():
            warn(f"{failure} The derivative is as far from that of the root as the value.")
    return Root(problem.tree(problem.attached(x)), result, stats)


def fixed_point(
    g: Callable[[Any], Any], z0: Tree, *, method: RootMethod | None = None, **options: Any
) -> Root:
    r"""Find a fixed point :math:`z = g(z)`, with its derivatives: the root of :math:`g(z) - z`.

    Args:
        g: A deterministic function that maps a tensor or pytree to values of the same shapes.
        z0: The start, a constant.
        method: ``Anderson()`` by default, ``Broyden()`` or ``NewtonKrylov()``.
        **options: As for :func:`root`.

    Raises:
        ValueError: As for :func:`root`.
        TypeError: As for :func:`root`.
        SolveError: As for :func:`root`.

    Example:
        The minimum of :math:`(z - 2)^2` for :math:`z \le \theta`, by projected gradient steps:

        >>> theta = torch.tensor([1.0], requires_grad=True)
        >>> def step(z): return torch.minimum(z - 0.25 * 2 * (z - 2), theta)
        >>> z = metagrad.hypergrad.fixed_point(step, torch.tensor([0.0])).value
        >>> z.item(), torch.autograd.grad(z.sum(), theta)[0].item()
        (1.0, 1.0)

    References:
        Bai, Kolter, Koltun, "Deep equilibrium models", NeurIPS 2019.
    """
    call = "fixed_point(g, z0)"
    check_function(call, "g", g)

    def f(z: Any) -> Any:
        leaves, form = tree_flatten(z)
        values = _leaves_like(call, g(z), leaves, form)
        return tree_unflatten([a - b for a, b in zip(values, leaves, strict=True)], form)

    return root(f, z0, method=Anderson() if method is None else method, call=call, **options)


def implicit_root(
    f: Callable[[Any], Any],
    x: Tree,
    *,
    order: int = 1,
    solver: LinearSolver = "gmres",
    rtol: float = 1e-6,
    batch_ndim: Literal[0, 1] = 0,
) -> Any:
    """Attach derivatives to a root that was found by other means.

    Args:
        f: As for :func:`root`.
        x: The root, a tensor or pytree, a constant.
        order: As for :func:`root`.
        solver: As for :func:`root`.
        rtol: Relative residual of the linear solves of derivatives.
        batch_ndim: As for :func:`root`.

    Returns:
        The same values, differentiable. If ``x`` is no root, the derivative is wrong. A warning names a row with a
        larger norm of f than the change of f when random entries of ``x`` grow or shrink by 1 %.

    Raises:
        ValueError: As for :func:`root`.
        TypeError: As for :func:`root`.
        SolveError: In a backward pass, the linear solve failed.

    Example:
        >>> theta = torch.tensor([9.0], requires_grad=True)
        >>> x = metagrad.hypergrad.implicit_root(lambda x: x**2 - theta, torch.tensor([3.0]))
        >>> torch.autograd.grad(x.sum(), theta)[0]  # 1 / (2 * 3)
        tensor([0.1667])

    References:
        Griewank, Walther, "Evaluating derivatives", 2008, chapter 15.
    """
    problem = RootProblem("implicit_root(f, x)", f, x, batch_ndim, order, solver, rtol)
    return problem.tree(problem.attached(problem.start, is_given=True))


def _leaves_like(call: str, values: Tree, leaves: list[Tensor], form: object) -> list[Tensor]:
    """Return the leaves of values. Raise ``ValueError`` if their form or their shapes differ from the start."""
    found, found_form = tree_flatten(values)
    shapes, expected = [[tuple(leaf.shape) for leaf in own] for own in (found, leaves)]
    if found_form != form or shapes != expected:
        raise ValueError(
            f"{call}: the values of the function must have the form and shapes of the start, {form} with {expected}, "
            f"got {found_form} with {shapes}."
        )
    return found


@dataclass(eq=False)
class RootProblem:
    """A function of pytrees as one of rows ``[k, n]``, one for each independent root, and its inverse at a root."""

    call: str
    f: Callable[[Any], Any]
    x: Tree
    batch_ndim: int
    order: int
    solver: LinearSolver
    rtol: float
    evaluations = 0

    def __post_init__(self) -> None:
        call = self.call
        check_function(call, "f", self.f)
        check_choice(f"{call}: solver", self.solver, ("gmres", "lu"))
        check_number(f"{call}: rtol", self.rtol, 0.0)
        check_choice(f"{call}: batch_ndim", self.batch_ndim, (0, 1))
        check_count(f"{call}, order", self.order)
        refuse_transforms(call)
        leaves, self._form = tree_flatten(self.x)
        dtypes: set[object] = {leaf.dtype if is_a(leaf, Tensor) else type(leaf) for leaf in leaves}
        if len(dtypes) != 1 or not dtypes <= {*FACTORIZED}:
            raise TypeError(
                f"{call}: the start must be a tensor, or a pytree of floating point tensors, all float32 or all "
                f"float64, got {', '.join(map(str, dtypes)) or 'no tensor'}. Convert it, as by x0.float()."
            )
        rows = {leaf.shape[: self.batch_ndim] for leaf in leaves}
        if len(rows) > 1 or (rows == {()} and self.batch_ndim):
            refuse(call, "tensors [k, ...], since batch_ndim=1", [*map(list, rows)])
        self._leaves = [leaf.detach() for leaf in leaves]
        self._k = leaves[0].shape[0] if self.batch_ndim else 1
        self.start: Tensor = rows_of(self._leaves, self._k)
        self._modules = ReachableObjects(self.f).modules
        self._random = RandomState()

    def tree(self, rows: Tensor) -> Any:
        """Return rows in the form of the start."""
        return tree_unflatten(tensors_of(rows, self._leaves), self._form)

    def residual(self, rows: Tensor) -> Tensor:
        """Evaluate f. Every evaluation draws the same random numbers, and buffers do not change."""
        self.evaluations += 1
        training = (module for module in self._modules if module.training)
        higher = every_order() if self.order > 1 else nullcontext()
        with own_buffers(training), checked_reruns(self.call), self._random.restored(), higher:
            values = self.f(self.tree(rows))
            if self.evaluations == 1:
                self._random.close()  # other generators are not set back
        return rows_of(_leaves_like(self.call, values, self._leaves, self._form), self._k)

    def attached(self, x: Tensor, *, is_given: bool = False) -> Tensor:
        """Return the root with its derivatives. Warn if a given root is far from a root."""
        x = x.detach()
        if not torch.is_grad_enabled():
            return x
        residual = self.residual(x)
        if not residual.requires_grad:
            return x
        if is_given:
            self._warn_if_far(x, residual.detach())
        self._root = x
        call = f"{self.call[:-1]}, order={{}})"
        solve_transposed = partial(self.solve, transposed=False)
        inverse = Inverse(self.residual, self.solve, solve_transposed, self.order, None, call)
        return attach(inverse, x, residual, self.order)

    def _warn_if_far(self, x: Tensor, residual: Tensor) -> None:
        signs = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype).sign()
        with torch.no_grad():
            change = length(self.residual(x + LOOSE * signs.to(x.device) * x) - residual)
        norms = length(residual)
        far = (norms > change) & (change > 0)
        if bool(far.any()):
            row = int(far.int().argmax())
            warn(
                f"{self.call}: x is no root, so its derivative is wrong. In row {row} of {len(far)}, |f| is "
                f"{float(norms[row]):.3g}, and a change of x by 1 % changes f by {float(change[row]):.3g}. Solve for "
                "x more accurately."
            )

    @cached_property
    def _graph(self) -> Recorded:
        with torch.enable_grad():
            leaf = self._root.detach().requires_grad_()
            return Recorded(self.call, [self.residual(leaf)], {"x": leaf})

    @cached_property
    def _transposed_matrix(self) -> Tensor:
        return matrices_of(SeparateMatrices(partial(self._products, transposed=True)), self._root)

    def _products(self, rows: Tensor, *, transposed: bool) -> Tensor:
        """Multiply rows with minus the Jacobian, or with its transpose, without a graph."""
        product = self._graph.pull if transposed else self._graph.push
        return -product(rows.reshape(-1)).view(rows.shape)

    def solve(self, g: Tensor, *, transposed: bool = True) -> Tensor:
        """Solve with the transpose of minus the Jacobian, without a graph."""
        g = g.detach()
        if self.solver == "lu":
            matrix = self._transposed_matrix if transposed else self._transposed_matrix.mT
            found, info = linalg.solve_ex(matrix, g[:, :, None])
            if bool(info.any()):
                raise SolveError(
                    f"{self.call}: the Jacobian at the root is singular, so it has no derivative."
                )
            return found[:, :, 0]
        tolerance = max(self.rtol, torch.finfo(g.dtype).eps) * length(g)
        most = min(10 * g.shape[1], 10_000)
        run = gmres(partial(self._products, transposed=transposed), g, tolerance=tolerance, max_steps=most)
        failed = {RESULTS[int(index)] for index in run.status} - {Result.CONVERGED}
        if failed:
            raise SolveError(
                f"{self.call}: the linear solve of its derivative failed ({failed.pop().name}). The Jacobian may be "
                'singular or badly conditioned. Take solver="lu", a larger rtol, or another root.'
            )
        return run.x
