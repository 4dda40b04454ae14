"""One step of a rule: of whole parameters, one vector, pieces or touched rows; and its writing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metagrad.core.tree import tree_leaves, tree_map, widened
from metagrad.optim.rule import Params, Rule
from metagrad.optim.torch_optim.state import ParameterState, apart, completed, joined
from metagrad.sparse.tables.row_sparse import RowSparse, gather_rows

_SMALL = {"cpu": 2**14}
_SMALL_ELSEWHERE = 2**22  # an accelerator waits for operations to be launched
_PIECE = 2**17  # elements whose temporaries stay in the cache, and whose memory the allocator keeps
_ALL = "all"


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


@dataclass(frozen=True)
class Later:
    """A change of a large parameter, which is computed as it is written, so that memory is that of its parts.

    It is free of NaN and infinities where gradient and curvature are, but for an overflow.
    """

    write: Callable[[MutableMapping[Tensor, ParameterState]], None]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: its values are not known yet."""
        return iter(())


def step_whole(
    rule: Rule,
    params: Params,
    grads: Params,
    states: Mapping[str, ParameterState],
) -> Change:
    """Compute a step of parameters that have taken the same number of steps."""
    values = {key: widened(p) for key, p in params.items()}
    state = joined(rule, states, values)
    moved, state = rule.update({key: widened(g) for key, g in grads.items()}, state, values)
    # The next backward pass may write into a gradient, which a rule may keep.
    state = _map_fields(state, lambda slots: {key: _other_than(grads[key], slots[key]) for key in slots})
    return Change(params, moved, apart(state, params))


def _other_than(gradient: Tensor, slot: Any) -> Any:
    """Copy what is kept of a parameter where it is its gradient itself."""
    return slot.clone() if slot is gradient else slot


def step_rows(
    rule: Rule,
    key: str,
    table: Tensor,
    gradient: Tensor,
    kept: ParameterState,
) -> Change:
    """Compute a step of the rows of a table that were ever touched, which is what the dense rule moves.

    The state has a slot ``rows``, int64 and ascending, and holds of every other slot those rows alone.
    """
    known = _known_rows(kept, table)
    rows = torch.unique(torch.cat([known, _touched_rows(gradient)]))
    values = {key: widened(table.index_select(0, rows))}
    state = rule.init(values)
    if "step" in kept:
        state = joined(rule, {key: _grown(state, key, kept, torch.searchsorted(rows, known))}, values)
    g = {key: widened(_gathered(gradient, rows))}
    moved, state = rule.update(g, state, values)
    states = {key: {**apart(state, [key])[key], "rows": rows}}
    return Change({key: table}, moved, states, rows)


def _known_rows(kept: ParameterState, table: Tensor) -> Tensor:
    """Return the rows that the state holds: of a table whose gradients were dense, all of them."""
    if "step" not in kept:
        return torch.empty(0, dtype=torch.int64, device=table.device)
    return kept["rows"] if "rows" in kept else torch.arange(len(table), device=table.device)


def _touched_rows(gradient: Tensor) -> Tensor:
    if isinstance(gradient, RowSparse):
        return gradient.rows
    return torch.arange(len(gradient), device=gradient.device)


def _gathered(value: Tensor, rows: Tensor) -> Tensor:
    if isinstance(value, RowSparse):
        return gather_rows(value, rows, unique=True)
    return value.index_select(0, rows)


def _grown(fresh: object, key: str, kept: ParameterState, places: Tensor) -> ParameterState:
    """Put what is kept of rows into the state of more of them."""
    grown = dict(kept)
    for field, value in zip(fresh._fields, fresh, strict=True):  # type: ignore[attr-defined]
        if isinstance(value, dict):
            grown[field] = value[key].index_copy(0, places, kept[field]) if field in kept else value[key]
    return grown


def is_small(param: Tensor) -> bool:
    """Say whether copying a parameter costs less than the operations of a step of its own."""
    return param.numel() <= _SMALL.get(param.device.type, _SMALL_ELSEWHERE)


def is_large(param: Tensor) -> bool:
    """Say whether a parameter is better moved in pieces."""
    return param.device.type == "cpu" and param.numel() > _PIECE and len(param) > 1


def step_flat(
    rule: Rule,
    params: Params,
    grads: Params,
    states: Mapping[str, ParameterState],
) -> Change:
    """Compute a step of parameters of one dtype and device, as many steps old, as one vector."""
    values = {_ALL: _flat(params.values())}
    state = _map_fields(joined(rule, states, params), lambda field: {_ALL: _flat(field.values())})
    moved, state = rule.update({_ALL: _flat(grads.values())}, state, values)
    parts = _map_fields(state, lambda field: _split(field[_ALL], params))
    return Change(params, _split(moved[_ALL], params), apart(parts, params))


def move_pieces(rule: Rule, key: str, param: Tensor, gradient: Tensor, kept: ParameterState) -> None:
    """Move a parameter by pieces of its first dimension; parameter and state are written in place."""
    state = in_place(rule, {key: param}, {key: kept})
    size = max(1, _PIECE * len(param) // param.numel())
    for start in range(0, len(param), size):
        part = slice(start, start + size)
        old = _map_slots(state, lambda slot, part=part: slot[part])
        moved, new = rule.update(
            {key: widened(gradient[part])},
            old,
            {key: widened(param[part])},
        )
        param[part].copy_(moved[key])
        for before, after in zip(old, new, strict=True):
            if isinstance(before, dict) and after[key] is not before[key]:
                before[key].copy_(after[key])
        step = new.step
    kept["step"] = step


def in_place(rule: Rule, params: Params, states: Mapping[str, ParameterState]) -> Any:
    """Return the state of a rule, to be written in place; what it lacks is begun, and kept."""
    for key, state in completed(rule, states, params).items():
        begun = {slot: value for slot, value in state.items() if slot not in states[key]}
        # A rule may begin with one tensor in several slots, and these are written apart.
        states[key].update(tree_map(_cloned, begun))
    return joined(rule, states, params)


def _cloned(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([widened(tensor).reshape(-1) for tensor in tensors])


def _split(flat: Tensor, params: Params) -> Params:
    parts = flat.split_with_sizes([p.numel() for p in params.values()])
    return {key: part.view(p.shape) for (key, p), part in zip(params.items(), parts, strict=True)}


def _map_fields(state: Any, function: Callable[[Params], Params]) -> Any:
    """Map what a state has of each parameter; the other fields, such as the step, pass."""
    return type(state)(*(function(field) if isinstance(field, dict) else field for field in state))


def _map_slots(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return _map_fields(state, lambda field: {key: function(slot) for key, slot in field.items()})
