"""Which tensors a torch function writes into, by its name and its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from metagrad.core.tree import tensors_in

_AUGMENTED = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
]
_STATISTICS = {F.batch_norm, F.instance_norm}
_RENORMALISING = {F.embedding, F.embedding_bag}
_WRITING_NAMES = {f"__i{name}__" for name in _AUGMENTED} | {"__setitem__", "__set__"}
_HARMLESS_NAMES = {"requires_grad_", "detach_", "share_memory_", "rename_"}
# What gives access to the memory itself, through which it may be written.
ALIASING_NAMES = {"numpy", "__array__", "untyped_storage", "storage", "data_ptr", "__dlpack__"}


def may_write(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Say whether a torch function writes into anything, by its name and its keywords alone."""
    return _writing(function) is not None or "out" in kwargs


def written_by(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a torch function may write into."""
    found = tensors_in(kwargs["out"]) if "out" in kwargs else []
    kind = _writing(function)
    if kind is None:
        return found
    if kind == "first":
        return found + tensors_in(args[:1])
    bound = _bound(function, args, kwargs)
    if kind == "statistics":
        updated = bound.get("training") or bound.get("use_input_stats")
        return found + (tensors_in((bound.get("running_mean"), bound.get("running_var"))) if updated else [])
    if kind == "renormalised":
        return found + (tensors_in(bound["weight"]) if bound.get("max_norm") is not None else [])
    return found + (tensors_in(args[:1] or bound.get("input")) if bound.get("inplace") else [])


@functools.lru_cache(maxsize=4096)
def _writing(function: Callable[..., Any]) -> str | None:
    """Say which arguments, besides ``out``, a torch function writes into; None if there are none."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS_NAMES
    if in_place or name in _WRITING_NAMES | ALIASING_NAMES:
        return "first"
    if function in _STATISTICS:
        return "statistics"
    if function in _RENORMALISING:
        return "renormalised"
    is_layer = getattr(function, "__module__", None) == F.__name__
    return "inplace" if is_layer and "inplace" in _parameters(function) else None


@functools.lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(_parameters(function), args, strict=False)) | kwargs
