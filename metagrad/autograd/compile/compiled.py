"""Compiling a function: what is asked of ``torch.compile``, when it may compile, and what happens where it cannot.

``torch.compile`` guards everything that a function reads and compiles again where a guard fails. A function passes
a *gate* while it is traced, which is open only after the function has been tried without compiling
(:func:`check_compilable`). So whatever is compiled has been looked at before, and as long as no guard fails, nothing
needs to be looked at again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import warnings
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from metagrad.autograd.compile.backend import Backend, KeptCall, kept_call, noting
from metagrad.autograd.compile.guards import guards_of_what_changes
from metagrad.autograd.recompute.replay import record
from metagrad.autograd.recompute.surroundings import Surroundings
from metagrad.core import _torch, _torch_compiler
from metagrad.core.budget import BudgetError
from metagrad.core.capture import RandomState
from metagrad.core.checks import warn
from metagrad.core.tree import Structure, is_differentiable

T = TypeVar("T")

Compile: TypeAlias = "bool | Literal['whole'] | Mapping[str, object]"
"""False: nothing. True: steps, or everything where that pays. "whole": everything. A dict: options of torch.compile,
and ``"whole"``, True or False, to choose."""

_OPTIONS = ("backend", "mode", "options", "dynamic")


@dataclass(frozen=True)
class CompileOptions:
    """What :func:`checked_compile` makes of ``compile=``.

    Attributes:
        whole: Whether to make one graph of everything; None where it was not said.
        options: Of ``torch.compile``.
    """

    whole: bool | None
    options: dict[str, Any] = field(hash=False)


def checked_compile(call: str, compile: Compile) -> CompileOptions | None:
    """Return what is to be compiled and how; None if nothing is."""
    if isinstance(compile, bool):
        return CompileOptions(None, {}) if compile else None
    if compile == "whole":
        return CompileOptions(True, {})
    if isinstance(compile, Mapping):
        options = dict(compile)
        whole = options.pop("whole", None)
        unknown = [name for name in options if name not in _OPTIONS]
        if unknown or not isinstance(whole, (bool, type(None))):
            raise ValueError(
                f'{call}: compile may hold "whole" (a bool) and what torch.compile takes as {", ".join(_OPTIONS)}, '
                f"got {dict(compile)!r}."
            )
        return CompileOptions(whole, options)
    raise ValueError(
        f'{call}: compile must be False, True, "whole" or a dict of options of torch.compile, got {compile!r}.'
    )


class UncompilableError(Exception):
    """A function can run, but cannot be compiled; the message is the reason, to follow "because"."""


class FreeTensorError(ValueError):
    """A step reads a tensor that requires grad and is not an argument."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__(
            f"{name}: with compile, a tensor of shape {shape} that requires grad is read without being an argument, "
            "so its gradient would be lost. Pass it as an argument, or in a dict, list or tuple that is one."
        )
        self.shape = shape


class Checked(NamedTuple):
    """What was found out about a function that may be compiled.

    Attributes:
        read: The tensors that it reads and that are no arguments.
        num_calls: How many torch functions it calls.
        returned: What it returns, without its tensors.
    """

    read: list[Tensor]
    num_calls: int
    returned: Structure


def check_compilable(fn: Callable[..., Any], args: tuple[Any, ...], name: str) -> Checked:
    """Run a function once without compiling it, leaving no trace, and refuse what compiling would lose.

    Raises:
        FreeTensorError: It reads one that requires grad.
        UncompilableError: It draws random numbers, or writes into a tensor that it did not make.
    """
    random = RandomState()
    try:
        with random.watched():
            recording = record(fn, args, {}, name=name)
    finally:
        random.restore()
    reads, modules = recording.call.reads, recording.call.modules
    reads.undo_writes()
    rebound = modules.rebound_buffer()
    modules.put_back()
    if rebound is not None:
        raise UncompilableError(
            f"the buffer {rebound!r} is another tensor after a call, where only values may flow from step to step"
        )
    if reads.random.states:
        raise UncompilableError(
            "random numbers are drawn, as dropout does, and a recomputation would draw others"
        )
    if any(function is Tensor.register_hook for _, function, *_ in reads.journal.entries):
        raise UncompilableError("a hook is registered on a tensor, which compiled code would pass by")
    if reads.writes.before:
        raise UncompilableError(
            "running statistics are written, as BatchNorm does, where only values may flow "
            "(with track_running_stats=False it has none)"
        )
    for tensor in reads.differentiable:
        raise FreeTensorError(name, tuple(tensor.shape))
    read = [constant.tensor for constant in reads.constants]
    return Checked(read, len(reads.journal.entries), recording.structure)


