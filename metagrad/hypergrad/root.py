"""Roots and fixed points: iterations to them, and their derivatives by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol

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
from metagrad.curvature.linear_map import FACTORIZED, Rows, SeparateMatrices
from metagrad.curvature.solvers import methods
from metagrad.curvature.solvers.implicit import Inverse, attach, refuse_derivatives
from metagrad.curvature.solvers.methods import RESULTS, RUNNING, fill, is_finite, length
from metagrad.curvature.solvers.solution import Result, SolveError, overall
from metagrad.hypergrad.implicit import LOOSE

LinearSolver = Literal["gmres", "lu"]

_SUFFICIENT, _HALVINGS = 1e-4, 25  # decrease that a step must achieve, and how often it is halved


class Iterate(NamedTuple):
    """Rows with their residuals."""

    x: Tensor  # [k, n]
    f: Tensor  # [k, n]


class RootMethod(Protocol):
    """A method that computes the steps of an iteration."""

    def begin(self, f: Rows) -> Callable[[Iterate, Tensor], Iterate]:
        """Return a function that maps an iterate, and the mask of rows that still run, to the next iterate."""
        ...


def iterated(
    f: Rows, method: RootMethod, start: Iterate, tolerance: Tensor, max_steps: int
) -> tuple[Iterate, Tensor, Tensor]:
    """Iterate until the norm of the residual of each row is at most its tolerance, ``[k]``.

    Returns:
        The last iterate, and for each row the number of steps and the index into RESULTS, int64 ``[k]``.
    """
    step, now = method.begin(f), start
    status = methods.begun(now.f, tolerance)
    steps = torch.zeros_like(status)
    for _ in range(max_steps):
        active = status == RUNNING
        if not bool(active.any()):
            break
        found = step(now, active)
        has_moved = (found.x != now.x).any(-1)
        sound = active & is_finite(found.f) & is_finite(found.x)
        status = fill(status, active & ~sound, Result.NON_FINITE)
        status = fill(status, active & ~has_moved, Result.STAGNATED)
        now = Iterate(*(torch.where(sound[:, None], a, b) for a, b in zip(found, now, strict=True)))
        steps = steps + active
        status = fill(status, length(now.f) <= tolerance, Result.CONVERGED)
    return now, steps, methods.ended(status)


@dataclass(frozen=True)
class NewtonKrylov:
    r"""Newton's method with a line search. GMRES solves its systems :math:`\partial f(x) \, d = -f(x)`.

    A step is halved until :math:`|f|` decreases. The system of a step is solved to a tolerance that decreases
    with :math:`|f|`.

    Args:
        krylov_steps: Maximum number of products of a system.

    Raises:
        ValueError: The number is not positive.

    Example:
        >>> metagrad.hypergrad.root(lambda x: x**2 - 2, torch.tensor([1.0]),
        ...     method=metagrad.hypergrad.NewtonKrylov(krylov_steps=1)).value
        tensor([1.4142])

    References:
        Knoll, Keyes, "Jacobian-free Newton-Krylov methods", J. Comput. Phys. 193, 2004; Eisenstat, Walker, "Choosing
        the forcing terms in an inexact Newton method", SIAM J. Sci. Comput. 17, 1996, choice 2.
    """

    krylov_steps: int = 50

    def __post_init__(self) -> None:
        check_count("NewtonKrylov(krylov_steps)", self.krylov_steps)

    def begin(self, f: Rows) -> Callable[[Iterate, Tensor], Iterate]:
        """Return the step."""
        last: list[Tensor] = []

        def step(now: Iterate, active: Tensor) -> Iterate:
            size = length(now.f)
            forcing = 0.9 * (size / last[-1]).square() if last else torch.full_like(size, 0.1)
            last[:] = [size.clamp_min(torch.finfo(size.dtype).tiny)]
            right = torch.where(active[:, None], -now.f, 0.0)
            tolerance = forcing.clamp(1e-8, 0.1) * size
            d = methods.gmres(_jacobian(f, now.x), right, tolerance=tolerance, max_steps=self.krylov_steps).x
            return _searched(f, now, d, active)

        return step


@dataclass(frozen=True)
class Anderson:
    r"""Anderson's acceleration of :math:`x \leftarrow x + f(x)`, for fixed points :math:`f(x) = g(x) - x`.

    Args:
        memory: Number of earlier iterates that are combined.

    Raises:
        ValueError: The number is not positive.

    Example:
        >>> g = torch.cos
        >>> metagrad.hypergrad.fixed_point(g, torch.tensor([1.0]), method=metagrad.hypergrad.Anderson(memory=2)).value
        tensor([0.7391])

    References:
        Walker, Ni, "Anderson acceleration for fixed-point iterations", SIAM J. Numer. Anal. 49, 2011.
    """

    memory: int = 10

    def __post_init__(self) -> None:
        check_count("Anderson(memory)", self.memory)

    def begin(self, f: Rows) -> Callable[[Iterate, Tensor], Iterate]:
        """Return the step."""
        earlier: list[Iterate] = []

        def step(now: Iterate, active: Tensor) -> Iterate:
            x = now.x + now.f
            if earlier:
                changes = [Iterate(now.x - old.x, now.f - old.f) for old in earlier]
                dx, df = (torch.stack(parts, 1) for parts in zip(*changes, strict=True))
                weights = _least_squares(df, now.f)
                x = x - (weights[:, None] @ (dx + df))[:, 0]
            earlier.append(now)
            del earlier[: -self.memory]
            return Iterate(x, f(x))

        return step


@dataclass(frozen=True)
class Broyden:
    r"""Broyden's method from the Jacobian :math:`-I`, for fixed points :math:`f(x) = g(x) - x`.

    Args:
        memory: Number of updates, after which the method starts again from :math:`-I`.

    Raises:
        ValueError: The number is not positive.

    Example:
        >>> g = torch.cos
        >>> metagrad.hypergrad.fixed_point(g, torch.tensor([1.0]), method=metagrad.hypergrad.Broyden()).value
        tensor([0.7391])

    References:
        Broyden, "A class of methods for solving nonlinear simultaneous equations", Math. Comp. 19, 1965, method 1.
    """

    memory: int = 50

    def __post_init__(self) -> None:
        check_count("Broyden(memory)", self.memory)

    def begin(self, f: Rows) -> Callable[[Iterate, Tensor], Iterate]:
        """Return the step."""
        pairs: list[tuple[Tensor, Tensor]] = []  # the inverse is -I plus products of columns and rows

        def step(now: Iterate, active: Tensor) -> Iterate:
            x = now.x - sum(((v * now.f).sum(-1, True) * u for u, v in pairs), -now.f)
            found = Iterate(x, f(x))
            s, y = found.x - now.x, found.f - now.f
            image = sum(((v * y).sum(-1, True) * u for u, v in pairs), -y)
            row = sum(((s * u).sum(-1, True) * v for u, v in pairs), -s)
            product = (s * image).sum(-1, True)
            is_sound = product.abs() > torch.finfo(s.dtype).tiny
            if len(pairs) == self.memory:  # later pairs depend on the first one
                pairs.clear()
            else:
                column = (s - image) / torch.where(is_sound, product, 1.0)
                pairs.append((torch.where(is_sound, column, 0.0), row))
            return found

        return step


def _jacobian(f: Rows, x: Tensor) -> Rows:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        graph = Recorded("root(f, x0)", [f(leaf)], {"x": leaf})
    return lambda rows: graph.push(rows.reshape(-1)).view_as(rows)


def _searched(f: Rows, now: Iterate, d: Tensor, active: Tensor) -> Iterate:
    """Halve the step of each row until its residual decreases. A row without a decrease does not change."""
    size, lengths = length(now.f), torch.ones_like(length(now.f))
    found, is_done = now, ~active
    for _ in range(_HALVINGS):
        x = now.x + torch.where(is_done, 0.0, lengths)[:, None] * d
        f_x = f(x)
        is_lower = ~is_done & (length(f_x) <= (1 - _SUFFICIENT * lengths) * size)
        found = Iterate(*(torch.where(is_lower[:, None], a, b) for a, b in zip((x, f_x), found, strict=True)))
        is_done = is_done | is_lower
        if bool(is_done.all()):
            break
        lengths = torch.where(is_done, lengths, lengths / 2)
    return found


def _least_squares(rows: Tensor, b: Tensor) -> Tensor:
    """Return the weights [k, m] of rows [k, m, n] whose sum is nearest to b [k, n]."""
    dtype, rows, b = b.dtype, rows.double(), b.double()
    scale = linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    rows = rows / scale
    gram = rows @ rows.mT + 1e-14 * torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    weights = linalg.solve(gram, rows @ b[:, :, None]) / scale
    return weights[:, :, 0].to(dtype)


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
        The derivative at a row that did not converge gives a warning if the norm of f fell to a hundredth of its
        start, and raises an error otherwise.

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
        return methods.matrices_of(SeparateMatrices(partial(self._products, transposed=True)), self._root)

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
        run = methods.gmres(
            partial(self._products, transposed=transposed), g, tolerance=tolerance, max_steps=most
        )
        failed = {RESULTS[int(index)] for index in run.status} - {Result.CONVERGED}
        if failed:
            raise SolveError(
                f"{self.call}: the linear solve of its derivative failed ({failed.pop().name}). The Jacobian may be "
                'singular or badly conditioned. Take solver="lu", a larger rtol, or another root.'
            )
        return run.x
