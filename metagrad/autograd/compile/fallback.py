"""What happens where compiled code cannot be had: the same without it, and one warning that says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from metagrad.autograd.compile.check import FreeTensorError, UncompilableError
from metagrad.core import _torch
from metagrad.core.budget import BudgetError

T = TypeVar("T")


class Fallback:
    """Tries what is compiled, and once that fails takes the other way for good, with one warning.

    Args:
        call: How warnings and errors name the call.
    """

    def __init__(self, call: str) -> None:
        self.call = call
        self.gave_up = False

    def attempt(self, compiled: Callable[[], T], eager: Callable[[], T]) -> T:
        """Return what ``compiled()`` returns, or ``eager()`` if that cannot be."""
        if self.gave_up:
            return eager()
        hooks_were_allowed = _torch.saved_tensors_hooks_enabled()
        try:
            _refuse_unavailable()
            return compiled()
        except (torch.OutOfMemoryError, BudgetError, FreeTensorError):
            raise
        except Exception as error:
            if hooks_were_allowed:
                # Tracing that fails inside torch.func.grad leaves them disabled (torch 2.13).
                _torch.enable_saved_tensors_hooks()
            # An error of the function's own comes out of it again, and leaves from there.
            result = eager()
            self.gave_up = not isinstance(error, _UnavailableError)
            warnings.warn(
                f"{self.call}: runs without being compiled, because {_reason(error)}. Pass compile=False to choose "
                "this without a warning.",
                stacklevel=2,
            )
            return result


def _reason(error: Exception) -> str:
    if isinstance(error, UncompilableError):
        return str(error)
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return (
            "it was compiled again and again, for other constants, shapes or functions, as often as torch.compile "
            "allows (what changes from call to call should be a tensor among its arguments)"
        )
    cause = getattr(error, "inner_exception", error)
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return f"torch.compile cannot take it: {lines[0].rstrip('.')}"


class _UnavailableError(UncompilableError):
    """Compiled code cannot be run where it is called, but may be elsewhere."""


def _refuse_unavailable() -> None:
    """Raise if what is around the call keeps compiled code from being run."""
    if _torch.functorch_is_active():
        raise _UnavailableError("it is called inside a torch.func transform")
    if _torch.num_function_modes():
        raise _UnavailableError("it is called inside a TorchFunctionMode, such as an enclosing checkpoint's")
    if _torch.num_dispatch_modes():
        raise _UnavailableError(
            "it is called inside a TorchDispatchMode, such as a MemoryTracker's on the CPU"
        )
