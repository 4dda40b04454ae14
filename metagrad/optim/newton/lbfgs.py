"""L-BFGS: Newton's method with an inverse Hessian learned from the last gradients."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.autograd.derivatives.grad import refuse_complex
from metagrad.core._torch import backward, linalg
from metagrad.core.checks import check_choice, check_count
from metagrad.core.tree import Params
from metagrad.optim.newton.vector import Objective, VectorOptimizer, flat, split
from metagrad.optim.second_order.curvature_optimizer import LossRecorder, options_of
from metagrad.optim.torch_optim.optimizer import ParameterGroups, ParamsWithGrad
from metagrad.optim.torch_optim.state import PendingUpdate


class History:
    """The last differences s of positions and y of gradients, and the directions that they give.

    They are views of larger buffers. The next pairs are written behind the views, so the views stay valid.

    Args:
        moves: The differences s, oldest first, ``[k, n]``.
        changes: The differences y, ``[k, n]``.
        products: The upper triangle of s_i^T y_j, ``[k, k]``.

    Example:
        One pair of a quadratic with the Hessian 4 determines the inverse Hessian:

        >>> from metagrad.optim.newton.lbfgs import History
        >>> history = History.empty(torch.tensor([8.0]))
        >>> history.add(torch.tensor([1.0]), torch.tensor([4.0]), most=10)
        >>> history.direction(torch.tensor([8.0]))
        tensor([-2.])

    References:
        Byrd, Nocedal, Schnabel, "Representations of quasi-Newton matrices and their use in limited memory methods",
        Mathematical Programming 63, 1994.
    """

    def __init__(self, moves: Tensor, changes: Tensor, products: Tensor) -> None:
        self._hold(moves, changes, products)

    @classmethod
    def empty(cls, like: Tensor) -> History:
        """Begin without pairs, for vectors in the shape of a given vector."""
        none = like.new_empty(0, like.numel())
        return cls(none, none, like.new_empty(0, 0))

    def _hold(self, moves: Tensor, changes: Tensor, products: Tensor) -> None:
        """Copy pairs into buffers that are 1.5 times as long."""
        size, n = moves.shape
        length = size + size // 2 + 8
        # Each row begins at a multiple of 16 elements. So products are bitwise identical wherever a window begins.
        self._moves, self._updates = (moves.new_empty(length, -n // 16 * -16)[:, :n] for _ in range(2))
        self._products = products.new_zeros(length, length)
        self._show(slice(0, size))
        self.moves.copy_(moves)
        self.changes.copy_(changes)
        self.products.copy_(products)

    def _show(self, window: slice) -> None:
        self.moves, self.changes = self._moves[window], self._updates[window]
        self.products = self._products[window, window]
        self._end = window.stop

    def add(self, move: Tensor, change: Tensor, *, most: int) -> None:
        """Add a pair if its curvature keeps the matrix positive definite. At most ``most`` pairs are stored."""
        curvature, squared = move.dot(change), change.dot(change)
        if not bool(curvature > torch.finfo(move.dtype).eps * squared):
            return
        kept = min(len(self.moves), most - 1)
        if self._end == len(self._moves):
            begin = len(self.moves) - kept
            self._hold(self.moves[begin:], self.changes[begin:], self.products[begin:, begin:])
        end = self._end
        self._moves[end].copy_(move)
        self._updates[end].copy_(change)
        self._show(slice(end - kept, end + 1))
        self.products[:, kept] = self.moves @ change
        self.products[kept, kept] = curvature  # above 0, which the rounding of the product may not be

    def direction(self, g: Tensor) -> Tensor:
        """Apply the inverse Hessian to the negative gradient, by two triangular systems.

        The first pass of the two-loop recursion solves R a = S g, and leaves q = g - Y^T a. The second pass solves
        R^T c = D a - Y H_0 q, where D is the diagonal of R and H_0 a multiple of the identity. Without a pair, the
        direction is minus the gradient, made no longer than 1 in the sum of its absolute values.
        """
        S, Y, R = self.moves, self.changes, self.products.contiguous()  # also aligned
        if not len(S):
            return g / -max(1.0, g.abs().sum().item())
        D, last = R.diagonal(), Y[-1]
        scale = float(D[-1] / last.dot(last))
        a = linalg.solve_triangular(R, (S @ g)[:, None], upper=True)[:, 0]
        q = torch.addmv(g, Y.mT, a, beta=scale, alpha=-scale)
        rest = torch.addmv(D * a, Y, q, alpha=-1)
        c = linalg.solve_triangular(R.mT, rest[:, None], upper=False)[:, 0]
        return torch.addmv(q, S.mT, c, beta=-1, alpha=-1)


class Place(NamedTuple):
    """Parameters, with the objective that is minimized and its gradient there."""

    w: Tensor  # [n]
    value: float
    g: Tensor  # [n]


class LBFGS(VectorOptimizer):
    r"""Optimize by L-BFGS with up to ``max_iter`` iterations per step, as ``torch.optim.LBFGS`` does.

    .. math:: w_t = w_{t-1} - \eta \, \alpha_t B_t g_t

    where the inverse Hessian :math:`B` is estimated from pairs (s, y) of the last differences of parameters and
    gradients. A pair without positive curvature :math:`s^\top y` is left out. ``step(closure)`` calls the closure at
    the initial and at other parameters. It iterates until the largest element of the gradient is at most
    ``tolerance_grad``, neither the loss nor any parameter changes by more than ``tolerance_change``, or ``max_iter``
    iterations or ``max_eval`` calls are made. It returns the loss at the initial parameters, and leaves the gradient
    at these parameters in ``.grad``. Without a closure, after ``loss.backward()``, a step is one iteration, with
    gradients that may be clipped or accumulated.

    Closures have torch's form: they write gradients and return the loss, which the line search decreases.
    Names and defaults are torch's, except that the line search is on.

    Args:
        params: Parameters, with or without names, or groups of parameters with their own ``lr`` and ``weight_decay``.
        lr: The factor :math:`\eta` of every direction. A line search starts at this length, and may end at
            another length.
        max_iter: Maximum number of iterations of a step.
        max_eval: Maximum number of calls of the closure in a step. None means 5/4 of ``max_iter``, but at least
            25, which is enough for a line search.
        tolerance_grad: A step ends if the absolute value of every element of the gradient, including weight decay, is
            at most this number.
        tolerance_change: A line search is skipped if the slope along the direction is smaller than this number. It
            ends if no parameter changes by more than this number between the ends of its interval.
        history_size: Maximum number of stored pairs.
        line_search_fn: ``"strong_wolfe"`` looks for a length :math:`\alpha` that satisfies the strong Wolfe
            conditions by cubic interpolation, at the cost of one gradient for each length. None always uses length
            1.
        weight_decay: :math:`\gamma`: the objective is the loss with the penalty :math:`\gamma |w|^2 / 2`.
        maximize: Maximize the loss: negate the gradient.
        nonfinite: Reaction if the loss, a gradient or a new value is NaN or infinite. ``"raise"`` raises an
            error. ``"skip"`` leaves the step out and counts it in ``opt.stats``. Parameters and state do not change.

    Raises:
        ValueError: A hyperparameter is out of its range, or parameters differ in dtype or device.
        TypeError: A parameter is complex, or a hyperparameter is not a number.
        RuntimeError: In a step, the closure does not return its loss.

    Example:
        >>> from metagrad.optim import LBFGS
        >>> w = torch.tensor([-1.2, 1.0], dtype=torch.float64, requires_grad=True)
        >>> opt = LBFGS([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = 100 * (w[1] - w[0] ** 2) ** 2 + (1 - w[0]) ** 2
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(3):
        ...     loss = opt.step(closure)
        >>> torch.allclose(w, torch.ones_like(w), atol=1e-4)
        True

    References:
        Liu, Nocedal, "On the limited memory BFGS method for large scale optimization", Mathematical Programming 45,
        1989; Nocedal, Wright, "Numerical optimization", 2006, section 7.2.
    """

    counts = ("max_iter", "history_size")
    _value: float = math.nan  # of the loss at the start of a step
    _first: weakref.ref[Tensor] | None  # what the closure returned there
    _evaluations: int  # of the closure in this step
    _last: dict[str, float | int] | None = None

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: Literal["strong_wolfe"] | None = "strong_wolfe",
        weight_decay: float | Tensor = 0.0,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        self._initialize(params, options_of(locals()))

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the last step.

        - ``iterations``, and ``evaluations`` of the closure.
        - ``length`` of the last iteration in units of its direction, 0 if nothing moved.
        - ``skipped``: the number of steps that were left out.
        """
        return {**(self._last or {}), **super().stats}

    def _check_group(self, index: int) -> None:
        super()._check_group(index)
        group, call = self.param_groups[index], f"{type(self).__name__}(params)"
        check_count(f"{call}, max_eval", group["max_eval"], optional=True)
        check_choice(f"{call}: line_search_fn", group["line_search_fn"], (None, "strong_wolfe"))

    def _is_curvature_due(self) -> bool:
        return False

    def _refuse_averaged(self) -> None:
        if self._closure is not None:  # without a closure, only the gradient is available
            super()._refuse_averaged()

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        # The first call is watched for a wrapper that averages gradients.
        with contextlib.nullcontext() if self.state else LossRecorder(backward, note_losses=False):
            result = super()._evaluated(closure)
        self._value = self._loss_of(result)
        self._first = weakref.ref(result) if isinstance(result, Tensor) else None
        return result

    def _loss_of(self, result: Any) -> float:
        call = f"{type(self).__name__}.step(closure)"
        if isinstance(result, Tensor) and result.numel() == 1:
            refuse_complex(call, result)
            return result.item()
        if isinstance(result, (int, float)):
            return float(result)
        raise RuntimeError(
            f"{call}: the closure must return its loss, one number, at every call; got {type(result).__name__}."
        )

    def _updates(self, work: ParamsWithGrad) -> Iterator[PendingUpdate]:
        """Iterate from the current parameters."""
        params, group = work.params, self.param_groups[0]
        if self._closure is None and group["line_search_fn"] is not None:
            raise RuntimeError(
                f"{type(self).__name__}.step: line_search_fn={group['line_search_fn']!r} looks at the loss at other "
                "parameters, for which it is computed again. Call opt.step(closure), or set line_search_fn=None."
            )
        objective, w = self._objective(params), flat(params.values())
        value = math.nan if self._closure is None else objective.value(self._value, w)
        at = Place(w, value, objective.gradient(flat(work.grads.values()), w))
        step, history, last = self._resumed(params, w)
        limit = 1 if self._closure is None else group["max_iter"]
        most = group["max_eval"] or max(limit * 5 // 4, 25)
        count, length, self._evaluations = 0, 0.0, 1
        while count < limit and self._evaluations < most and _largest(at.g) > group["tolerance_grad"]:
            if last is not None:
                history.add(at.w - last.w, at.g - last.g, most=group["history_size"])
            last, count = at, count + 1
            d = objective.scaled(history.direction(at.g), at.g)
            if group["line_search_fn"] is None:
                taken, at = 1.0, Place(at.w + d, math.nan, at.g)
            else:
                taken, at = self._searched(params, objective, at, d, most - self._evaluations)
            length = taken or length
            change = taken * _largest(d)
            if count == limit or not math.isfinite(change) or torch.equal(last.w, at.w):
                break
            if group["line_search_fn"] is None:
                at = self._evaluated_at(params, objective, at.w)
            tolerance = group["tolerance_change"]
            if change <= tolerance or abs(at.value - last.value) < tolerance:
                break
        self._last = {"iterations": count, "evaluations": self._evaluations, "length": length}
        if last is not None:
            yield self._change(params, at.w if length else None, step + count, last, history)

    def _searched(
        self, params: Params, objective: Objective, at: Place, d: Tensor, most: int
    ) -> tuple[float, Place]:
        """Return the length and the final point of a line search."""
        group, start = self.param_groups[0], Point(0.0, at.value, at.g.dot(d).item(), at)
        if not (start.is_finite and start.slope < 0 and start.slope <= -group["tolerance_change"]):
            return 0.0, at

        def along(length: float) -> Point:
            place = self._evaluated_at(params, objective, at.w.add(d, alpha=length))
            return Point(length, place.value, place.g.dot(d).item(), place)

        slack = 10 * torch.finfo(d.dtype).eps * abs(at.value)
        shortest = group["tolerance_change"] / _largest(d)
        end = strong_wolfe(along, start, slack=slack, shortest=shortest, max_eval=most)
        return end.length, end.place

    def _evaluated_at(self, params: Params, objective: Objective, w: Tensor) -> Place:
        self._evaluations += 1
        with self._elsewhere(params, w) as closure:
            value = self._loss_of(result := closure())
            if self._first is not None and self._first() is result:
                raise self._loss_of_before()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params.values()]
        return Place(w, objective.value(value, w), objective.gradient(flat(grads), w))

    def _resumed(self, params: Params, w: Tensor) -> tuple[int, History, Place | None]:
        """Return the number of iterations, the pairs, and the last position with its gradient, from earlier steps."""
        first = self._shared_states(params)[0]
        if first.get("place", w[:0]).shape != w.shape:
            return 0, History.empty(w), None  # with other parameters, the pairs are dropped
        known: History | None = self.__dict__.get("_history")
        if known is None or known.moves is not first["moves"]:
            known = History(first["moves"], first["changes"], first["products"])
        return first["step"], known, Place(first["place"], math.nan, first["gradient"])

    def _change(
        self, params: Params, w: Tensor | None, step: int, last: Place, history: History
    ) -> PendingUpdate:
        """Return the update that a step writes. The vectors are stored with the first parameter."""
        states: dict[str, dict[str, Any]] = {key: {"step": step} for key in params}
        pairs = {"moves": history.moves, "changes": history.changes, "products": history.products}
        next(iter(states.values())).update(place=last.w, gradient=last.g, **pairs)
        self._history = history
        # If the gradient at the start is not finite, neither are the new parameters, and no pair is added.
        implied = ("place", "gradient", *pairs)
        return PendingUpdate(params, {} if w is None else split(w, params), states, implied=implied)


def _largest(values: Tensor) -> float:
    return values.abs().max().item()


_DECREASE, _CURVATURE = 1e-4, 0.9
_CLOSEST, _FARTHEST = 0.01, 10.0
"""Bounds of an extrapolated length: the fraction of the last interval beyond its end, and the multiple of its end."""
_MARGIN = 0.1
"""A length that is repeatedly this close to an end of its interval, relative to the interval, is changed."""


class Point(NamedTuple):
    """A length with its value and slope, and the place that they were found at."""

    length: float
    value: float
    slope: float
    place: Any = None

    @property
    def is_finite(self) -> bool:
        """Whether value and slope are finite."""
        return math.isfinite(self.value) and math.isfinite(self.slope)


def strong_wolfe(
    along: Callable[[float], Point], start: Point, *, slack: float, shortest: float, max_eval: int
) -> Point:
    r"""Find a length that satisfies the strong Wolfe conditions.

    .. math:: \phi(\alpha) \le \phi(0) + c_1 \alpha \phi'(0), \qquad |\phi'(\alpha)| \le c_2 |\phi'(0)|, \qquad
              c_1 = 10^{-4}, \; c_2 = 0.9

    From 1, the length is extrapolated until an interval has points that satisfy them. The interval is then narrowed.
    Both use the minimum of the cubic with the values and slopes at two lengths. A value that is not finite bounds an
    interval.

    Args:
        along: A function from a length to its point.
        start: The point at 0, whose slope is negative.
        slack: Absolute rounding error of a value.
        shortest: A shorter interval ends the search.
        max_eval: Maximum number of calls of ``along``.

    Returns:
        The point. If the conditions were not met, the point with the minimum value found, or ``start``.

    Example:
        >>> from metagrad.optim.newton.lbfgs import Point, strong_wolfe
        >>> options = {"slack": 0.0, "shortest": 0.0, "max_eval": 25}
        >>> strong_wolfe(lambda a: Point(a, (a - 3) ** 2, 2 * (a - 3)), Point(0.0, 9.0, -6.0), **options)
        Point(length=1.0, value=4.0, slope=-4.0, place=None)

    References:
        Nocedal, Wright, "Numerical optimization", 2006, algorithms 3.5 and 3.6, and equation 3.59.
    """

    def is_too_high(point: Point) -> bool:
        most = start.value + _DECREASE * point.length * start.slope + slack
        return not (point.is_finite and point.value <= most)

    def is_flat(point: Point) -> bool:
        return abs(point.slope) <= -_CURVATURE * start.slope

    length, low, before, high, was_near = 1.0, start, start, None, False
    for count in range(1, max_eval + 1):
        point = along(length)
        if is_too_high(point) or (count > 1 and point.value >= low.value):
            high = point
        elif is_flat(point):
            return point
        else:
            ahead = 1.0 if high is None else high.length - low.length
            high = low if point.slope * ahead >= 0 else high
            before, low = low, point
        if high is None:  # extrapolate until there is an interval: algorithm 3.5
            nearest = low.length + _CLOSEST * (low.length - before.length)
            length = _cubic_minimum(before, low, nearest, _FARTHEST * low.length)
            continue
        least, most = sorted((low.length, high.length))  # narrow it: algorithm 3.6
        if not most - least > shortest:
            break
        length, was_near = _kept_apart(_cubic_minimum(low, high, least, most), least, most, was_near)
    return low


def _cubic_minimum(a: Point, b: Point, least: float, most: float) -> float:
    """Return the minimizer of the cubic through two points between two bounds, or their middle."""
    if a.length > b.length:
        a, b = b, a
    width, middle = b.length - a.length, (least + most) / 2
    first = a.slope + b.slope - 3 * (b.value - a.value) / width
    squared = first * first - a.slope * b.slope
    if not (a.is_finite and b.is_finite and squared >= 0):
        return middle
    second = math.sqrt(squared)
    curved = b.slope - a.slope + 2 * second
    length = b.length - width * ((b.slope + second - first) / curved) if curved else math.nan
    return min(max(length, least), most) if math.isfinite(length) else middle


def _kept_apart(length: float, least: float, most: float, was_near: bool) -> tuple[float, bool]:
    """Move a length into its interval if it is at an end, or near an end for the second time in a row."""
    margin = _MARGIN * (most - least)
    if min(most - length, length - least) >= margin:
        return length, False
    if not was_near and least < length < most:
        return length, True
    return (most - margin if most - length < length - least else least + margin), False