class _Gate(threading.local):
    """Whether functions may be compiled in this thread, and whether one tried while they might not."""

    closed = False
    tried = False


_gate = _Gate()
_MOST_KEPT = 16


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
        own = with_own_code(function)
        self._code, self._names = own.__code__, own.__code__.co_varnames[: own.__code__.co_argcount]
        # A mode may have an opinion on what is a call, as CUDA graphs have.
        self._is_keeping = not options.get("mode")
        self._kept: dict[object, KeptCall] = {}
        self.function = torch.compile(
            own,
            fullgraph=True,
            backend=Backend(**options),
            dynamic=options.get("dynamic"),
            options={"guard_filter_fn": guards_of_what_changes},
        )

    def __call__(self, check: Callable[[], None], *args: object) -> Any:
        """Call the function; ``check`` is called first where it has to be compiled, and may raise.

        Where the guards of code that ran before pass, its graph is called: torch.compile, which calls it otherwise,
        takes many times as long for what is around the guards.
        """
        kept = self.kept(*args)
        return self._by_torch(check, args) if kept is None else kept(args)

    def run(self, check: Callable[[], None], *args: object) -> tuple[Any, Ran]:
        """Call the function, and return with its result which code ran."""
        kept = self.kept(*args)
        if kept is not None:
            return kept(args), Ran(self, kept.code, torch.is_grad_enabled())
        result = self._by_torch(check, args)
        return result, Ran(self, self._passing(args), torch.is_grad_enabled())

    @property
    def has_kept(self) -> bool:
        """Whether graphs of code that ran before are there."""
        return bool(self._kept)

    def kept(self, *args: object) -> KeptCall | None:
        """Return the kept call of code whose guards pass for these arguments; None if there is none."""
        if not self._kept:
            return None
        code = self._passing(args, self._kept)
        return None if code is None else self._kept[code]

    def failing_guard(self, code: object, args: tuple[Any, ...]) -> str | None:
        """Return the guard of compiled code that fails for these arguments."""
        return _torch_compiler.failing_guard(self._code, code, self._named(args))

    def _passing(self, args: tuple[Any, ...], among: Container[object] | None = None) -> object | None:
        return _torch_compiler.passing_code(self._code, self._named(args), among)

    def _named(self, args: tuple[Any, ...]) -> dict[str, object]:
        return dict(zip(self._names, args, strict=True))

    def _by_torch(self, check: Callable[[], None], args: tuple[Any, ...]) -> Any:
        """Call the function by torch.compile; keep its graph, until one is no function of the arguments alone."""
        with noting() as calls:
            result = self._called(check, args)
        if self._is_keeping:
            code = self._passing(args)
            kept = kept_call(calls[0], args, result, code) if len(calls) == 1 else None
            if kept is None:
                self._is_keeping = False
            elif code is not None:
                if len(self._kept) == _MOST_KEPT:
                    self._kept.clear()
                self._kept[code] = kept
        return result

    def _called(self, check: Callable[[], None], args: tuple[Any, ...]) -> Any:
        with _what_graphs_keep():
            _gate.closed, _gate.tried = True, False
            try:
                return self.function(*args)
            except Exception:
                if not _gate.tried:
                    raise
            finally:
                _gate.closed = False
            check()
            with compiler_warnings_ignored():
                return self.function(*args)


class Ran(NamedTuple):
    """The code that ran in a forward pass, to find out before a recomputation whether it would run again.

    Attributes:
        compiled: The function that was compiled.
        code: The code; None if it is not known.
        grad_mode: Whether it ran in grad mode.
    """

    compiled: Compiled
    code: object | None
    grad_mode: bool

    @contextlib.contextmanager
    def restored(self, surroundings: Surroundings, *args: object) -> Generator[None]:
        """Set up the surroundings of the forward pass, within a ``with`` block.

        Args:
            surroundings: Those.
            *args: What the function was called with, or others of the same shapes and dtypes.

        Raises:
            RuntimeError: Something that the code reads has changed since, and cannot be restored; this is not found
                out within modes and transforms, where no compiled code runs.
        """
        with surroundings.restored():
            guard = None
            if self.code is not None and _why_unavailable() is None:
                with torch.set_grad_enabled(self.grad_mode):
                    guard = self.compiled.failing_guard(self.code, args)
            if guard is not None:
                raise RuntimeError(
                    f"{surroundings.call}: what the {surroundings.reader} reads has changed between the forward pass "
                    f"and the backward pass, which needs it once more: {guard} held then. Change it after the "
                    "backward pass."
                )
            yield


