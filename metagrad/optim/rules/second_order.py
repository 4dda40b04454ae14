"""What Newton's method and its relatives share: one row for each task, ratios of reduction, and what was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from metagrad.optim.rules.flat import Rows, RowSpace, check_uniform
from metagrad.optim.rules.hyperparameters import at_step, check_hyperparameter
from metagrad.optim.rules.krylov import RESULTS, Krylov
from metagrad.optim.rules.objective import Objective
from metagrad.optim.rules.per_parameter import checked_gradients
from metagrad.optim.rules.rule import Params, RuleNode

LEAST_FACTOR, MOST_FACTOR = 1e-10, 1e10
"""What the ratios of reduction make of 1 stays between these, so that it comes back in time."""


class Report(NamedTuple):
    """What a step did, by tensors ``[tasks]``, or ``[]`` of one task."""

    steps: Tensor  # of the inner solver, int64
    products: Tensor  # with the matrix, those with probes of its diagonal among them, int64
    ending: Tensor  # of the inner solver: index into RESULTS, int64; -1 where it has none
    ratio: Tensor  # reduction of the loss by that of the model; NaN where it was not looked at
    length: Tensor  # of the direction that was taken: 1 the whole, 0 none; times the step size


class SecondOrder(RuleNode):
    """A rule that takes all parameters of a task for one vector.

    A subclass is a frozen dataclass with fields ``lr``, ``maximize`` and ``batch_ndim``.
    """

    call: ClassVar[str]
    """What makes the rule, for errors: ``"newton_cg(...)"``."""
    above_zero: ClassVar[tuple[str, ...]] = ()
    """The hyper-parameters that 0 is no value of."""
    maximize: bool
    batch_ndim: int

    def __post_init__(self) -> None:
        for name in self.hyper:
            value = getattr(self, name)
            if value is None:
                continue
            check_hyperparameter(self.call, name, value)
            if isinstance(value, dict):
                raise TypeError(
                    f"{self.call}: {name} is one number for all parameters, which make one vector; got a dict."
                )
            if name in self.above_zero and isinstance(value, (int, float)) and value == 0:
                raise ValueError(f"{self.call}: {name} must be above 0, got {value}.")

    def needs_curvature(self, step: int) -> bool:
        """Say that every step does."""
        return True

    def multiplies(self, step: int) -> bool:
        """Say whether a step multiplies with the curvature, of which it may need nothing but the loss elsewhere."""
        return True

    def space(self, params: Params) -> RowSpace:
        """Return the rows of parameters."""
        return RowSpace(params, self.batch_ndim)

    def value(self, name: str, step: int) -> float | Tensor:
        """Return a hyper-parameter at a step."""
        return cast("float | Tensor", at_step(name, getattr(self, name), step))

    def begun(self, params: Params, number: float = 0.0) -> Tensor:
        """Return a number of each task, of which there are ``()`` where there are no parameters."""
        check_uniform(self.call, params)
        if not params:
            return torch.tensor(number)
        first = next(iter(params.values()))
        return first.new_full(self.space(params).tasks, number)

    def problem(self, grads: Params, params: Params, curvature: object | None, matrix: str | None) -> Problem:
        """Write gradient, matrix and loss of a step as those of rows; None is of a step without a matrix."""
        gradients = checked_gradients(self.call, grads, params)
        space, sign = self.space(params), -1 if self.maximize else 1
        g = sign * space.rows(gradients)
        if matrix is None:
            return Problem(space, g, _no_products, sign, cast(Objective, curvature))
        if curvature is None:
            raise ValueError(
                f"{self.call}.update: this step needs curvature, and got None. By hand, pass TapeObjective(loss, "
                "params), or TapeCurvature(params, grads) where nothing is adapted."
            )
        multiply: Callable[[Params], Params] | None = getattr(curvature, matrix, None)
        if multiply is None:
            raise TypeError(f"{self.call}.update: {type(curvature).__name__} has no {matrix}(v).")
        return Problem(space, g, space.multiplied(multiply, sign), sign, cast(Objective, curvature))


@dataclass(frozen=True, eq=False)
class Problem:
    """The loss of one step, to be minimised, in rows."""

    space: RowSpace
    g: Tensor  # its gradient, [tasks, n]
    products: Rows  # with its matrix
    sign: int  # -1 of a loss that is climbed
    objective: Objective

    @property
    def before(self) -> Tensor:
        """The loss where the step begins, ``[tasks]``, a constant."""
        return self.sign * self.objective.value.detach().reshape(-1)

    @property
    def slack(self) -> Tensor:
        """How much of a loss may be rounding, ``[tasks]``."""
        return 10 * torch.finfo(self.g.dtype).eps * self.before.abs()

    def after(self, d: Tensor) -> Tensor:
        """Return the loss at the end of a step, ``[tasks]``, a constant."""
        moved = self.space.tensors((self.space.rows(self.space.params) + d).detach())
        return self.sign * self.objective.evaluate(moved).reshape(-1)

    def ratio(self, after: Tensor, predicted: Tensor) -> Tensor:
        """Divide the reduction of the loss by that of the model.

        Both are taken with what may be rounding, so that a step at convergence has the ratio 1 (Conn, Gould, Toint,
        "Trust-region methods", 2000, section 17.4.2), as has none at all. A loss that is not finite has the ratio
        minus infinity.
        """
        reduction, expected = self.before - after + self.slack, self.slack - predicted.detach()
        ratio = torch.where((reduction == 0) & (expected == 0), 1.0, reduction / expected)
        return torch.where(after.isfinite() & ratio.isfinite(), ratio, -torch.inf)

    def moved(self, d: Tensor) -> Params:
        """Return the parameters at the end of a step."""
        change = self.space.tensors(d)
        return {key: p + change[key] for key, p in self.space.params.items()}

    def for_task(self, number: Tensor) -> Tensor:
        """Give what is of each task, ``[tasks]``, the shape that states have."""
        return number.reshape(self.space.tasks)

    def report(
        self, run: Krylov | None, ratio: Tensor | None, length: Tensor, *, steps: int = 0, products: int = 0
    ) -> Report:
        """Say what a step did."""
        whole = torch.zeros(len(self.g), dtype=torch.int64, device=self.g.device)
        ratio = torch.full_like(length, torch.nan) if ratio is None else ratio
        columns: tuple[Any, ...] = (
            (whole + steps, whole + products, whole - 1)
            if run is None
            else (run.steps, whole + run.products, run.ending)
        )
        return Report(*map(self.for_task, (*columns, ratio.detach(), length.detach())))


def _no_products(rows: Tensor) -> Tensor:
    raise AssertionError("this step multiplies with no matrix")


def no_report(number: Tensor) -> Report:
    """Return the report before the first step; ``number`` is one of each task."""
    count = torch.zeros_like(number, dtype=torch.int64)
    return Report(count, count, count - 1, torch.full_like(number, torch.nan), torch.zeros_like(number))


def endings(report: Report) -> list[str]:
    """Return how the inner solver ended for each task, by the names of :class:`metagrad.curvature.Result`.

    Example:
        >>> from metagrad.optim.rules.second_order import endings, no_report
        >>> endings(no_report(torch.zeros(())))
        ['NONE']
    """
    return ["NONE" if index < 0 else RESULTS[index].name for index in report.ending.reshape(-1).tolist()]


def check_can_evaluate(call: str, curvature: object, remedy: str) -> None:
    """Refuse a curvature that does not know the loss elsewhere."""
    if curvature is None:
        raise ValueError(
            f"{call}.update: the loss is needed at other parameters, and curvature is None. Pass "
            f"TapeObjective(loss, params), or {remedy}."
        )
    if not hasattr(curvature, "evaluate"):
        raise TypeError(
            f"{call}.update: the loss is needed at other parameters, and {type(curvature).__name__} has no "
            f"evaluate(params). Pass TapeObjective(loss, params), or {remedy}."
        )
