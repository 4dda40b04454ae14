"""L-BFGS as an optimizer of torch's kind."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from metagrad.optim.rules.lbfgs import lbfgs
from metagrad.optim.shells.newton_optimizer import NewtonOptimizer
from metagrad.optim.shells.optimizer import ParameterGroups


class LBFGS(NewtonOptimizer):
    r"""Optimize by L-BFGS, one iteration a step.

    .. math:: w_t = w_{t-1} - \eta \, \alpha_t B_t g_t

    see :func:`~metagrad.optim.rules.lbfgs.lbfgs`, whose steps these are. ``torch.optim.LBFGS`` takes up to 20
    iterations in a step, and one group; a step here is one, with gradients that may be clipped
    or accumulated where there is no line search, and groups may differ in step size and weight decay.

    Args:
        params: Parameters, with names or without, or groups of them, which make one vector.
        lr: The factor :math:`\eta` of every step.
        weight_decay: Of the loss with the penalty of half of it times the squared norm of the parameters.
        history: How many pairs are kept.
        line_search: ``"strong_wolfe"`` looks for a length, and needs a closure; None takes ``lr``.
        max_evaluations: The most gradients of a line search.
        maximize: Climb.

    Raises:
        ValueError: As for :class:`NewtonCG`.
        TypeError: As for :class:`NewtonCG`.

    Example:
        >>> from metagrad.optim.shells.lbfgs import LBFGS
        >>> w = torch.tensor([-1.2, 1.0], dtype=torch.float64, requires_grad=True)
        >>> opt = LBFGS([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = 100 * (w[1] - w[0] ** 2) ** 2 + (1 - w[0]) ** 2
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(50):
        ...     loss = opt.step(closure)
        >>> torch.allclose(w, torch.ones_like(w))
        True

    References:
        Liu, Nocedal, Mathematical Programming 45, 1989.
    """

    make_rule = staticmethod(lbfgs)
    differentiates_twice = False
    whole = "quasi_newton"

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        weight_decay: float | Tensor = 0.0,
        history: int = 10,
        line_search: Literal["strong_wolfe"] | None = "strong_wolfe",
        max_evaluations: int = 25,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "history": history,
                "line_search": line_search,
                "max_evaluations": max_evaluations,
                "maximize": maximize,
            },
        )
