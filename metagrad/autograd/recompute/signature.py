"""What determines the derivative of a recorded call, so that two calls that agree in it have one derivative.

The journal says which torch functions a call went through, with which constants; here stands besides which tensor
each of them was handed, what the tensors are that enter, and which ones leave. A call that does anything which the
journal cannot see, or sees without knowing all of it, has no signature.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.autograd.recompute.captured_tensors import Recorder
from metagrad.core._torch import is_functorch_wrapped, is_legacy_batched
from metagrad.core.writes import ALIASING_NAMES

# They hand a tensor to code that no mode sees, or change what a graph does.
_OPAQUE_NAMES = ALIASING_NAMES | {
    "__set__",
    "backward",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "retain_grad",
}
_OPAQUE_FUNCTIONS = {Tensor.grad_fn.__get__}  # type: ignore[attr-defined]
_PLAIN_TENSORS = (Tensor, nn.Parameter)


def signature_of(recorder: Recorder, outputs: Sequence[Tensor], surroundings: Hashable) -> Hashable | None:
    """Return what determines the derivative of a call; None if not all of it is known.

    Args:
        recorder: What has seen the call run.
        outputs: What it returned, with a graph that no custom ``autograd.Function`` is part of.
        surroundings: The settings under which it ran.
    """
    reads = recorder.reads
    if not reads.is_transparent or reads.random.states or reads.writes.before:
        return None
    operands = kinds(recorder.operands())
    leaves = [(recorder.origin_of(output), output.requires_grad) for output in outputs]
    if operands is None or any(origin is None for origin, _ in leaves):
        return None
    constants = tuple(itertools.chain.from_iterable(reads.journal.entries))
    try:
        if not _are_known(constants):
            return None
    except TypeError:  # a constant that has no hash
        return None
    slots = tuple((number, *slots.items()) for number, slots in reads.slots.items())
    flow = tuple(map(tuple, reads.flow))
    made = tuple(reads.made.items())
    return constants, _types(constants), flow, made, slots, operands, tuple(leaves), surroundings


def kinds(tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Return what operations depend on beside the values of tensors; None if one is no plain tensor."""
    found = []
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TENSORS or tensor.layout is not torch.strided or tensor.is_complex():
            return None
        if is_functorch_wrapped(tensor) or is_legacy_batched(tensor) or tensor.is_neg():
            return None
        found.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _are_known(constants: tuple[Any, ...]) -> bool:
    """Say whether no argument is known by its type or its code alone, and no function hides what it does."""
    return not any(
        isinstance(value, types.CodeType)
        or (isinstance(value, type) and value is not Tensor)
        or (callable(value) and _is_opaque(value))
        for value in constants
    )


def _is_opaque(function: Any) -> bool:
    return getattr(function, "__name__", "") in _OPAQUE_NAMES or function in _OPAQUE_FUNCTIONS


def _types(constants: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what tells 1 from 1.0 and from True, and 0.0 from -0.0, which are equal."""
    return *map(type, constants), *[str(value) for value in constants if value == 0 and type(value) is float]
