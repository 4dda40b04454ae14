"""``torch.vmap`` of models: what it would compute wrongly in silence is set right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from metagrad.core import _torch
from metagrad.meta.vmap_rules import RULES, Call, VmapRule

T = TypeVar("T")


class NotStackableError(Exception):
    """A model cannot be called for stacked tasks; says why, to follow "because"."""


def vmapped(fn: Callable[..., T]) -> Callable[..., T]:
    """Return ``torch.vmap(fn)``, in which each task draws random numbers of its own.

    The function sees which tensors require grad, as it would see outside of ``torch.vmap``; padding of embeddings has
    no gradient; other operations of the table ``vmap_rules`` raise :class:`NotStackableError`.
    """

    def call(*args: Any) -> T:
        with _Corrections():
            return fn(*args)

    return torch.vmap(call, randomness="different")  # type: ignore[reportReturnType]


class _Corrections(TorchFunctionMode):
    """Takes functions that torch.vmap computes wrongly, and passes all others on."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        handler = _HANDLERS.get(func)
        return func(*args, **(kwargs or {})) if handler is None else handler(func, args, kwargs or {})


def _requires_grad(func: Callable[..., bool], args: tuple, kwargs: dict[str, Any]) -> bool:
    tensor = args[0]
    while _torch.is_batched(tensor):
        tensor = _torch.get_unwrapped(tensor)
    return func(tensor)


def _embedding(func: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Look up rows; torch.vmap passes the padding row of the first task on as that of all (torch 2.13)."""
    call = Call(args, kwargs)
    first, second = call.argument(0, _NAMES[func][0]), call.argument(1, _NAMES[func][1])
    ids, table = (first, second) if func is F.embedding else (second, first)
    padding = call.argument(2, "padding_idx")
    if padding is None or type(table) is not Tensor or (func is torch.embedding and padding < 0):
        return func(*args, **kwargs)
    unpadded = {key: value for key, value in kwargs.items() if key not in (*_NAMES[func], "padding_idx")}
    vectors = func(first, second, _NONE[func], *args[3:], **unpadded)
    is_padding = (ids == padding % table.shape[0]).unsqueeze(-1)
    return torch.where(is_padding, vectors.detach(), vectors)


_NAMES = {F.embedding: ("input", "weight"), torch.embedding: ("weight", "indices")}
_NONE = {F.embedding: None, torch.embedding: -1}


def _refusing(rules: list[VmapRule]) -> Callable[..., Any]:
    def handler(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        for rule in rules:
            if rule.applies(Call(args, kwargs)):
                raise NotStackableError(rule.reason)
        return func(*args, **kwargs)

    return handler


_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{
        function: _refusing([rule for rule in RULES if function in rule.functions])
        for rule in RULES
        for function in rule.functions
    },
    F.embedding: _embedding,
    torch.embedding: _embedding,
    Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[reportAttributeAccessIssue]
}
