"""Chains: a rule after transforms of the gradients."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

from metagrad.core.checks import refuse
from metagrad.core.tree import Params
from metagrad.optim.rule import Rule, RuleNode, Transform


class ChainState(NamedTuple):
    """The state of :class:`Chain`.

    Attributes:
        transforms: States of the transforms.
        rule: State of the rule.
    """

    transforms: tuple[Any, ...]
    rule: Any


@dataclass(frozen=True, eq=False)
class Chain(RuleNode):
    """The rule that :func:`chain` makes."""

    transforms: tuple[Transform, ...]
    rule: Rule

    nested = ("transforms", "rule")

    def init(self, params: Params) -> ChainState:
        """Return the state before the first step."""
        return ChainState(tuple(t.init(params) for t in self.transforms), self.rule.init(params))

    def update(self, grads: Params, state: ChainState, params: Params) -> tuple[Params, ChainState]:
        """Take one step."""
        states = []
        for transform, before in zip(self.transforms, state.transforms, strict=True):
            grads, after = transform.transform(grads, before, params)
            states.append(after)
        params, rule_state = self.rule.update(grads, state.rule, params)
        return params, ChainState(tuple(states), rule_state)


def chain(*links: Transform | Rule) -> Chain:
    """Make a rule that applies transforms to the gradients, in order, and then another rule.

    Args:
        *links: Transforms, such as :func:`clip_by_norm`, and at the end a rule. A transform has ``init(params)`` and
            ``transform(grads, state, params) -> (grads, state)``.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``.

    Raises:
        TypeError: An argument before the last is not a transform, or the last is not a functional optimizer.

    Example:
        >>> rules = metagrad.optim.rules
        >>> rule = rules.chain(rules.clip_by_norm(1.0), rules.sgd(lr=1.0))
        >>> params = {"w": torch.zeros(4)}
        >>> rule.update({"w": torch.tensor([2.0, -2.0, 2.0, 2.0])}, rule.init(params), params)[0]["w"]
        tensor([-0.5000,  0.5000, -0.5000, -0.5000])

    References:
        Hessel et al., "Optax: composable gradient transformation and optimisation, in JAX", 2020.
    """
    *transforms, rule = links or (None,)
    for index, link in enumerate(transforms):
        if not hasattr(link, "transform"):
            raise TypeError(
                f"chain(*transforms, rule): link {index} must be a transform, such as clip_by_norm(1.0), got "
                f"{type(link).__name__}."
            )
    check_rule("chain(*transforms, rule)", rule)
    return Chain(tuple(transforms), rule)  # type: ignore[arg-type]


def check_rule(call: str, rule: object, name: str = "rule") -> None:
    """Raise ``TypeError`` unless an object has ``init`` and an ``update`` of three arguments."""
    if isinstance(rule, type) or not hasattr(rule, "init") or not hasattr(rule, "update"):
        got = rule if isinstance(rule, type) else type(rule).__name__
        refuse(
            f"{call}: {name}", "a functional optimizer, such as mg.optim.rules.sgd(lr=0.1)", got, TypeError
        )
    signature = inspect.signature(rule.update)  # type: ignore[reportAttributeAccessIssue]
    try:
        signature.bind("grads", "state", "params")
    except TypeError:
        raise TypeError(
            f"{call}: {name}.update must take (grads, state, params), but "
            f"{type(rule).__name__}.update takes {signature}."
        ) from None