def _what_graphs_keep() -> contextlib.AbstractContextManager[object]:
    """Configure what compiled code saves for its backward pass.

    Donated buffers would be gone after one pass, even with ``retain_graph``. Recomputing what is cheap is 1.05 to 1.2
    times as fast on a CPU as saving it (MLPs, a transformer, Conv4), and smaller.
    """
    return _torch.functorch_config.patch(donated_buffer=False, aggressive_recomputation=True)


@contextlib.contextmanager
def compiler_warnings_ignored() -> Generator[None]:
    """Ignore the warnings that torch causes itself while it traces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", r"Guards may run slower on Python 3\.13\.0")
        yield


_numbers = count()


def with_own_code(function: Callable[..., T]) -> Callable[..., T]:
    """Copy a function: torch.compile limits how often one code object is compiled, whoever calls it."""
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_numbers)}")
    return types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)


class Fallback:
    """Runs compiled code, and from its first failure on eager code, with one warning.

    Args:
        call: How warnings and errors name the call.
    """

    def __init__(self, call: str) -> None:
        self.call = call
        self.gave_up = False

    @property
    def is_available(self) -> bool:
        """Whether compiled code can be run here."""
        return not self.gave_up and _why_unavailable() is None

    def attempt(self, compiled: Callable[[], T], eager: Callable[[], T]) -> T:
        """Return what ``compiled()`` returns, or ``eager()`` if that cannot be."""
        if self.gave_up:
            return eager()
        hooks_were_allowed = _torch.saved_tensors_hooks_enabled()
        try:
            if (why := _why_unavailable()) is not None:
                raise _UnavailableError(why)
            return compiled()
        except (torch.OutOfMemoryError, BudgetError, FreeTensorError):
            raise
        except Exception as error:
            if hooks_were_allowed:
                # Tracing that fails inside torch.func.grad leaves them disabled (torch 2.13).
                _torch.enable_saved_tensors_hooks()
            # An error of the function itself is raised again, here.
            result = eager()
            self.gave_up = not isinstance(error, _UnavailableError)
            warn(
                f"{self.call}: runs without being compiled, because {reason(error)}. Pass compile=False to choose "
                "this without a warning."
            )
            return result


def reason(error: Exception) -> str:
    """Return why something cannot be compiled, to follow "because"."""
    if isinstance(error, UncompilableError):
        return str(error)
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return (
            "it was compiled again and again, for other constants, shapes or functions, as often as torch.compile "
            "allows (what changes from call to call should be a tensor among its arguments)"
        )
    cause = getattr(error, "inner_exception", error)
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    details = [line.partition(_DETAIL)[2].strip() for line in lines if _DETAIL in line]
    return ": ".join(["torch.compile cannot take it", lines[0].rstrip("."), *filter(None, details[:1])])


_DETAIL = "Developer debug context:"
"""After this, Dynamo's errors name the code."""


class _UnavailableError(UncompilableError):
    """Compiled code cannot be run where it is called, but may be elsewhere."""


def _why_unavailable() -> str | None:
    """Say what around the call keeps compiled code from being run."""
    if _torch.functorch_is_active():
        return "it is called inside a torch.func transform"
    if _torch.num_function_modes():
        return "it is called inside a TorchFunctionMode, such as an enclosing checkpoint's"
    if _torch.num_dispatch_modes():
        return "it is called inside a TorchDispatchMode, such as a MemoryTracker's on the CPU"
    return None


def operand(tensor: Tensor, requires_grad: bool = False) -> Tensor:
    """Return a leaf of one layout, so that the same compiled code takes it every time."""
    leaf = tensor.detach()
    strides = _strides(leaf.shape)
    if leaf.stride() != strides:
        # An axis of size 1 is contiguous whatever its stride, but torch.compile compares strides.
        leaf = leaf.as_strided(leaf.shape, strides) if leaf.is_contiguous() else leaf.contiguous()
    return leaf.requires_grad_() if requires_grad and is_differentiable(leaf) else leaf


@functools.lru_cache(maxsize=1024)
def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a new tensor of a shape."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def laid_out(tensor: Tensor) -> Tensor:
    """Return a tensor in the layout of :func:`operand`, from within compiled code."""
    return tensor.clone(memory_format=torch.contiguous_format)


def exchanged(tensors: Sequence[Tensor], places: Sequence[int], chosen: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors, of which some are exchanged for others."""
    result = list(tensors)
    for index, tensor in zip(places, chosen, strict=True):
        result[index] = tensor
    return result


def checked_before() -> None:
    """Check nothing: the derivative of a function is compiled after the function, which was checked."""
