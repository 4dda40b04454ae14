"""Different rules for different parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from metagrad.core.checks import refuse
from metagrad.core.tree import Params, with_fresh_views
from metagrad.optim.rule import Rule, RuleNode
from metagrad.optim.transforms.chain import check_rule


class MaskState(NamedTuple):
    """The state of :class:`Mask`.

    Attributes:
        rule: State of ``rule``.
        other: State of ``other``. None if there is no other optimizer.
    """

    rule: Any
    other: Any


@dataclass(frozen=True, eq=False)
class Mask(RuleNode):
    """The rule that :func:`mask` makes."""

    rule: Rule
    names: tuple[str, ...] | Callable[[str], bool]
    other: Rule | None = None

    nested = ("rule", "other")

    def init(self, params: Params) -> MaskState:
        """Return the state before the first step."""
        for pattern in () if callable(self.names) else self.names:
            if params and not any(fnmatchcase(key, pattern) for key in params):
                raise ValueError(
                    f"mask(rule, names).init: {pattern!r} is the name of no parameter; they are {sorted(params)}."
                )
        named, others = self._split(params)
        return MaskState(self.rule.init(named), None if self.other is None else self.other.init(others))

    def update(self, grads: Params, state: MaskState, params: Params) -> tuple[Params, MaskState]:
        """Take one step."""
        named, others = self._split(params)
        named_grads, other_grads = self._split(grads)
        moved, rule_state = self.rule.update(named_grads, state.rule, named)
        other_state = None
        if self.other is not None:
            others, other_state = self.other.update(other_grads, state.other, others)
        both = with_fresh_views({**moved, **others}, params)
        return {key: both[key] for key in params}, MaskState(rule_state, other_state)

    def _split(self, tensors: Params) -> tuple[Params, Params]:
        """Return the tensors whose names match, and the remaining tensors."""
        parts: tuple[Params, Params] = ({}, {})
        for key, tensor in tensors.items():
            is_named = (
                self.names(key) if callable(self.names) else any(fnmatchcase(key, n) for n in self.names)
            )
            parts[0 if is_named else 1][key] = tensor
        return parts


def mask(
    rule: Rule, names: str | Sequence[str] | Callable[[str], bool], *, other: Rule | None = None
) -> Mask:
    """Make a rule for some parameters by name.

    Other parameters do not change, or use another functional optimizer.

    Args:
        rule: Rule of the parameters whose names match.
        names: Names, or patterns with ``*``, ``?`` and ``[...]`` as in file names, where ``*`` matches dots. A
            function of a name that returns a bool works as well.
        other: Rule for all other parameters. None leaves them unchanged.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``. Hyperparameters by parameter name
        have one entry for each parameter that their rule has.

    Raises:
        TypeError: ``rule`` or ``other`` is not a rule, or ``names`` are not names.
        ValueError: In ``init``, a name or a pattern fits no parameter.

    Example:
        >>> rules = metagrad.optim.rules
        >>> rule = rules.mask(rules.sgd(lr=1.0), "*.weight", other=rules.sgd(lr=0.5))
        >>> params = {"0.weight": torch.tensor(1.0), "0.bias": torch.tensor(1.0)}
        >>> rule.update({key: torch.tensor(1.0) for key in params}, rule.init(params), params)[0]
        {'0.weight': tensor(0.), '0.bias': tensor(0.5000)}

    References:
        Raghu et al., "Rapid learning or feature reuse? Towards understanding the effectiveness of MAML", ICLR 2020,
        section 4, which adapts the last layer alone (ANIL).
    """
    check_rule("mask(rule, ...)", rule)
    if other is not None:
        check_rule("mask(..., other)", other)
    if not callable(names):
        names = (names,) if isinstance(names, str) else tuple(names)
        for name in names:
            if not isinstance(name, str):
                refuse("mask(rule, names)", "parameter names, or a function of a name", name, TypeError)
    return Mask(rule, names, other)
