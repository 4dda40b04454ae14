"""Damped Newton steps by conjugate gradients, and how the damping follows the ratio of reduction."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metagrad.optim.rules.flat import divide, dot
from metagrad.optim.rules.newton_system import Memory, NewtonSystem
from metagrad.optim.rules.rule import Hyperparameter, Params
from metagrad.optim.rules.second_order import (
    LEAST_FACTOR,
    MOST_FACTOR,
    Problem,
    Report,
    check_can_evaluate,
    no_report,
)

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
    :class:`~metagrad.optim.rules.newton_system.NewtonSystem`.
    """

    matrix: ClassVar[str]
    """The products of the curvature that multiply B."""
    searches: ClassVar[bool]
    """Whether a step that does not descend is made shorter; else it is not taken."""
    lr: Hyperparameter
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
        """Take one step; ``curvature`` is an :class:`~metagrad.optim.rules.objective.Objective`."""
        if not params:
            return {}, state._replace(step=state.step + 1)
        if self.multiplies(state.step):
            return self._solved_step(self.problem(grads, params, curvature, self.matrix), state)
        return self._recalled_step(self.problem(grads, params, curvature, None), state)

    def _solved_step(self, problem: Problem, state: DampedState) -> tuple[Params, Any]:
        each = problem.space.each
        factor, added = each(state.factor), each(state.added)
        damping = factor * each(self.value("damping", state.step)) + added
        run, memory = self.solved(problem, problem.products, damping, state.step, state.memory)
        slope, xx = dot(problem.g, run.x), dot(run.x, run.x)
        curved = 2 * (run.model - slope) - damping * xx  # x^T B x
        # Where curvature is negative an iterate may climb at first, and its opposite has the same model and descends.
        sign = torch.where(slope > 0, -1.0, torch.ones_like(slope))
        d, slope = sign[:, None] * run.x, sign * slope
        ratio, length = None, torch.ones_like(slope)
        if self.adapt:
            check_can_evaluate(self.call, problem.objective, "set adapt=False")
            predicted = slope + curved / 2
            after = problem.after(d)
            ratio = problem.ratio(after, predicted)
            length = _searched(problem, d, slope, after) if self.searches else (ratio > _SUFFICIENT).to(slope)
            factor, added = self._adapted(factor, added, damping, ratio, curved, xx)
        length = each(self.value("lr", state.step)) * length
        return problem.moved(length[:, None] * d), DampedState(
            state.step + 1,
            *memory,
            problem.for_task(factor),
            problem.for_task(added),
            problem.report(run, ratio, length),
        )

    def _recalled_step(self, problem: Problem, state: DampedState) -> tuple[Params, Any]:
        d = self.recalled(problem, state.memory)
        length = torch.ones_like(d[:, 0])
        if self.adapt:
            # There is no model of this step to compare with, and a refused step would be tried again as it is until
            # the next product: so every rule makes it shorter.
            check_can_evaluate(self.call, problem.objective, "set adapt=False")
            length = _searched(problem, d, dot(problem.g, d), problem.after(d))
        length = problem.space.each(self.value("lr", state.step)) * length
        return problem.moved(length[:, None] * d), state._replace(
            step=state.step + 1, report=problem.report(None, None, length)
        )

    def _adapted(
        self, factor: Tensor, added: Tensor, damping: Tensor, ratio: Tensor, curved: Tensor, xx: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Levenberg's and Marquardt's heuristic: more damping after a poor step, less after a good one."""
        # Scalars alone would give numbers in float32.
        change = torch.where(ratio > _GOOD, 1 / self.change, torch.ones_like(factor))
        change = torch.where(ratio < _POOR, self.change, change)
        begins = (ratio < _POOR) & (damping == 0)
        first = _FIRST * divide(curved.abs(), xx, where=xx > 0)
        factor = (factor * change).clamp(LEAST_FACTOR, MOST_FACTOR)
        return factor, torch.where(begins, first, added * change)


def _searched(problem: Problem, d: Tensor, slope: Tensor, after: Tensor) -> Tensor:
    """Halve steps until the loss has fallen by enough; a length is constant where it does not jump."""
    length = torch.ones_like(slope.detach())
    for _ in range(_HALVINGS):
        enough = after <= problem.before + _SUFFICIENT * length * slope.detach() + problem.slack
        if bool(enough.all()):
            return length
        length = torch.where(enough, length, length / 2)
        after = problem.after(length[:, None] * d)
    enough = after <= problem.before + _SUFFICIENT * length * slope.detach() + problem.slack
    return torch.where(enough, length, 0.0)
