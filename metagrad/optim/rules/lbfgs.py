"""Limited-memory BFGS: Newton's method with an inverse Hessian learned from the last gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.optim.rules.flat import RowSpace, divide, dot
from metagrad.optim.rules.rule import Hyperparameter, Params
from metagrad.optim.rules.second_order import Problem, Report, SecondOrder, check_can_evaluate, no_report
from metagrad.optim.rules.strong_wolfe import strong_wolfe


class LBFGSState(NamedTuple):
    """What :class:`LBFGS` carries from step to step."""

    step: int  # steps taken
    place: Params  # where the last step began
    gradient: Params  # the gradient there
    moves: Params  # the last differences of places, [tasks, history, ...]; zero where there are none
    changes: Params  # those of gradients
    report: Report  # what the last step did


@dataclass(frozen=True, eq=False)
class LBFGS(SecondOrder):
    """The rule that :func:`lbfgs` makes."""

    lr: Hyperparameter = 1.0
    weight_decay: Hyperparameter = 0.0
    history: int = 10
    line_search: Literal["strong_wolfe"] | None = None
    max_evaluations: int = 25
    maximize: bool = False
    batch_ndim: int = 0

    call, hyper = "lbfgs(...)", ("lr", "weight_decay")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("history", "max_evaluations"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{self.call}: {name} must be a whole number of at least 1, got {value!r}.")
        if self.line_search not in (None, "strong_wolfe"):
            raise ValueError(
                f'{self.call}: line_search must be "strong_wolfe" or None, got {self.line_search!r}.'
            )

    def needs_curvature(self, step: int) -> bool:
        """Say whether the loss is needed at other parameters; curvature itself never is."""
        return self.line_search is not None

    def init(self, params: Params) -> Any:
        """Return the state before the first step."""
        number = self.begun(params)
        zeros = {key: torch.zeros_like(p) for key, p in params.items()}
        b = self.batch_ndim
        pairs = {key: p.new_zeros((*p.shape[:b], self.history, *p.shape[b:])) for key, p in params.items()}
        return LBFGSState(0, zeros, zeros, pairs, dict(pairs), no_report(number))

    def update(
        self, grads: Params, state: LBFGSState, params: Params, curvature: object | None = None
    ) -> tuple[Params, Any]:
        """Take one step; ``curvature`` is an :class:`~metagrad.optim.rules.objective.Objective` for a line search."""
        if not params:
            return {}, state._replace(step=state.step + 1)
        problem = self.problem(grads, params, curvature, None, state.step)
        space, g = problem.space, problem.g
        w = space.rows(params)
        moves, changes = self._pairs(space, state.moves), self._pairs(space, state.changes)
        if state.step > 0:
            moves, changes = _remembered(
                moves, changes, w - space.rows(state.place), g - space.rows(state.gradient)
            )
        d, lr = problem.relative(two_loop(g, moves, changes))
        length, evaluations = torch.ones_like(g[:, 0]), 0
        if self.line_search is not None:
            self._check_line_search(curvature)
            length, evaluations = self._searched(problem, d)
        return problem.moved((lr * length)[:, None] * d), LBFGSState(
            state.step + 1,
            space.tensors(w),  # a copy: parameters may be written in place
            space.tensors(g),
            self._tensors(space, moves),
            self._tensors(space, changes),
            problem.report(None, None, length, steps=evaluations),
        )

    def _check_line_search(self, curvature: object | None) -> None:
        if curvature is None:
            raise ValueError(
                f"{self.call}.update: the line search needs the loss at other parameters, and curvature is None. "
                "Pass TapeObjective(loss, params), or set line_search=None."
            )
        check_can_evaluate(self.call, curvature, "set line_search=None")

    def _searched(self, problem: Problem, d: Tensor) -> tuple[Tensor, int]:
        direction = d.detach()

        def along(length: Tensor) -> tuple[Tensor, Tensor]:
            value, g = problem.gradient(length[:, None] * direction)
            return value, dot(g, direction)

        return strong_wolfe(
            along,
            problem.before,
            dot(problem.g.detach(), direction),
            slack=problem.slack,
            max_evaluations=self.max_evaluations,
        )

    def _pairs(self, space: RowSpace, tensors: Params) -> Tensor:
        """Write a history as ``[tasks, history, n]``."""
        return torch.cat(
            [
                pair.reshape(-1, self.history, p.numel() // max(1, space.each(0.0).numel()))
                for pair, p in zip(tensors.values(), space.params.values(), strict=True)
            ],
            2,
        )

    def _tensors(self, space: RowSpace, pairs: Tensor) -> Params:
        b, num_tasks = self.batch_ndim, len(pairs)
        parts = pairs.split([p.numel() // num_tasks for p in space.params.values()], 2)
        return {
            key: part.reshape(*p.shape[:b], self.history, *p.shape[b:])
            for (key, p), part in zip(space.params.items(), parts, strict=True)
        }


def _remembered(moves: Tensor, changes: Tensor, move: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """Put a pair in the place of the oldest, where it has the curvature that keeps the matrix positive definite."""
    curved = dot(move, change) > torch.finfo(move.dtype).eps * dot(change, change)
    is_new = curved[:, None, None]
    return (
        torch.where(is_new, torch.cat([moves[:, 1:], move[:, None]], 1), moves),
        torch.where(is_new, torch.cat([changes[:, 1:], change[:, None]], 1), changes),
    )


def two_loop(g: Tensor, moves: Tensor, changes: Tensor) -> Tensor:
    r"""Multiply :math:`-g` with the inverse Hessian of BFGS, row by row.

    .. math:: H_{k+1} = (I - \rho s y^\top) H_k (I - \rho y s^\top) + \rho s s^\top, \qquad \rho = 1 / s^\top y,
              \qquad H_0 = \frac{s^\top y}{y^\top y} I

    Args:
        g: Gradients ``[tasks, n]``.
        moves: The differences s of places, oldest first, ``[tasks, history, n]``; zero where there are none.
        changes: The differences y of gradients, likewise.

    Returns:
        Directions of descent. Without a pair: minus the gradient, made no longer than 1 in the sum of its absolute
        values.

    Example:
        A pair of a quadratic with the Hessian 4 says all there is to know:

        >>> from metagrad.optim.rules.lbfgs import two_loop
        >>> two_loop(torch.tensor([[8.0]]), torch.tensor([[[1.0]]]), torch.tensor([[[4.0]]]))
        tensor([[-2.]])
    """
    products = (moves * changes).sum(-1)
    known = products > 0
    inverse = divide(torch.ones_like(products), products, where=known)
    q, weights = g, []
    for index in reversed(range(moves.shape[1])):
        weight = inverse[:, index] * dot(moves[:, index], q)
        q = q - weight[:, None] * changes[:, index]
        weights.append(weight)
    size = g.abs().sum(1)
    short = torch.where(size > 1, 1 / torch.where(size > 1, size, 1.0), 1.0)
    scale = divide(products[:, -1], dot(changes[:, -1], changes[:, -1]), where=known[:, -1])
    q = torch.where(known[:, -1], scale, short)[:, None] * q
    for index, weight in zip(range(moves.shape[1]), reversed(weights), strict=True):
        q = q + (weight - inverse[:, index] * dot(changes[:, index], q))[:, None] * moves[:, index]
    return -q


def lbfgs(
    lr: Hyperparameter = 1.0,
    *,
    weight_decay: Hyperparameter = 0.0,
    history: int = 10,
    line_search: Literal["strong_wolfe"] | None = None,
    max_evaluations: int = 25,
    maximize: bool = False,
) -> LBFGS:
    r"""Make the rule of L-BFGS.

    .. math:: w_t = w_{t-1} - \eta \, \alpha_t B_t g_t

    with the inverse Hessian :math:`B` that the last differences of places and gradients give, by the loop of two
    passes. A pair without positive curvature :math:`s^\top y` is left out. A step is one iteration, and without a
    line search that of ``torch.optim.LBFGS(max_iter=1)``.

    Derivatives are those of the loop; the lengths that a line search finds are powers and sums of powers of 1/2,
    which do not change with small changes, and constants.

    Args:
        lr: The factor :math:`\eta` of every step, in the forms of :data:`Hyperparameter`; may require grad, as
            may ``weight_decay``. Of a dict, the direction is that of all parameters together.
        weight_decay: :math:`\gamma`: the loss is taken with the penalty :math:`\gamma |w|^2 / 2`, in gradient and
            line search; forms as for ``lr``.
        history: How many pairs are kept.
        line_search: ``"strong_wolfe"`` looks for a length :math:`\alpha` that satisfies the strong Wolfe conditions,
            at the cost of a gradient each; None takes 1.
        max_evaluations: The most gradients of a line search.
        maximize: Climb.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params, curvature)``; ``state.report.steps``
        counts the gradients of the line search.

    Raises:
        ValueError: A number is out of its range; in ``init``, parameters are of several dtypes or devices; in
            ``update``, a gradient is missing, or there is a line search and no curvature.
        TypeError: As for :func:`~metagrad.optim.rules.newton_cg.newton_cg`.

    Example:
        The second step on a quadratic in one variable is to its minimum:

        >>> from metagrad.optim.rules.lbfgs import lbfgs
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
    return LBFGS(
        lr=lr,
        weight_decay=weight_decay,
        history=history,
        line_search=line_search,
        max_evaluations=max_evaluations,
        maximize=maximize,
    )
