"""Damped Newton steps by conjugate gradients, and how the damping follows the ratio of reduction."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metagrad.curvature.solvers.iteration import divide, dot
from metagrad.optim.newton.newton_system import Memory, NewtonSystem
from metagrad.optim.newton.second_order import (
    LEAST_FACTOR,
    MOST_FACTOR,
    Problem,
    Report,
    Step,
    check_can_evaluate,
    no_report,
)
from metagrad.optim.rule import Params

_POOR, _GOOD = 0.25, 0.75  # ratios below and above which a model is trusted less, and more
_SUFFICIENT = 1e-4  # the part of the slope that a line search asks for
_HALVINGS = 30
_FIRST = 0.1  # of the curvature along a step: the damping that begins where there was none


class DampedState(NamedTuple):
    """What a damped rule carries from step to step; numbers are ``[]``, or ``[tasks]``."""

    step: int  # steps taken
    solution: Params  # of the last system, in the shapes of the parameters: where the next one begins
    moves: Params | None  # search directions of its solve, [tasks, pairs, ...]; None if each step solves
    changes: Params | None  # their products with its matrix, likewise
    factor: Tensor  # of the damping: what the ratios of reduction have made of 1
    added: Tensor  # to the damping, where that is 0 and the ratio asks for some
    report: Report  # what the last step did

    @property
    def memory(self) -> Memory:
        """What is remembered of the last system."""
        return Memory(self.solution, self.moves, self.changes)


class Damped(NewtonSystem):
    r"""A rule of steps :math:`-(B + \lambda I)^{-1} g`, whose damping follows the ratio of reduction.

    A subclass is a frozen dataclass with the fields below, and those of
    :class:`~metagrad.optim.newton.newton_system.NewtonSystem`.
    """

    matrix: ClassVar[str]
    """The products of the curvature that multiply B."""
    adapt: bool
    change: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.change > 1:
            raise ValueError(f"{self.call}: change must be above 1, got {self.change}.")

    def needs_curvature(self, step: int) -> bool:
        """Say whether the step, of which the first is 0, takes products or looks at the loss again."""
        return self.adapt or self.multiplies(step)

    def init(self, params: Params) -> Any:
        """Return the state before the first step."""
        factor = self.begun(params, 1.0)
        return DampedState(0, *self.no_memory(params), factor, torch.zeros_like(factor), no_report(factor))

    def update(
        self, grads: Params, state: DampedState, params: Params, curvature: object | None = None
    ) -> tuple[Params, Any]:
        """Take one step; ``curvature`` is an :class:`~metagrad.optim.objective.Objective`."""
        if not params:
            return {}, state._replace(step=state.step + 1)
        problem = self.problem(grads, params, curvature, self.matrix_of(state.step), state.step)
        if self.adapt:
            check_can_evaluate(self.call, curvature, "set adapt=False")
        return (self._solved_step if self.multiplies(state.step) else self._recalled_step)(problem, state)

    def matrix_of(self, step: int) -> str | None:
        """Return the products that a step takes, None of one that takes none."""
        return self.matrix if self.multiplies(step) else None

    def bound(self, problem: Problem, step: Step, number: int) -> Tensor:
        """Return how much of a step is allowed, ``[tasks]``, before the loss is looked at."""
        return torch.ones_like(step.slope)

    def _solved_step(self, problem: Problem, state: DampedState) -> tuple[Params, Any]:
        each = problem.space.each
        factor, added = each(state.factor), each(state.added)
        given = self.column("damping", state.step, problem.space)
        damping = factor[:, None] * given + added[:, None]
        run, memory = self.solved(problem, damping, state.step, state.memory)
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
        return problem.moved(step.d), DampedState(
            state.step + 1, *memory, problem.for_task(factor), problem.for_task(added), report
        )

    def _recalled_step(self, problem: Problem, state: DampedState) -> tuple[Params, Any]:
        d = self.recalled(problem, state.memory)
        s = problem.scaled(d)
        # With the matrix of BFGS, -g^T d is its d^T (B + damping I) d.
        step = Step(s, dot(problem.g, s), problem.lr.amax(1) ** 2 * -dot(problem.g, d))
        length = self.bound(problem, step, state.step)
        step = step.times(length)
        if self.adapt:
            found = searched(problem, step, problem.after(step.d))
            step, length = step.times(found), found * length
        return problem.moved(step.d), state._replace(
            step=state.step + 1, report=problem.report(None, None, length)
        )

    def _adapted(
        self, factor: Tensor, added: Tensor, damping: Tensor, ratio: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Levenberg's and Marquardt's heuristic: more damping after a poor step, less after a good one."""
        # Scalars alone would give numbers in float32.
        change = torch.where(ratio > _GOOD, 1 / self.change, torch.ones_like(factor))
        change = torch.where(ratio < _POOR, self.change, change)
        begins = (ratio < _POOR) & (damping == 0).any(1)
        ss = dot(step.d, step.d)
        first = _FIRST * divide(step.curved.abs(), ss, where=ss > 0)
        factor = (factor * change).clamp(LEAST_FACTOR, MOST_FACTOR)
        return factor, torch.where(begins, first, added * change)


def searched(problem: Problem, step: Step, after: Tensor) -> Tensor:
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
