"""Hyperparameters as functions of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad.core.tree import Params
from metagrad.optim.hyperparameters import count
from metagrad.optim.rule import Hyperparameter, Rule, RuleNode
from metagrad.optim.transforms.chain import check_rule


class ScheduleState(NamedTuple):
    """The state of :class:`Schedule`.

    Attributes:
        step: Steps taken.
        rule: The state of the rule.
    """

    step: int
    rule: Any


@dataclass(frozen=True, eq=False)
class Schedule(RuleNode):
    """The rule that :func:`schedule` makes."""

    rule: Rule
    functions: tuple[tuple[str, Callable[..., Any]], ...]

    nested = ("rule",)

    def init(self, params: Params) -> ScheduleState:
        """Return the state before the first step."""
        rule = self._at(0)
        for name, _ in self.functions:
            if isinstance(getattr(rule, name), (int, float)):
                # A value of 0 would disable a slot, but the structure of the state must not change later.
                rule = dataclasses.replace(rule, **{name: torch.ones(())})  # type: ignore[type-var]
        return ScheduleState(0, rule.init(params))

    def update(self, grads: Params, state: ScheduleState, params: Params) -> tuple[Params, ScheduleState]:
        """Take one step."""
        dtype = next((p.dtype for p in params.values()), torch.get_default_dtype())
        params, rule_state = self._at(count(state.step, dtype)).update(grads, state.rule, params)
        return params, ScheduleState(state.step + 1, rule_state)

    def _at(self, step: float | Tensor) -> Rule:
        values = {name: function(step) for name, function in self.functions}
        return dataclasses.replace(self.rule, **values)  # type: ignore[type-var]


def schedule(rule: Rule, **values: Callable[[Any], Hyperparameter] | Hyperparameter) -> Rule:
    r"""Make a rule whose hyperparameters are functions of the step, or have one value for each step.

    .. math:: w_{t+1} = \mathrm{update}_{h(t)}(w_t), \qquad t = 0, 1, \dots

    Args:
        rule: Any functional optimizer that has these hyperparameters. To schedule an optimizer within a chain or a
            mask, apply ``schedule`` to this optimizer: ``chain(clip_by_norm(1.0), schedule(adam(), lr=...))``.
        **values: A dict from the name of a hyperparameter to a function of the number of steps so far, which starts
            at 0. It returns a number or a tensor, which may require grad. A tensor ``[steps]`` works as for the rule
            itself. The function must depend only on its argument. In a compiled loop the argument is a 0-d tensor, so
            use arithmetic instead of ``if``.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``.

    Raises:
        ValueError: The rule has no hyperparameter of that name, or a value is out of its range.
        TypeError: ``rule`` is not a rule.

    Example:
        >>> rules = metagrad.optim.rules
        >>> rule, params = rules.schedule(rules.sgd(lr=1.0), lr=lambda t: 0.5**t), {"w": torch.tensor(0.0)}
        >>> state = rule.init(params)
        >>> for _ in range(3):
        ...     params, state = rule.update({"w": torch.tensor(-1.0)}, state, params)
        >>> params["w"]
        tensor(1.7500)

    References:
        Loshchilov, Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017, for schedules of the
        learning rate; Maclaurin, Duvenaud, Adams, "Gradient-based hyperparameter optimization through reversible
        learning", ICML 2015, section 3.1, for learning one.
    """
    check_rule("schedule(rule, ...)", rule)
    known = rule.hyper if isinstance(rule, RuleNode) else ()
    for name in values:
        if name not in known:
            raise ValueError(
                f"schedule(rule, {name}=...): {type(rule).__name__} has no hyperparameter of that name, it has "
                f"{list(known)}. Within a chain, schedule the rule itself."
            )
    functions = {name: value for name, value in values.items() if callable(value)}
    fixed = {name: value for name, value in values.items() if name not in functions}
    rule = dataclasses.replace(rule, **fixed) if fixed else rule  # type: ignore[type-var]
    return Schedule(rule, tuple(functions.items())) if functions else rule  # type: ignore[arg-type]
