"""Compiling a function: what is asked of ``torch.compile``, and when it may compile.

``torch.compile`` guards everything that a function reads and compiles again where a guard fails. A function passes
a *gate* while it is traced, which is open only after the function has been tried without compiling
(:mod:`metagrad.autograd.compile.check`). So whatever is compiled has been looked at before, and as long as no guard
fails, nothing needs to be looked at again.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from metagrad.autograd.compile.backend import Backend
from metagrad.autograd.compile.check import UncompilableError
from metagrad.core.tree import is_differentiable

T = TypeVar("T")

Compile: TypeAlias = "bool | Literal['whole'] | Mapping[str, object]"
"""Not; one step; the whole loop; or one step (with ``"whole": True`` the whole) and options of torch.compile."""

_OPTIONS = ("backend", "mode", "options", "dynamic")


@dataclass(frozen=True, eq=False)
class CompileOptions:
    """What :func:`checked_compile` makes of ``compile=``.

    Attributes:
        whole: Whether to make one graph of everything.
        options: Of ``torch.compile``.
    """

    whole: bool
    options: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompileOptions) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple:
        return (self.whole, *sorted((name, repr(value)) for name, value in self.options.items()))


def checked_compile(call: str, compile: Compile) -> CompileOptions | None:
    """Return what is to be compiled and how; None for nothing."""
    if isinstance(compile, bool):
        return CompileOptions(False, {}) if compile else None
    if compile == "whole":
        return CompileOptions(True, {})
    if isinstance(compile, Mapping):
        options = dict(compile)
        whole = options.pop("whole", False)
        unknown = [name for name in options if name not in _OPTIONS]
        if unknown or not isinstance(whole, bool):
            raise ValueError(
                f'{call}: compile may hold "whole" (a bool) and what torch.compile takes as {", ".join(_OPTIONS)}, '
                f"got {dict(compile)!r}."
            )
        return CompileOptions(whole, options)
    raise ValueError(
        f'{call}: compile must be False, True, "whole" or a dict of options of torch.compile, got {compile!r}.'
    )


class _Gate(threading.local):
    """Whether functions may be compiled in this thread, and whether one tried while they might not."""

    closed = False
    tried = False


_gate = _Gate()


def pass_gate() -> None:
    """Refuse to be traced while the gate is closed; compiled code does not come here."""
    if _gate.closed:
        _gate.tried = True
        raise UncompilableError("it has not been checked")


class Compiled:
    """A function that is compiled on demand, after a check.

    Args:
        function: A module-level function that calls :func:`pass_gate`.
        options: Of ``torch.compile``.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        # Not as a decorator, which would import the compiler along with this module.
        torch.compiler.assume_constant_result(pass_gate)
        self.function = torch.compile(
            with_own_code(function),
            fullgraph=True,
            backend=Backend(**options),
            dynamic=options.get("dynamic"),
        )

    def __call__(self, check: Callable[[], None], *args: object) -> Any:
        """Call the function; ``check`` is called first where it has to be compiled, and may raise."""
        _gate.closed, _gate.tried = True, False
        try:
            return self.function(*args)
        except Exception:
            if not _gate.tried:
                raise
        finally:
            _gate.closed = False
        check()
        with warnings.catch_warnings():
            # What torch deprecates in itself, and what it asks of tensors while it traces, is not the caller's.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
            return self.function(*args)


_numbers = count()


def with_own_code(function: Callable[..., T]) -> Callable[..., T]:
    """Copy a function: torch.compile limits how often one code object is compiled, whoever calls it."""
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_numbers)}")
    return types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)


def operand(tensor: Tensor, requires_grad: bool = False) -> Tensor:
    """Return a leaf of one layout, so that the same compiled code takes it every time."""
    leaf = tensor.detach()
    if not leaf.is_contiguous():
        leaf = leaf.contiguous()
    elif 1 in leaf.shape and leaf.stride() != _strides(leaf.shape):
        # An axis of size 1 is contiguous whatever its stride, but torch.compile compares strides.
        leaf = leaf.view(-1).view(leaf.shape)
    return leaf.requires_grad_() if requires_grad and is_differentiable(leaf) else leaf


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a new tensor of a shape."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def laid_out(tensor: Tensor) -> Tensor:
    """Return a tensor in the layout of :func:`operand`, from within compiled code."""
    return tensor.clone(memory_format=torch.contiguous_format)
