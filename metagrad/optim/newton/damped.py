"""Damped Newton steps: their linear systems, and a damping that follows the ratio of reduction."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.core.tree import widened
from metagrad.curvature.rows import dot
from metagrad.curvature.solvers.iteration import divide
from metagrad.optim.curvature import Diagonal, checked_diagonal
from metagrad.optim.hyperparameters import check_count, is_used
from metagrad.optim.newton.krylov import Krylov, Pairs, check_solver, conjugate_gradients
from metagrad.optim.newton.lbfgs import two_loop
from metagrad.optim.newton.second_order import (
    GOOD,
    LEAST_FACTOR,
    MOST_FACTOR,
    POOR,
    NewtonStep,
    Report,
    RowSpace,
    SecondOrder,
    StepProblem,
    no_report,
)
from metagrad.optim.rule import Hyperparameter, Params, functional_optimizer, hyperparameter, option

_SUFFICIENT = 1e-4  # the part of the slope that a line search asks for
_HALVINGS = 30
_FIRST = 0.1  # of the curvature along a step: the damping that begins where there was none


class DampedState(NamedTuple):
    """The state of a damped rule; numbers are ``[]``, or ``[tasks]``.

    Attributes:
        step: Steps taken.
        solution: Of the last system, in the shapes of the parameters: where the next one begins.
        moves: Search directions of its solve, ``[tasks, pairs, ...]``; None if each step solves.
        changes: Their products with its matrix, likewise.
        factor: Of the damping: what the ratios of reduction have made of 1.
        added: To the damping, where that is 0 and the ratio asks for some.
        report: What the last step did.
    """

    step: int
    solution: Params
    moves: Params | None
    changes: Params | None
    factor: Tensor
    added: Tensor
    report: Report


@functional_optimizer
class Damped(SecondOrder):
    r"""A rule of steps :math:`-(B + \lambda I)^{-1} g` with a symmetric matrix B, whose damping follows the ratio.

    The damping may differ between parameters, by a dict.

    At every ``curvature_every``-th step, by conjugate gradients. At the others, by the limited-memory BFGS matrix of
    the pairs :math:`p_i`, :math:`(B + \lambda I) p_i` that these went through, which costs no product. The pairs are
    conjugate, so that on what those kept span it is the inverse of :math:`B + \lambda I`.

    Its fields are those of every rule of this kind; a subclass gives other defaults where it has them.
    """

    by_parameter = (*SecondOrder.by_parameter, "damping")
    diagonal: ClassVar[Literal["hessian", "gauss_newton"]]
    """Which estimate there is of the diagonal of B."""
    _: KW_ONLY
    damping: Hyperparameter = hyperparameter(
        default=1e-3,
        doc=r":math:`\lambda_0`; a schedule of it is multiplied by what the ratios have made of 1.",
    )
    warm_start: Hyperparameter = hyperparameter(
        default=0.0,
        doc="Conjugate gradients begin at so much of their last solution, at the cost of one product; 0 begins at 0, "
        "Martens at the whole of it.",
    )
    rtol: float = option(
        default=1e-10, doc="Conjugate gradients end at this residual, relative to the gradient."
    )
    progress: float | None = option(
        default=5e-4,
        doc="They end when the model falls by less than this for each step (Martens' rule); None never does.",
    )
    max_steps: int = option(default=250, doc="The most steps of conjugate gradients.")
    curvature_every: int = option(
        default=1, doc="Steps from one solve to the next; the first step makes one."
    )
    pairs: int = option(
        default=16,
        doc="How many pairs of a solve are kept for the steps up to the next, evenly over its steps; one of "
        "them is as large as the parameters twice.",
    )
    preconditioner: Literal["diagonal"] | None = option(
        default=None,
        doc=r'``"diagonal"`` is :math:`(|D| + \lambda_t I)^\alpha`, with an estimate :math:`D` of the diagonal at '
        r"each solve, of the Hessian by Hutchinson's probes, of other matrices by gradients of the loss with labels "
        r"drawn from the model: for parameters of different scales.",
    )
    exponent: Hyperparameter = hyperparameter(
        default=0.75, doc=r"Its :math:`\alpha`; 1 would be Jacobi's, and trusts the estimate more."
    )
    samples: int = option(
        default=8,
        doc="How many probes, or draws of the labels, the estimate is the mean of; one costs a product, or a "
        "gradient.",
    )
    adapt: bool = option(
        default=True,
        doc="Look at the loss at the end of a step, for the damping and the length, which costs a forward pass or "
        "more; else both are constant, and a step may climb.",
    )
    change: float = option(default=3.0, doc="The factor of the damping, above 1.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_solver(self.call, self.rtol, self.progress, self.max_steps)
        for name in ("curvature_every", "pairs", "samples"):
            check_count(self.call, name, getattr(self, name))
        if self.preconditioner not in (None, "diagonal"):
            raise ValueError(
                f'{self.call}: preconditioner must be "diagonal" or None, got {self.preconditioner!r}.'
            )
        if not self.change > 1:
            raise ValueError(f"{self.call}: change must be above 1, got {self.change}.")

    def needs_curvature(self, step: int) -> bool:
        """Say whether the step, of which the first is 0, takes products or looks at the loss again."""
        return self.adapt or self.multiplies(step)

    def multiplies(self, step: int) -> bool:
        """Say whether the step takes products with the curvature."""
        return step % self.curvature_every == 0

    def _solved(
        self, problem: StepProblem, damping: Tensor, state: DampedState
    ) -> tuple[Krylov, DampedState]:
        """Solve the system of a step; the damping is ``[tasks, 1]`` or ``[tasks, n]``."""
        metric = None if self.preconditioner is None else self._metric(problem, damping, state.step)
        run = conjugate_gradients(
            lambda rows: problem.products(rows) + damping * rows,
            -problem.g,
            x0=self._start(problem, state),
            metric=metric,
            pairs=0 if self.curvature_every == 1 else self.pairs,
            rtol=self.rtol,
            progress=self.progress,
            max_steps=self.max_steps,
        )
        if metric is not None and self.diagonal == "hessian":
            run = run._replace(products=run.products + self.samples)
        moves, changes = self._remembered(run.pairs, state)
        return run, state._replace(solution=problem.space.tensors(run.x), moves=moves, changes=changes)

    def recalled(self, problem: StepProblem, state: DampedState) -> Tensor:
        """Return the quasi-Newton direction by the pairs of the last solve, ``[tasks, n]``; see :func:`two_loop`."""
        num_tasks = len(problem.g)
        return two_loop(problem.g, self._rows(state.moves, num_tasks), self._rows(state.changes, num_tasks))

    def _start(self, problem: StepProblem, state: DampedState) -> Tensor | None:
        decay = self.value("warm_start", state.step)
        if state.step == 0 or not is_used(decay):
            return None
        return problem.space.each(decay)[:, None] * problem.space.rows(state.solution)

    def _metric(self, problem: StepProblem, damping: Tensor, step: int) -> Tensor:
        r"""Return Martens' preconditioner :math:`(D + \lambda I)^\alpha`, ``[tasks, n]``."""
        request, space = Diagonal(self.diagonal, self.samples), problem.space
        if not hasattr(problem.objective, "diagonal"):
            raise TypeError(
                f'{self.call}.update: preconditioner="diagonal" needs an estimate of the diagonal, and '
                f"{type(problem.objective).__name__} has no diagonal(request). Set preconditioner=None."
            )
        found = checked_diagonal(self.call, problem.objective, request, space.params)
        missing = [key for key, estimate in found.items() if estimate is None]
        if missing:
            raise ValueError(
                f'{self.call}.update: preconditioner="diagonal" needs an estimate for every parameter, and '
                f"{type(problem.objective).__name__}.diagonal({request}) has none of {missing}."
            )
        damped = space.rows(found).abs() + damping  # type: ignore[arg-type]
        damped = damped if problem.decay is None else damped + problem.decay
        # Where the loss is flat and nothing is damped, 1 leaves the gradient as it is.
        return torch.where(damped == 0, 1.0, damped) ** space.each(self.value("exponent", step))[:, None]

    def _remembered(self, pairs: Pairs, state: DampedState) -> tuple[Params | None, Params | None]:
        """Return the pairs of a solve; a solve that took no step along positive curvature leaves those before it."""
        if self.curvature_every == 1:
            return None, None
        is_new = dot(pairs.moves[-1], pairs.changes[-1]) > 0
        moves = self._updated(pairs.moves, state.moves, is_new)
        return moves, self._updated(pairs.changes, state.changes, is_new)

    def _updated(self, new: tuple[Tensor, ...], old: Params | None, is_new: Tensor) -> Params:
        rows = torch.stack(new, 1)
        before = self._rows(old, len(rows))
        if before.shape != rows.shape:
            raise ValueError(
                f"{self.call}.update: the state has {before.shape[1]} pairs, and the rule has pairs={self.pairs}. "
                "Begin again with rule.init(params)."
            )
        kept = torch.where(is_new[:, None, None], rows, before)
        return self._space(old).tensors(kept.flatten(0, 1))

    def _rows(self, pairs: Params | None, num_tasks: int) -> Tensor:
        """Write pairs as ``[tasks, pairs, n]``."""
        space = self._space(pairs)
        return space.rows(space.params).unflatten(0, (num_tasks, -1))

    def _space(self, pairs: Params | None) -> RowSpace:
        assert pairs is not None, "a state has pairs where some steps take no products"
        return RowSpace(pairs, self.batch_ndim + 1)

    def init(self, params: Params) -> Any:
        """Return the state before the first step."""
        factor, b, pairs = self.begun(params, 1.0), self.batch_ndim, None
        zeros = {key: torch.zeros_like(widened(p)) for key, p in params.items()}
        if self.curvature_every > 1:
            pairs = {key: p.new_zeros((*p.shape[:b], self.pairs, *p.shape[b:])) for key, p in zeros.items()}
        return DampedState(0, zeros, pairs, pairs, factor, torch.zeros_like(factor), no_report(factor))

    def stepped(self, problem: StepProblem, state: DampedState) -> tuple[Params, Any]:
        """Solve a system, or go along the direction by the pairs of the last."""
        return (self._solved_step if self.multiplies(state.step) else self._recalled_step)(problem, state)

    def bound(self, problem: StepProblem, step: NewtonStep, number: int) -> Tensor:
        """Return how much of a step is allowed, ``[tasks]``, before the loss is looked at."""
        return torch.ones_like(step.slope)

    def _solved_step(self, problem: StepProblem, state: DampedState) -> tuple[Params, Any]:
        each = problem.space.each
        factor, added = each(state.factor), each(state.added)
        given = self.column("damping", state.step, problem.space)
        damping = factor[:, None] * given + added[:, None]
        run, state = self._solved(problem, damping, state)
        slope = dot(problem.g, run.x)
        curved = 2 * (run.model - slope) - dot(run.x, damping * run.x)  # x^T B x
        # Where curvature is negative an iterate may climb at first, and its opposite has the same model and descends.
        sign = torch.where(slope > 0, -1.0, torch.ones_like(slope))
        step = problem.step(sign[:, None] * run.x, curved)
        length = self.bound(problem, step, state.step)
        step, ratio = step.times(length), None
        if self.adapt:
            after = problem.after(step.d)
            ratio = problem.ratio(after, step.predicted)
            factor, added = self._adapted(factor, added, damping, ratio, step)
            found = searched(problem, step, after)
            step, length = step.times(found), found * length
        report = problem.report(run, ratio, length, products=problem.products_of_step)
        factor, added = problem.for_task(factor), problem.for_task(added)
        return problem.moved(step.d), state._replace(
            step=state.step + 1, factor=factor, added=added, report=report
        )

    def _recalled_step(self, problem: StepProblem, state: DampedState) -> tuple[Params, Any]:
        d = self.recalled(problem, state)
        s = problem.scaled(d)
        # With the matrix of BFGS, -g^T d is its d^T (B + damping I) d.
        step = NewtonStep(s, dot(problem.g, s), problem.lr.amax(1) ** 2 * -dot(problem.g, d))
        length = self.bound(problem, step, state.step)
        step = step.times(length)
        if self.adapt:
            found = searched(problem, step, problem.after(step.d))
            step, length = step.times(found), found * length
        return problem.moved(step.d), state._replace(
            step=state.step + 1, report=problem.report(None, None, length)
        )

    def _adapted(
        self, factor: Tensor, added: Tensor, damping: Tensor, ratio: Tensor, step: NewtonStep
    ) -> tuple[Tensor, Tensor]:
        """Levenberg's and Marquardt's heuristic: more damping after a poor step, less after a good one."""
        # Scalars alone would give numbers in float32.
        change = torch.where(ratio > GOOD, 1 / self.change, torch.ones_like(factor))
        change = torch.where(ratio < POOR, self.change, change)
        begins = (ratio < POOR) & (damping == 0).any(1)
        ss = dot(step.d, step.d)
        first = _FIRST * divide(step.curved.abs(), ss, where=ss > 0)
        factor = (factor * change).clamp(LEAST_FACTOR, MOST_FACTOR)
        return factor, torch.where(begins, first, added * change)


def searched(problem: StepProblem, step: NewtonStep, after: Tensor) -> Tensor:
    """Halve steps until the loss has fallen by enough; a length is constant where it does not jump."""
    slope = step.slope.detach()
    length = torch.ones_like(slope)
    for _ in range(_HALVINGS):
        enough = after <= problem.before + _SUFFICIENT * length * slope + problem.slack
        if bool(enough.all()):
            return length
        length = torch.where(enough, length, length / 2)
        after = problem.after(length[:, None] * step.d)
    enough = after <= problem.before + _SUFFICIENT * length * slope + problem.slack
    return torch.where(enough, length, 0.0)
