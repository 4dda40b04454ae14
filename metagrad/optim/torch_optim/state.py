"""The state of a rule, stored by parameter as in ``torch.optim``, and steps that are written only if finite."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from metagrad.core._torch import pytree
from metagrad.core.tree import Params, tree_leaves, widened
from metagrad.optim.rule import Rule

ParameterState: TypeAlias = dict[str, Any]
"""The state of one parameter: its number of steps, ``step``, and a tensor or pytree for each slot."""


def joined(rule: Rule, states: Mapping[str, ParameterState], params: Params) -> Any:
    """Combine the states of parameters into the state of a rule, and initialize missing slots.

    All slots are missing before the first step. Later a slot is missing if its option was enabled after the last
    step.
    """
    pattern = _pattern_of(rule)
    slots = [field for field, value in pattern._asdict().items() if isinstance(value, dict)]
    if not all(slot in state for state in states.values() for slot in ("step", *slots)):
        begun = apart(rule.init({key: widened(params[key]) for key in states}), states)
        states = {key: {**begun[key], **state} for key, state in states.items()}
    fields = {field: {key: state[field] for key, state in states.items()} for field in slots}
    return pattern._replace(step=next(iter(states.values()))["step"], **fields)


_PATTERNS: weakref.WeakKeyDictionary[Rule, Any] = weakref.WeakKeyDictionary()


def _pattern_of(rule: Rule) -> Any:
    """Return the state of a rule without parameters. A slot is None if its option is off."""
    if rule not in _PATTERNS:
        _PATTERNS[rule] = rule.init({})
    return _PATTERNS[rule]


def apart(state: Any, keys: Iterable[str]) -> dict[str, ParameterState]:
    """Split the state of a rule into the states of its parameters."""
    fields = {field: value for field, value in state._asdict().items() if value is not None}
    return {
        key: {field: value[key] if isinstance(value, dict) else value for field, value in fields.items()}
        for key in keys
    }


@contextlib.contextmanager
def keeping_dtypes(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Replace the cast of ``torch.optim``'s ``load_state_dict``, which gives state the dtype of the parameter.

    With that cast, a float32 average of a bfloat16 parameter would lose 16 bits at every resume, and row numbers
    would become floating point. Tensors are copied, so two optimizers never share a tensor.
    """
    given: dict[str, Any] = {}

    def remember(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        given.update(state_dict)

    def restore(optimizer: torch.optim.Optimizer) -> None:
        numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, p in zip(numbers, params, strict=True):
            if number in given["state"]:
                optimizer.state[p] = pytree.tree_map_only(
                    Tensor, lambda value, p=p: _loaded(value, p), given["state"][number]
                )

    hooks = [
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _loaded(value: Tensor, param: Tensor) -> Tensor:
    """Copy a tensor of a state to the device of its parameter, floating point in the dtype that steps use."""
    dtype = torch.promote_types(param.dtype, torch.float32) if value.is_floating_point() else value.dtype
    return value.detach().to(param.device, dtype, copy=True)


@dataclass(frozen=True)
class PendingUpdate:
    """The new values and states of some parameters after a step, computed and not yet written.

    Attributes:
        params: The parameters.
        moved: New values of the parameters, or of the ``rows`` of a table.
        states: New entries of the state of each parameter.
        rows: Rows of a table that change. None if whole parameters change.
        used: Other inputs that must be finite, by description.
        implied: Slots that are known to be finite if all other slots are.
    """

    params: Params
    moved: Params
    states: Mapping[str, ParameterState]
    rows: Tensor | None = None
    used: Mapping[str, Tensor] = dataclasses.field(default_factory=dict[str, Tensor])
    implied: Collection[str] = ()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors that must be finite, with a description."""
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
        """Write parameters in place, and their state into the state of an optimizer."""
        for key, state in self.states.items():
            kept[self.params[key]].update(state)
        for key, value in self.moved.items():
            p = self.params[key]
            if self.rows is None:
                p.copy_(value)
            else:
                p.index_copy_(0, self.rows, value.to(p.dtype))


def step_whole(
    rule: Rule, params: Params, grads: Params, states: Mapping[str, ParameterState]
) -> PendingUpdate:
    """Compute a step of parameters that have taken the same number of steps."""
    values = {key: widened(p) for key, p in params.items()}
    state = joined(rule, states, values)
    moved, state = rule.update({key: widened(g) for key, g in grads.items()}, state, values)
    return PendingUpdate(params, moved, apart(state, params))
