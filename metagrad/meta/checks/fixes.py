"""Remedies that change how a derivative is computed, and nothing else: what they do to a module, and undo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from metagrad.core.norms import composite_norms


class Remedy(Protocol):
    """A change of a module that can be undone; its ``str`` says what it does."""

    @property
    def is_applied(self) -> bool:
        """Whether the module is changed."""
        ...

    def apply(self) -> None:
        """Change the module; once."""
        ...

    def undo(self) -> None:
        """Change it back."""
        ...


class ForwardContext(NamedTuple):
    """A context in which a forward can be differentiated more often.

    Attributes:
        name: What is written in a program to get the same.
        context: Makes it.
    """

    name: str
    context: Callable[[], AbstractContextManager[Any]]


CONTEXTS = (
    ForwardContext("metagrad.models.composite_norms()", composite_norms),
    ForwardContext(
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)", functools.partial(sdpa_kernel, SDPBackend.MATH)
    ),
    ForwardContext(
        "torch.backends.cudnn.flags(enabled=False)",
        functools.partial(torch.backends.cudnn.flags, enabled=False),
    ),
)
"""Those that are known. Which of them helps a module is found out by trying."""


class ForwardWithin:
    """Runs the forward of a module within a context, by a pair of hooks.

    Args:
        path: How the module is called.
        module: The module.
        chosen: The context.
    """

    def __init__(self, path: str, module: nn.Module, chosen: ForwardContext) -> None:
        self.path: str = path
        self.module: nn.Module = module
        self.chosen: ForwardContext = chosen
        self._handles: list[Any] = []

    @property
    def is_applied(self) -> bool:
        """Whether the hooks are there."""
        return bool(self._handles)

    def apply(self) -> None:
        """Put the hooks around the forward."""
        if not self._handles:
            around = _Around(self.chosen.context)
            self._handles = [
                self.module.register_forward_pre_hook(around.enter),
                self.module.register_forward_hook(around.leave, always_call=True),
            ]

    def undo(self) -> None:
        """Take them away."""
        while self._handles:
            self._handles.pop().remove()

    def __str__(self) -> str:
        return f"the forward of {self.path or 'the model'} runs within {self.chosen.name}"


class _Around:
    """A pair of hooks that can be copied and pickled with their module."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.context = context
        self.entered: list[AbstractContextManager[Any]] = []

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        context = self.context()
        context.__enter__()
        self.entered.append(context)

    def leave(self, module: nn.Module, args: tuple[Any, ...], result: object) -> None:
        self.entered.pop().__exit__(None, None, None)


class BatchStatistics:
    """Takes the running statistics from a norm, as if it had been constructed with ``track_running_stats=False``.

    Args:
        path: How the module is called.
        module: The norm.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path: str = path
        self.module: nn.Module = module
        self._before: dict[str, Any] = {}

    @property
    def is_applied(self) -> bool:
        """Whether they are taken."""
        return bool(self._before)

    def apply(self) -> None:
        """Take them."""
        if not self._before:
            self._before = dict(self.module._buffers)
            self.module._buffers.update(dict.fromkeys(self._before))
            self.module.__dict__["track_running_stats"] = False

    def undo(self) -> None:
        """Give them back."""
        if self._before:
            self.module._buffers.update(self._before)
            self.module.__dict__["track_running_stats"] = True
            self._before = {}

    def __str__(self) -> str:
        return (
            f"{self.path or 'the model'} has no running statistics: it uses those of the batch, in eval mode too, as "
            "with track_running_stats=False"
        )
