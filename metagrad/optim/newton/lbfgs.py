"""Limited-memory BFGS: Newton's method with an inverse Hessian learned from the last gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.curvature.rows import dot, inner
from metagrad.curvature.solvers.iteration import divide
from metagrad.optim.hyperparameters import check_count
from metagrad.optim.newton.second_order import Report, SecondOrder, StepProblem, check_can_evaluate, no_report
from metagrad.optim.rule import Hyperparameter, Params, functional_optimizer, hyperparameter, option

_DECREASE, _CURVATURE = 1e-4, 0.9
_CLOSEST, _FARTHEST = 0.01, 10.0
"""Bounds of an extrapolation: this part of the last interval beyond its end, and this multiple of its end."""
_MARGIN = 0.1
"""An interpolation that repeatedly comes this close to an end of its interval, as a part of it, is moved away."""

Number: TypeAlias = Any
"""A float, or a 0-d float64 tensor where lengths are differentiated: the arithmetic is the same."""


class Point(NamedTuple):
    """A length with the value and the slope there."""

    length: Number
    value: Number
    slope: Number
    evaluation: int = 0  # the number of the evaluation that it comes from; 0 is the start

    @property
    def is_finite(self) -> bool:
        """Say whether value and slope are numbers."""
        return _is_finite(self.value) and _is_finite(self.slope)


class Searched(NamedTuple):
    """What a line search has found, for each row."""

    length: Tensor  # [rows]; 0 where there is none
    evaluations: int  # of all rows together


Search: TypeAlias = Generator[Number, Point, Point]
"""Yields lengths to be tried, is sent what is there, and returns where it ends."""


def strong_wolfe(
    along: Callable[[Tensor], tuple[Tensor, Tensor]],
    value: Tensor,
    slope: Tensor,
    *,
    slack: Tensor,
    shortest: Tensor | None = None,
    max_eval: int = 25,
) -> Searched:
    r"""Find lengths that satisfy the strong Wolfe conditions.

    .. math:: \phi(\alpha) \le \phi(0) + c_1 \alpha \phi'(0), \qquad |\phi'(\alpha)| \le c_2 |\phi'(0)|, \qquad
              c_1 = 10^{-4}, \; c_2 = 0.9

    From 1, lengths are extrapolated until an interval has points that satisfy them, which is then narrowed; both by
    the minimum of the cubic with the values and slopes at two lengths. A value that is not finite bounds an interval.
    Rows are searched side by side, each as if alone. Where values and slopes are on the tape, lengths are: functions
    of them that are smooth but where the search would go another way.

    Args:
        along: Lengths ``[rows]`` to values and slopes ``[rows]``.
        value: The values at 0.
        slope: The slopes at 0; rows where it is not negative have the length 0.
        slack: How much of the values may be rounding.
        shortest: A row whose interval is shorter ends.
        max_eval: How often ``along`` is called at most.

    Returns:
        Where the conditions were not met: the length of the least value that was found, or 0.

    Example:
        >>> from metagrad.optim.newton.lbfgs import strong_wolfe
        >>> start, slope = torch.tensor([9.0]), torch.tensor([-6.0])
        >>> strong_wolfe(lambda a: ((a - 3) ** 2, 2 * (a - 3)), start, slope, slack=torch.zeros(1))
        Searched(length=tensor([1.]), evaluations=1)

    References:
        Nocedal, Wright, "Numerical optimization", 2006, algorithms 3.5 and 3.6, and equation 3.59.
    """
    least, rounding = [0.0] * len(value) if shortest is None else shortest.tolist(), slack.tolist()
    ends = [Point(0.0, *at) for at in zip(_numbers(value), _numbers(slope), strict=True)]
    searches: dict[int, Search] = {}
    trial: list[Number] = [0.0] * len(ends)
    for row, start in enumerate(ends):
        if start.is_finite and start.slope < 0 and max_eval:
            searches[row] = _search(start, rounding[row], least[row], max_eval)
            trial[row] = next(searches[row])
    count = 0
    while searches:
        count += 1
        values, slopes = along(_tensor(trial, value))
        found = list(zip(_numbers(values), _numbers(slopes), strict=True))
        for row in list(searches):
            trial[row], end = _sent(searches[row], Point(trial[row], *found[row], count))
            if end is not None:
                ends[row] = end
                del searches[row]
    return Searched(_tensor([end.length for end in ends], value), count)


def search_row(
    along: Callable[[float], tuple[float, float]],
    start: Point,
    *,
    slack: float,
    shortest: float,
    max_eval: int,
) -> Point:
    """Do as :func:`strong_wolfe` for one row in plain numbers, and return where it ends; ``start`` descends."""
    search = _search(start, slack, shortest, max_eval)
    length, end, count = next(search), None, 0
    while end is None:
        count += 1
        length, end = _sent(search, Point(length, *along(length), count))
    return end


def _sent(search: Search, point: Point) -> tuple[Number, Point | None]:
    """Return the next length to be tried; or the last, and where the search ends."""
    try:
        return search.send(point), None
    except StopIteration as stop:
        return stop.value.length, stop.value


def _search(start: Point, slack: float, shortest: float, max_eval: int) -> Search:
    """Extrapolate until there is an interval: algorithm 3.5."""
    before, length = start, 1.0
    for count in range(1, max_eval + 1):
        point = yield length
        if _is_too_high(point, start, slack) or (count > 1 and point.value >= before.value):
            return (yield from _zoom(start, before, point, slack, shortest, max_eval - count))
        if _is_flat(point, start):
            return point
        if point.slope >= 0:
            return (yield from _zoom(start, point, before, slack, shortest, max_eval - count))
        nearest = point.length + _CLOSEST * (point.length - before.length)
        length = _cubic_minimum(before, point, nearest, _FARTHEST * point.length)
        before = point
    return before


def _zoom(start: Point, low: Point, high: Point, slack: float, shortest: float, max_eval: int) -> Search:
    """Narrow an interval whose end ``low`` has the lesser value: algorithm 3.6."""
    was_near = False
    for _ in range(max_eval):
        ends = sorted((low.length, high.length))
        if not ends[1] - ends[0] > shortest:
            break
        length, was_near = _kept_apart(_cubic_minimum(low, high, *ends), ends, was_near)
        point = yield length
        if _is_too_high(point, start, slack) or point.value >= low.value:
            high = point
            continue
        if _is_flat(point, start):
            return point
        if point.slope * (high.length - low.length) >= 0:
            high = low
        low = point
    return low


def _is_too_high(point: Point, start: Point, slack: float) -> bool:
    most = start.value + _DECREASE * point.length * start.slope + slack
    return not (point.is_finite and bool(point.value <= most))


def _is_flat(point: Point, start: Point) -> bool:
    return bool(abs(point.slope) <= -_CURVATURE * start.slope)


def _cubic_minimum(a: Point, b: Point, least: Number, most: Number) -> Number:
    """Return where the cubic through two points is least, between two bounds; their middle if it has no minimum."""
    if a.length > b.length:
        a, b = b, a
    width = b.length - a.length
    first = a.slope + b.slope - 3 * (b.value - a.value) / width
    squared = first * first - a.slope * b.slope
    if not (a.is_finite and b.is_finite and squared >= 0):
        return (least + most) / 2
    second = _root(squared)
    curved = b.slope - a.slope + 2 * second
    length = b.length - width * ((b.slope + second - first) / curved) if curved != 0 else math.nan
    return min(max(length, least), most) if _is_finite(length) else (least + most) / 2


def _kept_apart(length: Number, ends: Sequence[Number], was_near: bool) -> tuple[Number, bool]:
    """Move a length away from an end of its interval that it is near for the second time, or at."""
    least, most = ends
    margin = _MARGIN * (most - least)
    if min(most - length, length - least) >= margin:
        return length, False
    if not was_near and least < length < most:
        return length, True
    return (most - margin if most - length < length - least else least + margin), False


def _is_finite(x: Number) -> bool:
    return bool(abs(x) < math.inf)


def _root(x: Number) -> Number:
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def _numbers(values: Tensor) -> Sequence[Number]:
    return values.double().unbind() if values.requires_grad else values.tolist()


def _tensor(numbers: Sequence[Number], like: Tensor) -> Tensor:
    if any(isinstance(number, Tensor) for number in numbers):
        columns = [torch.as_tensor(n, dtype=torch.float64, device=like.device) for n in numbers]
        return torch.stack(columns).to(like.dtype)
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)


class LBFGSState(NamedTuple):
    """The state of :class:`LBFGSRule`; pairs are those of all parameters, in rows.

    Pairs that there are not yet are zeros without memory.

    Attributes:
        step: Steps taken.
        place: Where the last step began, ``[tasks, n]``.
        gradient: The gradient there, ``[tasks, n]``.
        moves: The last differences s of places, oldest first, ``[tasks, n]`` each.
        changes: Those of gradients, y.
        num_pairs: How many of them there are.
        report: What the last step did.
    """

    step: int
    place: Tensor
    gradient: Tensor
    moves: tuple[Tensor, ...]
    changes: tuple[Tensor, ...]
    num_pairs: int
    report: Report


@functional_optimizer
class LBFGSRule(SecondOrder):
    r"""The functional form of L-BFGS.

    .. math:: w_t = w_{t-1} - \eta \, \alpha_t B_t g_t

    with the inverse Hessian :math:`B` that the last differences of places and gradients give, by the loop of two
    passes. A pair without positive curvature :math:`s^\top y` is left out. A step is one iteration, and without a
    line search that of ``torch.optim.LBFGS(max_iter=1)``.

    Derivatives are those of the steps, and with a line search those of the lengths, which are functions of the losses
    and gradients that it has looked at (``curvature`` must then be on the tape, as the gradients are).

    Raises:
        ValueError: ``history_size`` or ``max_eval`` is no whole number of at least 1, ``tolerance_change`` is
            negative, or ``line_search_fn`` is unknown.

    Example:
        The second step on a quadratic in one variable is to its minimum:

        >>> from metagrad.optim.newton.lbfgs import lbfgs
        >>> rule, params = lbfgs(), {"w": torch.tensor([3.0])}
        >>> state = rule.init(params)
        >>> for _ in range(2):
        ...     params, state = rule.update({"w": 4 * params["w"]}, state, params)
        >>> params
        {'w': tensor([0.])}

    References:
        Liu, Nocedal, "On the limited memory BFGS method for large scale optimization", Mathematical Programming 45,
        1989; Nocedal, Wright, "Numerical optimization", 2006, algorithms 7.4 and 7.5.
    """

    lr: Hyperparameter = hyperparameter(
        default=1.0,
        doc=r"The factor :math:`\eta` of every direction. Of a dict, the direction is that of all parameters "
        r"together. A line search begins with this length, and may end at another.",
    )
    _: KW_ONLY
    history_size: int = option(default=10, doc="How many pairs are kept.")
    line_search_fn: Literal["strong_wolfe"] | None = option(
        default=None,
        doc=r'``"strong_wolfe"`` looks for a length :math:`\alpha` that satisfies the strong Wolfe conditions by'
        r" cubic interpolation, at the cost of a gradient each; None takes 1.",
    )
    max_eval: int = option(default=25, doc="The most gradients of a line search.")
    tolerance_change: float = option(
        default=0.0,
        doc="A line search is not begun where the slope along the direction is smaller, and ends where its "
        "interval is: in it, no parameter differs by so much.",
    )

    call = "lbfgs(...)"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("history_size", "max_eval"):
            check_count(self.call, name, getattr(self, name))
        if not self.tolerance_change >= 0:
            raise ValueError(
                f"{self.call}: tolerance_change must be at least 0, got {self.tolerance_change!r}."
            )
        if self.line_search_fn not in (None, "strong_wolfe"):
            raise ValueError(
                f'{self.call}: line_search_fn must be "strong_wolfe" or None, got {self.line_search_fn!r}.'
            )

    def needs_curvature(self, step: int) -> bool:
        """Say whether the loss is needed at other parameters; curvature itself never is."""
        return self.line_search_fn is not None

    def init(self, params: Params) -> Any:
        """Return the state before the first step."""
        number = self.begun(params)
        tasks = max(1, number.numel())
        zero = number.new_zeros(()).expand(tasks, sum(p.numel() for p in params.values()) // tasks)
        pairs = (zero,) * self.history_size
        return LBFGSState(0, zero, zero, pairs, pairs, 0, no_report(number))

    def stepped(self, problem: StepProblem, state: LBFGSState) -> tuple[Params, Any]:
        """Take a quasi-Newton step."""
        w, g = problem.space.place, problem.g
        if state.step > 0:
            state = _remembered(state, w - state.place, g - state.gradient)
        d = problem.scaled(_direction(g, state))
        found = Searched(torch.ones_like(g[:, 0]), 0)
        if self.line_search_fn is not None:
            check_can_evaluate(self.call, problem.objective, "set line_search_fn=None")
            found = self._searched(problem, d)
        # Where there is no length, the direction may be none, or not finite.
        move = torch.where((found.length > 0)[:, None], found.length[:, None] * d, 0.0)
        report = problem.report(None, None, found.length, steps=found.evaluations)
        return problem.moved(move), state._replace(step=state.step + 1, place=w, gradient=g, report=report)

    def _searched(self, problem: StepProblem, d: Tensor) -> Searched:
        g, value = problem.g, problem.value
        if not (torch.is_grad_enabled() and g.requires_grad):
            g, d, value = g.detach(), d.detach(), value.detach()
        slope, size = dot(g, d), d.detach().abs().amax(1)

        def along(length: Tensor) -> tuple[Tensor, Tensor]:
            value, g = problem.gradient(length[:, None] * d)
            return value, dot(g, d)

        return strong_wolfe(
            along,
            value,
            torch.where(slope > -self.tolerance_change, 0.0, slope),
            slack=problem.slack,
            shortest=self.tolerance_change / size,  # of no size there is no slope, and no search
            max_eval=self.max_eval,
        )


lbfgs = LBFGSRule


def _remembered(state: LBFGSState, move: Tensor, change: Tensor) -> LBFGSState:
    """Put a pair in the place of the oldest, where it has the curvature that keeps the matrix positive definite."""
    curved = dot(move, change) > torch.finfo(move.dtype).eps * dot(change, change)
    if not bool(curved.any()):
        return state
    moves, changes = (*state.moves[1:], move), (*state.changes[1:], change)
    if not bool(curved.all()):
        row = curved[:, None]
        moves = tuple(torch.where(row, new, old) for new, old in zip(moves, state.moves, strict=True))
        changes = tuple(torch.where(row, new, old) for new, old in zip(changes, state.changes, strict=True))
    num_pairs = min(state.num_pairs + 1, len(moves))
    return state._replace(moves=moves, changes=changes, num_pairs=num_pairs)


def _direction(g: Tensor, state: LBFGSState) -> Tensor:
    k = state.num_pairs
    if not k:
        return -_first_scale(g) * g
    return two_loop(g, torch.stack(state.moves[-k:], 1), torch.stack(state.changes[-k:], 1))


def two_loop(g: Tensor, moves: Tensor, changes: Tensor) -> Tensor:
    r"""Multiply :math:`-g` with the inverse Hessian of BFGS, row by row.

    .. math:: H_{k+1} = (I - \rho s y^\top) H_k (I - \rho y s^\top) + \rho s s^\top, \qquad \rho = 1 / s^\top y,
              \qquad H_0 = \frac{s^\top y}{y^\top y} I

    What the loop of two passes over the pairs computes is computed by two triangular systems.

    Args:
        g: Gradients ``[tasks, n]``.
        moves: The differences s of places, oldest first, ``[tasks, history, n]``; zero where there are none.
        changes: The differences y of gradients, likewise.

    Returns:
        Directions of descent. Without a pair: minus the gradient, made no longer than 1 in the sum of its absolute
        values.

    Example:
        One pair of a quadratic with the Hessian 4 determines the inverse Hessian:

        >>> from metagrad.optim.newton.lbfgs import two_loop
        >>> two_loop(torch.tensor([[8.0]]), torch.tensor([[[1.0]]]), torch.tensor([[[4.0]]]))
        tensor([[-2.]])

    References:
        Nocedal, Wright, "Numerical optimization", 2006, algorithm 7.4; Byrd, Nocedal, Schnabel, "Representations of
        quasi-Newton matrices and their use in limited memory methods", Mathematical Programming 63, 1994.
    """
    S, Y, last = moves, changes, changes[:, -1]
    R = inner(S, Y).triu()
    curvature = torch.diagonal(R, dim1=1, dim2=2)
    known = curvature > 0
    R = R + torch.diag_embed((~known).to(R.dtype))
    scale = divide(curvature[:, -1], dot(last, last), where=known[:, -1])[:, None]
    scale = torch.where(known[:, -1:], scale, _first_scale(g))
    # The first pass has the weights of R a = S g, and leaves q = g - Y^T a; the second those of
    # R^T c = D a - Y H_0 q, with the diagonal D of R.
    a = linalg.solve_triangular(R, inner(S, g[:, None]), upper=True)
    q = scale * (g - (a.mT @ Y).squeeze(1))
    c = linalg.solve_triangular(R.mT, curvature[:, :, None] * a - inner(Y, q[:, None]), upper=False)
    return -(q + (c.mT @ S).squeeze(1))


def _first_scale(g: Tensor) -> Tensor:
    """Make the first step no longer than 1 in the sum of its absolute values, ``[tasks, 1]``."""
    size = g.abs().sum(1, keepdim=True)
    return torch.where(size > 1, 1 / torch.where(size > 1, size, 1.0), 1.0)
