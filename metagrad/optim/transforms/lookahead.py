"""Lookahead: slow parameters that follow fast ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad.core.checks import is_integer
from metagrad.optim.arithmetic import plus_scaled
from metagrad.optim.hyperparameters import check_hyperparameter, values_at
from metagrad.optim.rule import Hyperparameter, Params, Rule, RuleNode
from metagrad.optim.transforms.chain import check_rule


class LookaheadState(NamedTuple):
    """The state of :class:`Lookahead`.

    Attributes:
        step: Steps taken.
        slow: The slow parameters, in the shapes of the parameters.
        rule: The state of the rule of the fast ones.
    """

    step: int
    slow: Params
    rule: Any


@dataclass(frozen=True, eq=False)
class Lookahead(RuleNode):
    """The rule that :func:`lookahead` makes."""

    rule: Rule
    k: int = 5
    alpha: Hyperparameter = 0.5

    hyper = ("alpha",)
    nested = ("rule",)

    def __post_init__(self) -> None:
        check_hyperparameter("lookahead(rule, ...)", "alpha", self.alpha)

    def init(self, params: Params) -> LookaheadState:
        """Return the state before the first step."""
        return LookaheadState(0, dict(params), self.rule.init(params))

    def update(
        self, grads: Params, state: LookaheadState, params: Params, curvature: object | None = None
    ) -> tuple[Params, LookaheadState]:
        """Take one fast step, and after every ``k`` a slow one; ``curvature`` goes to the rule as it is."""
        fast, rule_state = self.rule.update(grads, state.rule, params, curvature)
        steps, slow = state.step + 1, state.slow
        is_due = steps % self.k == 0
        if isinstance(is_due, Tensor) or is_due:
            alphas = values_at("alpha", self.alpha, state.step, params)
            met = {key: _between(slow[key], fast[key], a) for key, a in zip(params, alphas, strict=True)}
            fast = {key: _chosen(is_due, met[key], fast[key]) for key in params}
            slow = {key: _chosen(is_due, met[key], slow[key]) for key in params}
        return fast, LookaheadState(steps, slow, rule_state)


def _between(slow: Tensor, fast: Tensor, alpha: float | Tensor) -> Tensor:
    return plus_scaled(slow, alpha, fast - slow).to(slow.dtype)


def _chosen(is_due: bool | Tensor, met: Tensor, stayed: Tensor) -> Tensor:
    return torch.where(is_due, met, stayed) if isinstance(is_due, Tensor) else met


def lookahead(rule: Rule, *, k: int = 5, alpha: Hyperparameter = 0.5) -> Lookahead:
    r"""Make a rule whose parameters, after every ``k`` steps, go back part of the way to where they were before.

    .. math::
        \theta_{i+1} = \mathrm{update}(\theta_i), \qquad
        \phi \leftarrow \phi + \alpha (\theta_k - \phi), \quad \theta_0 \leftarrow \phi
        \quad \text{after every } k \text{ steps}

    The state of the rule, its momentum say, goes on across the slow steps.

    Args:
        rule: The rule of the fast steps.
        k: How many fast steps make a slow one, at least 1.
        alpha: The part of the way that the slow parameters go, :math:`\alpha`, in the forms of
            :data:`Hyperparameter`; may require grad.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``; its parameters are the fast ones.

    Raises:
        ValueError: ``k`` is below 1, or ``alpha`` negative.
        TypeError: ``rule`` is not a rule, ``k`` is not an int, or ``alpha`` is of an unknown form.

    Example:
        Two steps of -1, and half of the way back:

        >>> rules = metagrad.optim.rules
        >>> rule, params = rules.lookahead(rules.sgd(lr=1.0), k=2, alpha=0.5), {"w": torch.tensor(0.0)}
        >>> state = rule.init(params)
        >>> for _ in range(3):
        ...     params, state = rule.update({"w": torch.tensor(1.0)}, state, params)
        ...     print(params["w"].item())
        -1.0
        -1.0
        -2.0

    References:
        Zhang et al., "Lookahead optimizer: k steps forward, 1 step back", NeurIPS 2019, algorithm 1.
    """
    check_rule("lookahead(rule, ...)", rule)
    if not is_integer(k):
        raise TypeError(f"lookahead(rule, k): k must be an int, got {type(k).__name__}.")
    if k < 1:
        raise ValueError(f"lookahead(rule, k): k must be at least 1, got {k}.")
    return Lookahead(rule, k, alpha)
