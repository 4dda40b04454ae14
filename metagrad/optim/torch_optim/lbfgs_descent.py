"""Iterations of L-BFGS on one vector of parameters, without a tape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.optim.newton.strong_wolfe import Point, search_row
from metagrad.optim.rule import Params
from metagrad.optim.torch_optim.lbfgs_history import History

Evaluate = Callable[[Params], "tuple[Tensor, Params]"]
"""Parameters to loss and gradient."""


class Place(NamedTuple):
    """Parameters, with the loss to be minimised and its gradient there."""

    w: Tensor  # [n]
    value: float
    g: Tensor  # [n]


class Options(NamedTuple):
    """What L-BFGS is told; step size and weight decay are vectors where they differ between parameters."""

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
        parts = zip(self._params.items(), w.split(self._sizes), strict=True)
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
