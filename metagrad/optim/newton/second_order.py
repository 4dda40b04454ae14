"""What Newton's method and its relatives share: one row for each task, ratios of reduction, and reports."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from metagrad.core.tree import HALF, widened
from metagrad.curvature.linear_map import Rows
from metagrad.curvature.rows import dot
from metagrad.curvature.solvers.iteration import RESULTS
from metagrad.optim.hyperparameters import at_step, by_parameter, check_hyperparameter, is_used
from metagrad.optim.newton.krylov import Krylov
from metagrad.optim.objective import Objective
from metagrad.optim.per_parameter import check_real, checked_gradients
from metagrad.optim.rule import Hyperparameter, Params, RuleNode, functional_optimizer, hyperparameter, option


@dataclass(frozen=True, eq=False)
class RowSpace:
    """The rows of parameters whose first ``batch_ndim`` axes count tasks; half precision becomes float32.

    Args:
        params: Parameters by name, of one dtype and device.
        batch_ndim: Without axes of tasks there is one row.
    """

    params: Params
    batch_ndim: int = 0

    @property
    def tasks(self) -> tuple[int, ...]:
        """The shape of what there is one of for each task."""
        return tuple(next(iter(self.params.values())).shape[: self.batch_ndim])

    @functools.cached_property
    def num_tasks(self) -> int:
        """How many rows there are."""
        return math.prod(self.tasks)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """How much of a row each parameter takes."""
        return [p.numel() // self.num_tasks for p in self.params.values()]

    @functools.cached_property
    def is_half(self) -> bool:
        """Whether the parameters are of half precision."""
        return next(iter(self.params.values())).dtype in HALF

    @property
    def dtype(self) -> torch.dtype:
        """That of rows."""
        return torch.float32 if self.is_half else next(iter(self.params.values())).dtype

    @functools.cached_property
    def place(self) -> Tensor:
        """The parameters as rows."""
        return self.rows(self.params)

    def rows(self, tensors: Params) -> Tensor:
        """Write tensors in the shapes of the parameters as rows."""
        return torch.cat([widened(tensors[key]).reshape(self.num_tasks, -1) for key in self.params], 1)

    def tensors(self, rows: Tensor) -> Params:
        """Undo :meth:`rows`."""
        parts = rows.split_with_sizes(self.sizes, 1)
        return {key: part.reshape(p.shape) for (key, p), part in zip(self.params.items(), parts, strict=True)}

    def parameters(self, rows: Tensor) -> Params:
        """Undo :meth:`rows`, in the dtype of the parameters."""
        return {key: part.to(self.params[key].dtype) for key, part in self.tensors(rows).items()}

    def each(self, value: float | Tensor) -> Tensor:
        """Return a number of each task, ``[tasks]``, in the dtype of rows."""
        return self._number(value).expand(self.tasks).reshape(-1)

    def spread(self, values: Sequence[float | Tensor]) -> Tensor:
        """Return the values of parameters, numbers or tensors of their trailing shapes, as rows."""
        columns = [
            self._number(value).expand(p.shape) for value, p in zip(values, self.params.values(), strict=True)
        ]
        return self.rows(dict(zip(self.params, columns, strict=True)))

    def _number(self, value: float | Tensor) -> Tensor:
        """Return a hyper-parameter as rows are; a number is filled in, since a copy waits for the device."""
        device = next(iter(self.params.values())).device
        if isinstance(value, Tensor):
            return value.to(device, self.dtype)
        return torch.full((), value, dtype=self.dtype, device=device)

    def multiplied(self, products: Callable[[Params], Params], sign: int = 1) -> Rows:
        """Return a map of tensors by name as one of rows, times ``sign``."""
        if self.is_half:

            def multiply(rows: Tensor) -> Tensor:
                # At size one: small rows would be zero in float16, and products of large ones infinite.
                size = rows.detach().abs().amax(1, keepdim=True)
                size = torch.where(size == 0, 1, size)
                return sign * size * self.rows(products(self.parameters(rows / size)))

            return multiply
        if sign == 1:
            return lambda rows: self.rows(products(self.tensors(rows)))
        return lambda rows: sign * self.rows(products(self.tensors(rows)))


def check_uniform(call: str, params: Params) -> None:
    """Refuse complex parameters, and those that have no row in common."""
    first: tuple[str, Tensor] | None = None
    for key, p in params.items():
        check_real(call, key, p)
        first = first or (key, p)
        if (p.dtype, p.device) != (first[1].dtype, first[1].device):
            raise ValueError(
                f"{call}: all parameters make one vector, but {first[0]!r} is {first[1].dtype} on "
                f"{first[1].device} and {key!r} is {p.dtype} on {p.device}. Give each kind a rule, or an "
                "optimizer, of its own."
            )


POOR, GOOD = 0.25, 0.75
"""Ratios of reduction below and above which a model is trusted less, and more."""
LEAST_FACTOR, MOST_FACTOR = 1e-10, 1e10
"""What the ratios of reduction make of 1 stays between these, so that it comes back in time."""


class Report(NamedTuple):
    """What a step did, by tensors ``[tasks]``, or ``[]`` of one task."""

    steps: Tensor  # of the inner solver, int64
    products: Tensor  # with the matrix, those with probes of its diagonal among them, int64
    ending: Tensor  # of the inner solver: index into RESULTS, int64; -1 where it has none
    ratio: Tensor  # reduction of the loss by that of the model; NaN where it was not looked at
    length: Tensor  # of the direction that was taken: 1 the whole, 0 none; times the (largest) step size


class NewtonStep(NamedTuple):
    """A step, with the slope and the curvature of the quadratic model along it."""

    d: Tensor  # [tasks, n]
    slope: Tensor  # g^T d, [tasks]
    curved: Tensor  # d^T B d, [tasks]

    @property
    def predicted(self) -> Tensor:
        """The change of the model."""
        return self.slope + self.curved / 2

    def times(self, length: Tensor) -> NewtonStep:
        """Return the step multiplied by a length for each task."""
        return NewtonStep(length[:, None] * self.d, length * self.slope, length**2 * self.curved)


@functional_optimizer
class SecondOrder(RuleNode):
    r"""A rule that treats all parameters of a task as one vector.

    The step size and what penalises parameters may differ between them, by dicts: a step is :math:`L d` with one
    direction :math:`d` of all parameters together and the diagonal :math:`L` of their step sizes. Where that does not
    descend, all take the least step size above 0; parameters whose step size is the number 0 take no part.

    Its fields are those of every rule of this kind; a subclass gives other defaults where it has them.
    """

    call: ClassVar[str]
    """What makes the rule, for errors: ``"newton_cg(...)"``."""
    above_zero: ClassVar[tuple[str, ...]] = ()
    """The hyper-parameters that 0 is no value of."""
    by_parameter: ClassVar[tuple[str, ...]] = ("lr", "weight_decay")
    """The hyper-parameters that may be dicts by parameter name."""
    matrix: ClassVar[str | None] = None
    """The products of the curvature that a step takes; None of one that takes none."""
    lr: Hyperparameter = hyperparameter(
        default=1.0,
        doc=r"The factor :math:`\eta` of every step. Of a dict, the direction is that of all parameters together.",
    )
    _: KW_ONLY
    weight_decay: Hyperparameter = hyperparameter(
        default=0.0,
        doc=r":math:`\gamma`: the loss is taken with the penalty :math:`\gamma |w|^2 / 2`, in its gradient, its "
        r"matrix and the reduction that a step is judged by.",
    )
    maximize: bool = option(default=False, doc="Climb.")
    batch_ndim: int = 0

    def __post_init__(self) -> None:
        for name in self.hyper:
            value = getattr(self, name)
            if value is None:
                continue
            check_hyperparameter(self.call, name, value)
            if isinstance(value, Mapping) and name not in self.by_parameter:
                raise TypeError(
                    f"{self.call}: {name} is one number for all parameters, which make one vector; got a dict."
                )
            if name in self.above_zero and isinstance(value, (int, float)) and value == 0:
                raise ValueError(f"{self.call}: {name} must be above 0, got {value}.")

    def needs_curvature(self, step: int) -> bool:
        """Say that every step does."""
        return True

    def multiplies(self, step: int) -> bool:
        """Say whether a step multiplies with the curvature; if not, it may still evaluate the loss."""
        return True

    def update(
        self, grads: Params, state: Any, params: Params, curvature: object | None = None
    ) -> tuple[Params, Any]:
        """Take one step; ``curvature`` is an :class:`~metagrad.optim.objective.Objective`."""
        if not params:
            return {}, state._replace(step=state.step + 1)
        matrix = self.matrix if self.multiplies(state.step) else None
        problem = self.problem(grads, params, curvature, matrix, state.step)
        if getattr(self, "adapt", False):
            check_can_evaluate(self.call, curvature, "set adapt=False")
        return self.stepped(problem, state)

    def stepped(self, problem: StepProblem, state: Any) -> tuple[Params, Any]:
        """Return parameters and state after the step of a problem."""
        raise NotImplementedError

    def space(self, params: Params) -> RowSpace:
        """Return the rows of parameters."""
        return RowSpace(params, self.batch_ndim)

    def value(self, name: str, step: int) -> float | Tensor:
        """Return a hyper-parameter at a step."""
        return cast("float | Tensor", at_step(name, getattr(self, name), step))

    def column(self, name: str, step: int, space: RowSpace) -> Tensor:
        """Return a hyper-parameter at a step, ``[tasks, 1]``, or ``[tasks, n]`` of one by parameter."""
        value = at_step(name, getattr(self, name), step)
        if not isinstance(value, Mapping):
            return space.each(value)[:, None]
        return space.spread(by_parameter(name, value, space.params))

    def begun(self, params: Params, number: float = 0.0) -> Tensor:
        """Return a number of each task, of which there are ``()`` where there are no parameters."""
        check_uniform(f"{self.call}.init", params)
        if not params:
            return torch.tensor(number)
        first = widened(next(iter(params.values())))
        return first.new_full(self.space(params).tasks, number)

    def problem(
        self, grads: Params, params: Params, curvature: object | None, matrix: str | None, step: int
    ) -> StepProblem:
        """Write gradient, matrix and loss of a step as those of rows; None is of a step without a matrix."""
        gradients = checked_gradients(self.call, grads, params)
        space, sign = self.space(params), -1 if self.maximize else 1
        decay = self.column("weight_decay", step, space) if is_used(self.weight_decay) else None
        multiply = _no_products if matrix is None else self._multiplied(space, curvature, matrix)
        problem = StepProblem(
            space,
            sign * space.rows(gradients),
            multiply,
            sign,
            cast(Objective, curvature),
            self.column("lr", step, space),
            decay,
        )
        return problem.penalised().restricted()

    def _multiplied(self, space: RowSpace, curvature: object | None, matrix: str) -> Rows:
        if curvature is None:
            raise ValueError(
                f"{self.call}.update: this step needs curvature, and got None. By hand, pass TapeObjective(loss, "
                "params), or TapeCurvature(params, grads) where nothing is adapted."
            )
        multiply: Callable[[Params], Params] | None = getattr(curvature, matrix, None)
        if multiply is None:
            raise TypeError(f"{self.call}.update: {type(curvature).__name__} has no {matrix}(v).")
        # The Fisher matrix is a metric: it has no other sign where one climbs.
        sign = -1 if self.maximize and matrix != "fisher_products" else 1
        by_tensors = space.multiplied(multiply, sign)
        of_vector: Callable[[Tensor], Tensor | None] | None = getattr(curvature, "product_of_vector", None)
        if matrix != "products" or of_vector is None or space.num_tasks > 1 or space.is_half:
            return by_tensors

        def products(rows: Tensor) -> Tensor:
            product = of_vector(rows[0])
            return by_tensors(rows) if product is None else sign * product[None]

        return products


@dataclass(frozen=True, eq=False)
class StepProblem:
    """The loss of one step, to be minimised, in rows."""

    space: RowSpace
    g: Tensor  # its gradient, [tasks, n]
    products: Rows  # with its matrix
    sign: int  # -1 of a loss that is climbed
    objective: Objective
    lr: Tensor  # step sizes, [tasks, 1] or [tasks, n]
    decay: Tensor | None  # of the penalty decay |w|^2 / 2, likewise

    def penalised(self) -> StepProblem:
        """Return the problem whose gradient and matrix are those of the loss with its penalty."""
        decay, products = self.decay, self.products
        if decay is None:
            return self
        g = self.g + decay * self.space.place
        return replace(self, g=g, products=lambda rows: products(rows) + decay * rows)

    def restricted(self) -> StepProblem:
        """Return the problem in the parameters that move: those of step size 0 stay where they are."""
        if self.lr.shape[1] == 1 or self.lr.requires_grad or bool((self.lr != 0).all()):
            return self
        moves, products = self.lr != 0, self.products
        g = torch.where(moves, self.g, 0.0)
        return replace(self, g=g, products=lambda rows: torch.where(moves, products(rows), 0.0))

    @functools.cached_property
    def value(self) -> Tensor:
        """The loss where the step begins, ``[tasks]``, on the tape if the objective is."""
        value = self.sign * widened(self.objective.value.reshape(-1))
        return value if self.decay is None else value + self.penalty(self.space.place)

    @functools.cached_property
    def before(self) -> Tensor:
        """The loss where the step begins, ``[tasks]``, a constant."""
        return self.value.detach()

    @functools.cached_property
    def slack(self) -> Tensor:
        """How much of a loss may be rounding, ``[tasks]``."""
        eps = max(torch.finfo(each.dtype).eps for each in (self.g, self.objective.value))
        return 10 * eps * self.before.abs()

    def penalty(self, w: Tensor) -> Tensor | float:
        """Return the penalty at parameters ``[tasks, n]``."""
        return 0.0 if self.decay is None else dot(w, self.decay * w) / 2

    def after(self, d: Tensor) -> Tensor:
        """Return the loss at the end of a step, ``[tasks]``, a constant."""
        w = (self.space.place + d).detach()
        value = self.objective.evaluate(self.space.parameters(w))
        return (self.sign * widened(value.reshape(-1)) + self.penalty(w)).detach()

    def gradient(self, d: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss ``[tasks]`` and its gradient ``[tasks, n]`` at the end of a step; on the tape if d is."""
        w = self.space.place + d
        w = w if d.requires_grad else w.detach()
        value, grads = self.objective.gradient(self.space.parameters(w))
        value = self.sign * widened(value.reshape(-1)) + self.penalty(w)
        g = self.sign * self.space.rows(grads)
        g = g if self.decay is None else g + self.decay * w
        return (value, g) if d.requires_grad else (value.detach(), g.detach())

    def scaled(self, d: Tensor) -> Tensor:
        """Return a direction that descends times the step sizes, or times the least of them if that climbs."""
        if self.lr.shape[1] == 1:
            return self.lr * d
        least = torch.where(self.lr > 0, self.lr, torch.inf).amin(1, keepdim=True)
        climbs = dot(self.g, self.lr * d).detach() > 0
        return torch.where(climbs[:, None], least, self.lr) * d

    def step(self, d: Tensor, curved: Tensor) -> NewtonStep:
        """Return the step in a direction; ``curved`` is d^T B d, and known of the step by one product if need be."""
        s = self.scaled(d)
        if self.lr.shape[1] == 1:
            return NewtonStep(s, dot(self.g, s), self.lr[:, 0] ** 2 * curved)
        return NewtonStep(s, dot(self.g, s), dot(s, self.products(s)))

    @property
    def products_of_step(self) -> int:
        """How many products :meth:`step` takes."""
        return int(self.lr.shape[1] > 1)

    def ratio(self, after: Tensor, predicted: Tensor) -> Tensor:
        """Divide the reduction of the loss by that of the model, at the same step.

        Both are taken with what may be rounding, so that a step at convergence has the ratio 1 (Conn, Gould, Toint,
        "Trust-region methods", 2000, section 17.4.2), as has none at all. A loss that is not finite has the ratio
        minus infinity, and so has a step of which the model says that it climbs.
        """
        reduction, expected = self.before - after + self.slack, self.slack - predicted.detach()
        ratio = torch.where((reduction == 0) & (expected == 0), 1.0, reduction / expected)
        is_sound = after.isfinite() & ratio.isfinite() & (expected >= 0)
        return torch.where(is_sound, ratio, -torch.inf)

    def moved(self, d: Tensor) -> Params:
        """Return the parameters at the end of a step."""
        change = self.space.tensors(d)
        return {key: (widened(p) + change[key]).to(p.dtype) for key, p in self.space.params.items()}

    def for_task(self, number: Tensor) -> Tensor:
        """Give what is of each task, ``[tasks]``, the shape that states have."""
        return number.reshape(self.space.tasks)

    def report(
        self, run: Krylov | None, ratio: Tensor | None, length: Tensor, *, steps: int = 0, products: int = 0
    ) -> Report:
        """Say what a step did."""
        whole = torch.full((len(self.g),), products, dtype=torch.int64, device=self.g.device)
        ratio = torch.full_like(length, torch.nan) if ratio is None else ratio
        columns: tuple[Any, ...] = (
            (torch.full_like(whole, steps), whole, torch.full_like(whole, -1))
            if run is None
            else (run.steps, whole + run.products, run.ending)
        )
        length = self.lr.amax(1) * length
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
        >>> from metagrad.optim.newton.second_order import endings, no_report
        >>> endings(no_report(torch.zeros(())))
        ['NONE']
    """
    return ["NONE" if index < 0 else RESULTS[index].name for index in report.ending.reshape(-1).tolist()]


def check_can_evaluate(call: str, curvature: object, remedy: str) -> None:
    """Refuse a curvature that cannot evaluate the loss at other parameters."""
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
