"""One step of parameters: computed first, and written when all of it is finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from torch import Tensor

from metagrad.core.tree import tree_leaves, widened
from metagrad.optim.rule import Params, Rule
from metagrad.optim.torch_optim.state import ParameterState, apart, joined


@dataclass(frozen=True)
class Change:
    """The new values and states of some parameters after a step, computed and not yet written.

    Attributes:
        params: The parameters.
        moved: Their new values; of a table, those of ``rows``.
        states: What is new in the state of each.
        rows: Which rows of a table moved; None of whole parameters.
        used: What else it was made of, and must be finite, by description.
        implied: The slots that are finite where the other ones are.
    """

    params: Params
    moved: Params
    states: Mapping[str, ParameterState]
    rows: Tensor | None = None
    used: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    implied: Collection[str] = ()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all that must be finite, with a description."""
        yield from self.used.items()
        for key, value in self.moved.items():
            yield f"the new value of {key!r}", value
        for key, state in self.states.items():
            for slot, value in state.items():
                if slot in self.implied:
                    continue
                for leaf in tree_leaves(value):
                    if isinstance(leaf, Tensor) and leaf.is_floating_point():
                        yield f"the new state {slot!r} of {key!r}", leaf

    def write(self, kept: MutableMapping[Tensor, ParameterState]) -> None:
        """Write parameters in place, and their state into that of an optimizer."""
        for key, state in self.states.items():
            kept[self.params[key]].update(state)
        for key, value in self.moved.items():
            p = self.params[key]
            if self.rows is None:
                p.copy_(value)
            else:
                p.index_copy_(0, self.rows, value.to(p.dtype))


def step_whole(rule: Rule, params: Params, grads: Params, states: Mapping[str, ParameterState]) -> Change:
    """Compute a step of parameters that have taken the same number of steps."""
    values = {key: widened(p) for key, p in params.items()}
    state = joined(rule, states, values)
    moved, state = rule.update({key: widened(g) for key, g in grads.items()}, state, values)
    return Change(params, moved, apart(state, params))
