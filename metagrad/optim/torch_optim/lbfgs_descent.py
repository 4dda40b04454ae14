"""Iterations of L-BFGS on one vector of parameters, without a tape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.optim.newton.lbfgs import Point, search_row
from metagrad.optim.rule import Params

_SPARE = 8
_ALIGNED = 16  # elements


class History:
    """The last differences s of places and y of gradients, and the directions that they give.

    They are windows of larger buffers, whose free ends take the next pairs. Nothing within a window is written
    again, so that views of it stay valid.

    Args:
        like: A vector of parameters.

    Attributes:
        moves: The differences s, oldest first, ``[k, n]``.
        changes: The differences y, likewise.
        products: The upper triangle of s_i^T y_j, ``[k, k]``.

    Example:
        One pair of a quadratic with the Hessian 4 determines the inverse Hessian:

        >>> from metagrad.optim.torch_optim.lbfgs_descent import History
        >>> history = History(torch.tensor([8.0]))
        >>> history.add(torch.tensor([1.0]), torch.tensor([4.0]), most=10)
        >>> history.direction(torch.tensor([8.0]))
        tensor([-2.])

    References:
        Byrd, Nocedal, Schnabel, "Representations of quasi-Newton matrices and their use in limited memory methods",
        Mathematical Programming 63, 1994.
    """

    def __init__(self, like: Tensor) -> None:
        empty = like.new_empty(0, like.numel())
        self._hold(empty, empty, like.new_empty(0, 0))

    @classmethod
    def of(cls, moves: Tensor, changes: Tensor, products: Tensor) -> History:
        """Make that of pairs which are known; these tensors are not written."""
        history = cls.__new__(cls)
        history._hold(moves, changes, products)
        return history

    def _hold(self, moves: Tensor, changes: Tensor, products: Tensor) -> None:
        """Copy pairs into buffers that are half as long again."""
        size, n = moves.shape
        length = size + size // 2 + _SPARE
        # Rows are aligned wherever a window begins, so that products are the same to the last bit.
        self._moves, self._changes = (
            moves.new_empty(length, -n // _ALIGNED * -_ALIGNED)[:, :n] for _ in range(2)
        )
        self._products = products.new_zeros(length, length)
        self._show(slice(0, size))
        self.moves.copy_(moves)
        self.changes.copy_(changes)
        self.products.copy_(products)
        self._scale = 1.0
        if size:
            last = self.changes[-1]
            self._scale = self.products[-1, -1].item() / last.dot(last).item()

    def _show(self, window: slice) -> None:
        self.moves, self.changes = self._moves[window], self._changes[window]
        self.products = self._products[window, window]
        self._end = window.stop

    def add(self, move: Tensor, change: Tensor, *, most: int) -> None:
        """Add a pair, if it has the curvature that keeps the matrix positive definite; ``most`` are kept."""
        curvature, squared = torch.stack([move.dot(change), change.dot(change)]).tolist()
        if not curvature > torch.finfo(move.dtype).eps * squared:
            return
        kept = min(len(self.moves), most - 1)
        if self._end == len(self._moves):
            begin = len(self.moves) - kept
            self._hold(self.moves[begin:], self.changes[begin:], self.products[begin:, begin:])
        end = self._end
        self._moves[end].copy_(move)
        self._changes[end].copy_(change)
        self._show(slice(end - kept, end + 1))
        self.products[:, kept] = self.moves @ change
        self.products[kept, kept] = curvature  # above 0, which the rounding of the product may not be
        self._scale = curvature / squared

    def direction(self, g: Tensor) -> Tensor:
        """Multiply minus a gradient with the inverse Hessian, by two triangular systems.

        The first pass of the loop of two has the weights of R a = S g, and leaves q = g - Y^T a; the second those of
        R^T c = D a - Y H_0 q, with the diagonal D of R and H_0 a multiple of 1. Without a pair: minus the gradient,
        made no longer than 1 in the sum of its absolute values.
        """
        S, Y, R = self.moves, self.changes, self.products.contiguous()  # aligned, too
        if not len(S):
            return g / -max(1.0, g.abs().sum().item())
        D, scale = R.diagonal(), self._scale
        a = linalg.solve_triangular(R, (S @ g)[:, None], upper=True)[:, 0]
        q = torch.addmv(g, Y.mT, a, beta=scale, alpha=-scale)
        rest = torch.addmv(D * a, Y, q, alpha=-1)
        c = linalg.solve_triangular(R.mT, rest[:, None], upper=False)[:, 0]
        return torch.addmv(q, S.mT, c, beta=-1, alpha=-1)


Evaluate = Callable[[Params], "tuple[Tensor, Params]"]
"""Parameters to loss and gradient."""


class Place(NamedTuple):
    """Parameters, with the loss to be minimised and its gradient there."""

    w: Tensor  # [n]
    value: float
    g: Tensor  # [n]


class Options(NamedTuple):
    """The settings of L-BFGS; step size and weight decay are vectors where they differ between parameters."""

    lr: float | Tensor
    weight_decay: float | Tensor
    maximize: bool
    max_iter: int
    max_eval: int
    tolerance_grad: float
    tolerance_change: float
    history_size: int
    line_search_fn: Literal["strong_wolfe"] | None


class Iteration(NamedTuple):
    """What one iteration did."""

    length: float  # of the direction; 0 if nothing moved
    evaluations: int  # of its line search


class Descent:
    """A loss with its penalty as a function of one vector, and the iterations that minimise it.

    Args:
        params: Where it begins.
        grads: The gradient of the loss there.
        value: The loss there, a number or a tensor of one element.
        evaluate: Loss and gradient elsewhere; None of a step that asks for neither.
        options: The hyper-parameters.

    Attributes:
        at: Where it is.
        last: The place before the last iteration, and the gradient there.
        num_iterations: How many there were.
        num_evaluations: How often the loss was evaluated, where it begins included.
        report: The last iteration that moved; or the last, if none did.
    """

    def __init__(
        self, params: Params, grads: Params, value: Any, evaluate: Evaluate | None, options: Options
    ) -> None:
        self._params, self._evaluate, self._options = params, evaluate, options
        self._sizes = [p.numel() for p in params.values()]
        self.at = self._place(flat(params.values()), value, grads)
        self.last: tuple[Tensor, Tensor] | None = None
        self.num_iterations, self.num_evaluations = 0, 1
        self.report = Iteration(0.0, 0)

    def tensors(self, w: Tensor) -> Params:
        """Return a vector as parameters."""
        parts = zip(self._params.items(), w.split_with_sizes(self._sizes), strict=True)
        return {key: part.view(p.shape) for (key, p), part in parts}

    def run(self, history: History, last: tuple[Tensor, Tensor] | None) -> None:
        """Iterate until nothing changes, or there were enough iterations or evaluations.

        Args:
            history: The pairs, to which new ones are added.
            last: The place before the last iteration of an earlier step, and the gradient there.
        """
        options, self.last = self._options, last
        while self.num_iterations < options.max_iter and self.num_evaluations < options.max_eval:
            begun = self.at
            if largest(begun.g) <= options.tolerance_grad:
                return
            if self.last is not None:
                place, gradient = self.last
                history.add(begun.w - place, begun.g - gradient, most=options.history_size)
            self.last = begun.w, begun.g
            change = self._iterate(self._scaled(history.direction(begun.g)))
            self.num_iterations += 1
            is_last = self.num_iterations == options.max_iter or self._evaluate is None
            if is_last or not math.isfinite(change) or torch.equal(begun.w, self.at.w):
                return
            if self.at.g is begun.g:
                self.at = self._evaluated(self.at.w)
            if (
                change <= options.tolerance_change
                or abs(self.at.value - begun.value) < options.tolerance_change
            ):
                return

    def _iterate(self, d: Tensor) -> float:
        """Take one step, after which without a search only w is known, and return the most that anything moves."""
        before, size = self.num_evaluations, largest(d)
        length = 1.0
        if self._options.line_search_fn is None:
            self.at = self.at._replace(w=self.at.w + d)
        else:
            length = self._searched(d, size)
        if length or not self.report.length:
            self.report = Iteration(length, self.num_evaluations - before)
        return length * size

    def _searched(self, d: Tensor, size: float) -> float:
        """Move by a line search, and return the length of the step; 0 if there is none."""
        options, begun = self._options, self.at
        start = Point(0.0, begun.value, begun.g.dot(d).item())
        if not (start.is_finite and start.slope < 0 and start.slope <= -options.tolerance_change):
            return 0.0
        found = [begun]

        def along(length: float) -> tuple[float, float]:
            found.append(self._evaluated(begun.w.add(d, alpha=length)))
            return found[-1].value, found[-1].g.dot(d).item()

        end = search_row(
            along,
            start,
            slack=10 * torch.finfo(d.dtype).eps * abs(begun.value),
            shortest=options.tolerance_change / size,
            max_eval=options.max_eval - self.num_evaluations,
        )
        self.at = found[end.evaluation]
        return end.length

    def _evaluated(self, w: Tensor) -> Place:
        assert self._evaluate is not None
        self.num_evaluations += 1
        value, grads = self._evaluate(self.tensors(w))
        return self._place(w, value, grads)

    def _place(self, w: Tensor, value: Any, grads: Params) -> Place:
        options, value, g = self._options, float(value), flat(grads[key] for key in self._params)
        if options.maximize:
            value, g = -value, -g
        decay = options.weight_decay
        if isinstance(decay, Tensor) or decay:
            penalty = decay * w
            value, g = value + float(w.dot(penalty)) / 2, g + penalty
        if isinstance(options.lr, Tensor):  # what has the step size 0 stays where it is
            g = torch.where(options.lr != 0, g, 0.0)
        return Place(w, value, g)

    def _scaled(self, d: Tensor) -> Tensor:
        """Multiply a direction that descends with the step sizes; or with the least of them, if that climbs."""
        lr = self._options.lr
        if not isinstance(lr, Tensor):
            return d if lr == 1 else lr * d
        scaled = lr * d
        return scaled if float(self.at.g.dot(scaled)) <= 0 else lr[lr > 0].min() * d


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Copy tensors into one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def largest(values: Tensor) -> float:
    """Return the largest absolute value."""
    return values.abs().max().item()
