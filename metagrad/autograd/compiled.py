"""Compiling a step: what is asked of ``torch.compile``, when it may compile, and what happens where it cannot.

``torch.compile`` guards everything that a function reads and compiles again where a guard fails. A function passes
a *gate* while it is traced, which is open only after the function has been tried without compiling. So whatever is
compiled has been looked at before: the tensors it reads without being handed them, the random numbers it draws, and
what it writes into; and as long as no guard fails, nothing needs to be looked at again.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from metagrad._tree import is_differentiable
from metagrad.autograd.ambient import RandomState
from metagrad.autograd.budget import BudgetError
from metagrad.autograd.reads import Constant
from metagrad.autograd.replay import Recording, record

T = TypeVar("T")

Compile: TypeAlias = "bool | Literal['whole'] | Mapping[str, object]"
"""Not; one step; the whole loop; or one step (with ``"whole": True`` the whole) and options of torch.compile."""

_HOOKS = torch._C._autograd  # type: ignore[reportAttributeAccessIssue]
_OPTIONS = ("backend", "mode", "options", "dynamic")


class CompileOptions(NamedTuple):
    """What :func:`checked_compile` makes of ``compile=``."""

    whole: bool
    options: dict[str, Any]

    def key(self) -> tuple:
        """Return what tells options apart."""
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


class UncompilableError(Exception):
    """A function can be run, but not be compiled; says why, to follow "because"."""


class FreeTensorError(ValueError):
    """A step reads a tensor that requires grad without being handed it."""


class _Gate(threading.local):
    """Whether functions may be compiled in this thread, and whether one tried while they might not."""

    closed = False
    tried = False


_gate = _Gate()


@torch.compiler.assume_constant_result
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
        self.function = torch.compile(with_own_code(function), fullgraph=True, **options)

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
            # What torch deprecates in itself, and says when the compiler is first imported, is not the caller's.
            warnings.simplefilter("ignore", DeprecationWarning)
            return self.function(*args)


_numbers = count()


def with_own_code(function: Callable[..., T]) -> Callable[..., T]:
    """Copy a function: torch.compile limits how often one code object is compiled, whoever calls it."""
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_numbers)}")
    return types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)


def check_compilable(fn: Callable[..., Any], args: tuple, name: str) -> list[Constant]:
    """Run a function once without compiling it, and refuse what compiling would lose.

    Returns:
        The tensors that it reads without being handed them.

    Raises:
        FreeTensorError: It reads one that requires grad.
        UncompilableError: It draws random numbers, or writes into a tensor that it did not make.
    """
    random = RandomState()
    recording = record(fn, args, {}, name=name)
    random.restore()
    written = [(c.tensor, c.before) for c in recording.call.reads.constants if c.before is not None]
    with torch.no_grad():
        for tensor, before in written:
            tensor.copy_(before)
    if _draws(recording):
        raise UncompilableError(
            "random numbers are drawn, as dropout does, and a recomputation would draw others"
        )
    if written:
        raise UncompilableError(
            "running statistics are written, as BatchNorm does, where only values may flow"
        )
    for tensor in recording.call.reads.differentiable:
        raise FreeTensorError(
            f"{name}: with compile, a tensor of shape {tuple(tensor.shape)} that requires grad is read without "
            "being handed over, so its gradient would be lost. Pass it as an argument."
        )
    return [
        constant._replace(version=constant.tensor._version) for constant in recording.call.reads.constants
    ]


def _draws(recording: Recording) -> bool:
    random = recording.call.random
    return random.cpu is not None or bool(random.cuda) or bool(recording.call.reads.generators)


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
        random = RandomState()
        hooks_were_allowed = _HOOKS._saved_tensors_hooks_is_enabled()
        try:
            _refuse_unavailable()
            return compiled()
        except (torch.OutOfMemoryError, BudgetError, FreeTensorError):
            raise
        except Exception as error:
            random.restore()
            if hooks_were_allowed:
                # Tracing that fails inside torch.func.grad leaves them disabled (torch 2.13).
                _HOOKS._saved_tensors_hooks_enable()
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
    cause = getattr(error, "inner_exception", error)
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return f"torch.compile cannot take it: {lines[0].rstrip('.')}"


class _UnavailableError(UncompilableError):
    """Compiled code cannot be run where it is called, but may be elsewhere."""


def _refuse_unavailable() -> None:
    """Raise if what is around the call keeps compiled code from being run."""
    if torch._C._are_functorch_transforms_active():
        raise _UnavailableError("it is called inside a torch.func transform")
    if torch._C._len_torch_function_stack():
        raise _UnavailableError("it is called inside a TorchFunctionMode, such as an enclosing checkpoint's")
    if torch._C._len_torch_dispatch_stack():
        raise _UnavailableError(
            "it is called inside a TorchDispatchMode, such as a MemoryTracker's on the CPU"
        )


def operand(tensor: Tensor, requires_grad: bool = False) -> Tensor:
    """Return a leaf of one layout, so that the same compiled code takes it every time."""
    leaf = tensor.detach().contiguous()
    if 1 in leaf.shape:
        # An axis of size 1 is contiguous whatever its stride, but torch.compile compares strides.
        leaf = leaf.view(-1).view(leaf.shape)
    return leaf.requires_grad_() if requires_grad and is_differentiable(leaf) else leaf


def check_versions(call: str, constants: Sequence[Constant]) -> None:
    """Raise if a tensor that is read again was modified since."""
    for constant in constants:
        if constant.tensor._version != constant.version:
            constant.replayed(call)
