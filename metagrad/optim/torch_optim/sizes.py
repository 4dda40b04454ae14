"""Elementwise steps in sizes that suit a machine: small parameters together, large ones in pieces.

A small parameter costs the operations of a step, however few its elements are; a large one costs memory traffic, and
on a CPU the faults of pages that every result is given afresh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from metagrad.optim.curvature import Curvature, KnownDiagonal
from metagrad.optim.rule import Params, Rule
from metagrad.optim.torch_optim.move import Change, working
from metagrad.optim.torch_optim.state import ParameterState, apart, joined, keep

_SMALL = {"cpu": 2**14}
_SMALL_ELSEWHERE = 2**22  # an accelerator waits for operations to be launched
_PIECE = 2**17  # elements whose temporaries stay in the cache, and whose memory the allocator keeps
_ALL = "all"


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
    curvature: Curvature | None,
) -> Change:
    """Compute a step of parameters of one dtype and device, as many steps old, as one vector."""
    values = {_ALL: _flat(params.values())}
    if "step" in next(iter(states.values())):
        state = joined(rule, {_ALL: _flat_states(list(states.values()))})
    else:
        state = rule.init(values)
    diagonals = _diagonals(rule, curvature)
    if diagonals:
        diagonals = {_ALL: _flat(diagonals[key] for key in params)}
    moved, state = rule.update({_ALL: _flat(grads.values())}, state, values, _known(curvature, diagonals))
    parts = [_split(field[_ALL], params) if isinstance(field, dict) else field for field in state]
    return Change(params, _split(moved[_ALL], params), apart(type(state)(*parts), params))


def move_pieces(
    rule: Rule, key: str, param: Tensor, gradient: Tensor, kept: ParameterState, curvature: Curvature | None
) -> None:
    """Move a parameter by pieces of its first dimension; parameter and state are written in place."""
    if "step" not in kept:
        # A rule may begin with one tensor in several slots, and these are written apart.
        keep(_map_slots(rule.init({key: working(param)}), torch.clone), {key: kept})
    state, diagonals = joined(rule, {key: kept}), _diagonals(rule, curvature)
    size = max(1, _PIECE * len(param) // param.numel())
    for start in range(0, len(param), size):
        part = slice(start, start + size)
        old = _map_slots(state, lambda slot, part=part: slot[part])
        diagonal = {key: diagonals[key][part]} if diagonals else {}
        moved, new = rule.update(
            {key: working(gradient[part])},
            old,
            {key: working(param[part])},
            _known(curvature, diagonal),
        )
        param[part].copy_(moved[key])
        for before, after in zip(old, new, strict=True):
            if isinstance(before, dict) and after[key] is not before[key]:
                before[key].copy_(after[key])
        step = new.step
    kept["step"] = step


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([working(tensor).reshape(-1) for tensor in tensors])


def _flat_states(states: Sequence[ParameterState]) -> ParameterState:
    return {
        field: _flat(state[field] for state in states) if isinstance(value, Tensor) else value
        for field, value in states[0].items()
    }


def _split(flat: Tensor, params: Params) -> Params:
    parts = flat.split([p.numel() for p in params.values()])
    return {key: part.view(p.shape) for (key, p), part in zip(params.items(), parts, strict=True)}


def _map_slots(state: Any, function: Any) -> Any:
    return type(state)(
        *(
            {key: function(slot) for key, slot in field.items()} if isinstance(field, dict) else field
            for field in state
        )
    )


def _diagonals(rule: Rule, curvature: Curvature | None) -> Params:
    return {} if curvature is None else curvature.diagonal(rule.request)  # type: ignore[attr-defined]


def _known(curvature: Curvature | None, diagonals: Params) -> Curvature | None:
    return None if curvature is None else KnownDiagonal(diagonals)
