"""Limited-memory BFGS: Newton's method with an inverse Hessian learned from the last gradients."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.curvature.solvers.iteration import divide, dot
from metagrad.optim.newton.second_order import Problem, Report, SecondOrder, check_can_evaluate, no_report
from metagrad.optim.newton.strong_wolfe import Searched, strong_wolfe
from metagrad.optim.rule import Hyperparameter, Params, functional_optimizer, hyperparameter, option


class LBFGSState(NamedTuple):
    """What :class:`LBFGSRule` carries from step to step; pairs are those of all parameters, in rows.

    Pairs that there are not yet are zeros without memory.
    """

    step: int  # steps taken
    place: Tensor  # where the last step began, [tasks, n]
    gradient: Tensor  # the gradient there, [tasks, n]
    moves: tuple[Tensor, ...]  # the last differences s of places, oldest first, [tasks, n] each
    changes: tuple[Tensor, ...]  # those of gradients, y
    num_pairs: int  # how many of them there are
    report: Report  # what the last step did


@functional_optimizer
class LBFGSRule(SecondOrder):
    r"""The functional form of L-BFGS.

    .. math:: w_t = w_{t-1} - \eta \, \alpha_t B_t g_t

    with the inverse Hessian :math:`B` that the last differences of places and gradients give, by the loop of two
    passes. A pair without positive curvature :math:`s^\top y` is left out. A step is one iteration, and without a
    line search that of ``torch.optim.LBFGS(max_iter=1)``.

    Derivatives are those of the steps, and with a line search those of the lengths, which are functions of the losses
    and gradients that it has looked at (``curvature`` must then be on the tape, as the gradients are).

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
        doc=r"The factor :math:`\eta` of every direction, in the forms of :data:`Hyperparameter`; may require "
        r"grad, as may ``weight_decay``. Of a dict, the direction is that of all parameters together. A line"
        r" search begins with this length, and may end at another.",
    )
    _: KW_ONLY
    weight_decay: Hyperparameter = hyperparameter(
        default=0.0,
        doc=r":math:`\gamma`: the loss is taken with the penalty :math:`\gamma |w|^2 / 2`, in gradient and line "
        r"search; forms as for ``lr``.",
    )
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
    maximize: bool = option(default=False, doc="Climb.")
    batch_ndim: int = 0

    call = "lbfgs(...)"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("history_size", "max_eval"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{self.call}: {name} must be a whole number of at least 1, got {value!r}.")
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

    def update(
        self, grads: Params, state: LBFGSState, params: Params, curvature: object | None = None
    ) -> tuple[Params, Any]:
        """Take one step; ``curvature`` is an :class:`~metagrad.optim.objective.Objective` for a line search."""
        if not params:
            return {}, state._replace(step=state.step + 1)
        problem = self.problem(grads, params, curvature, None, state.step)
        w, g = problem.space.place, problem.g
        if state.step > 0:
            state = _remembered(state, w - state.place, g - state.gradient)
        d = problem.scaled(_direction(g, state))
        found = Searched(torch.ones_like(g[:, 0]), 0)
        if self.line_search_fn is not None:
            self._check_line_search(curvature)
            found = self._searched(problem, d)
        # Where there is no length, the direction may be none, or not finite.
        move = torch.where((found.length > 0)[:, None], found.length[:, None] * d, 0.0)
        report = problem.report(None, None, found.length, steps=found.evaluations)
        return problem.moved(move), state._replace(step=state.step + 1, place=w, gradient=g, report=report)

    def _check_line_search(self, curvature: object | None) -> None:
        if curvature is None:
            raise ValueError(
                f"{self.call}.update: the line search needs the loss at other parameters, and curvature is None. "
                "Pass TapeObjective(loss, params), or set line_search_fn=None."
            )
        check_can_evaluate(self.call, curvature, "set line_search_fn=None")

    def _searched(self, problem: Problem, d: Tensor) -> Searched:
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
        A pair of a quadratic with the Hessian 4 says all there is to know:

        >>> from metagrad.optim.newton.lbfgs import two_loop
        >>> two_loop(torch.tensor([[8.0]]), torch.tensor([[[1.0]]]), torch.tensor([[[4.0]]]))
        tensor([[-2.]])

    References:
        Nocedal, Wright, "Numerical optimization", 2006, algorithm 7.4; Byrd, Nocedal, Schnabel, "Representations of
        quasi-Newton matrices and their use in limited memory methods", Mathematical Programming 63, 1994.
    """
    S, Y, last = moves, changes, changes[:, -1]
    R = (S @ Y.mT).triu()
    curvature = torch.diagonal(R, dim1=1, dim2=2)
    known = curvature > 0
    R = R + torch.diag_embed((~known).to(R.dtype))
    scale = divide(curvature[:, -1], dot(last, last), where=known[:, -1])[:, None]
    scale = torch.where(known[:, -1:], scale, _first_scale(g))
    # The first pass has the weights of R a = S g, and leaves q = g - Y^T a; the second those of
    # R^T c = D a - Y H_0 q, with the diagonal D of R.
    a = torch.linalg.solve_triangular(R, S @ g[:, :, None], upper=True)
    q = scale * (g - (a.mT @ Y).squeeze(1))
    c = torch.linalg.solve_triangular(R.mT, curvature[:, :, None] * a - Y @ q[:, :, None], upper=False)
    return -(q + (c.mT @ S).squeeze(1))


def _first_scale(g: Tensor) -> Tensor:
    """Make the first step no longer than 1 in the sum of its absolute values, ``[tasks, 1]``."""
    size = g.abs().sum(1, keepdim=True)
    return torch.where(size > 1, 1 / torch.where(size > 1, size, 1.0), 1.0)
