"""What a computation takes from its surroundings, to be set up again later.

Random numbers of torch, NumPy and Python; autocast; and the flags of torch that choose dtypes, devices and kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from metagrad.core import _torch


def _equal_in_python(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Compare two states of ``random``: 624 words, all of which change together, and a position."""
    if first is second:
        return True
    return all(first[1][i] == second[1][i] for i in (-1, 0, 1, -2)) and first[2] == second[2]


class _Generator(NamedTuple):
    """A global random generator, and the library it belongs to."""

    library: str
    get: Callable[[], Any]
    set: Callable[[Any], object]
    equal: Callable[[Any, Any], bool]


class _Watched:
    """A state that is copied only if the memory it is in has changed: a copy takes many microseconds.

    Args:
        memory: Returns that memory, or nothing where it is not known.
        copy: Returns the state.
    """

    def __init__(self, memory: Callable[[], tuple[Any, ...]], copy: Callable[[], Any]) -> None:
        self._memory, self._copy = memory, copy
        self._seen: tuple[Any, ...] = ()
        self._state: Any = None

    def get(self) -> Any:
        """Return the state."""
        memory = self._memory()
        if not memory or memory != self._seen:
            self._state, self._seen = self._copy(), memory
        return self._state


def _memory_of_numpy() -> tuple[Any, ...]:
    """Return the memory of NumPy's generator, if it is the usual one: 624 words and a position.

    A normal number that was drawn along with another and is still to be handed out is not in it, so that the state is
    copied where the last copy had one.
    """
    address = _address(np.random.get_bit_generator())  # type: ignore[reportAttributeAccessIssue]
    if not address or (_numpy_state._state or {}).get("has_gauss"):
        return ()
    return (ctypes.string_at(address, 625 * 4),)


def _memory_of_python() -> tuple[Any, ...]:
    """Return the memory of Python's generator, an object of CPython, and the number still to be handed out."""
    generator: Any = random.getstate.__self__
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return ()
    start = object.__basicsize__
    size = random.Random.mro()[1].__basicsize__ - start
    return ctypes.string_at(id(generator) + start, size), vars(generator)["gauss_next"]


@functools.lru_cache(maxsize=1)
def _address(generator: np.random.BitGenerator) -> int:
    return generator.ctypes.state_address if isinstance(generator, np.random.MT19937) else 0


def _comparable(state: dict[str, Any]) -> tuple[Any, ...]:
    """Return a state of NumPy's in a form that can be compared."""
    inner = {
        key: value.tobytes() if isinstance(value, np.ndarray) else value
        for key, value in state["state"].items()
    }
    return inner, state.get("has_gauss"), state.get("gauss")


_numpy_state = _Watched(_memory_of_numpy, lambda: np.random.get_state(legacy=False))
_python_state = _Watched(_memory_of_python, random.getstate)


def _equal_in_numpy(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first is second or _comparable(first) == _comparable(second)


_HOST = [
    _Generator("torch", torch.get_rng_state, torch.set_rng_state, torch.equal),
    _Generator("random", _python_state.get, random.setstate, _equal_in_python),
    _Generator("numpy.random", _numpy_state.get, np.random.set_state, _equal_in_numpy),
]


def _generators() -> Iterator[_Generator]:
    yield from _HOST
    if torch.cuda.is_initialized():
        for i in range(torch.cuda.device_count()):
            get = functools.partial(torch.cuda.get_rng_state, i)
            yield _Generator("torch", get, functools.partial(torch.cuda.set_rng_state, device=i), torch.equal)


class RandomState:
    """The state of random generators, kept only if a call draws from them.

    These are the global generators of torch, NumPy and Python, and those passed to :meth:`note`.
    """

    def __init__(self) -> None:
        self.states = [(generator, generator.get()) for generator in _generators()]
        self._noted: set[int] = set()

    def note(self, generator: torch.Generator) -> None:
        """Include a generator that is about to be handed to a torch function."""
        if id(generator) not in self._noted:
            self._noted.add(id(generator))  # which is kept alive by its methods
            handed = _Generator("torch", generator.get_state, generator.set_state, torch.equal)
            self.states.append((handed, handed.get()))

    def watched(self) -> contextlib.AbstractContextManager[object]:
        """Include generators that are handed to torch functions meanwhile."""
        return _NotingGenerators(self)

    def close(self) -> None:
        """Forget the states that the call left as they were."""
        self.states = [(g, state) for g, state in self.states if not g.equal(state, g.get())]

    def moved(self) -> set[str]:
        """Return the libraries that have drawn since."""
        return {g.library for g, state in self.states if not g.equal(state, g.get())}

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """Draw again what the recorded call drew, and leave the generators untouched."""
        return self._restored() if self.states else contextlib.nullcontext()

    @contextlib.contextmanager
    def _restored(self) -> Generator[None]:
        now = [(generator, generator.get()) for generator, _ in self.states]
        self.restore()
        try:
            yield
        finally:
            for generator, state in now:
                generator.set(state)

    def restore(self) -> None:
        """Set the generators back."""
        for generator, state in self.states:
            generator.set(state)


class _NotingGenerators(TorchFunctionMode):
    """Notes which generators are handed to torch functions."""

    def __init__(self, random: RandomState) -> None:
        super().__init__()
        self.random = random

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.random.note(kwargs["generator"])
        return func(*args, **kwargs)


class _Flag(NamedTuple):
    """A global setting of torch."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


_cuda = torch.backends.cuda
_FLAGS = [
    _Flag(torch.get_default_dtype, torch.set_default_dtype),
    _Flag(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _Flag(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    _Flag(_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    _Flag(_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    _Flag(_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    _Flag(_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    *(_Flag(*pair) for pair in _torch.backend_flags),
]


_CPU = torch.device("cpu")


class Flags:
    """Settings of torch that choose dtypes, devices and kernels."""

    def __init__(self) -> None:
        self.values = [flag.get() for flag in _FLAGS]
        self.device = _default_device()

    def key(self) -> tuple[Any, ...]:
        """Return the settings as a value that can be compared and hashed."""
        return *self.values, self.device

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """Set the flags that have changed since back, within a ``with`` block."""
        now = Flags()
        return contextlib.nullcontext() if now.__dict__ == self.__dict__ else self._restored(now)

    @contextlib.contextmanager
    def _restored(self, present: Flags) -> Generator[None]:
        moved = [
            (flag, then, now)
            for flag, then, now in zip(_FLAGS, self.values, present.values, strict=True)
            if then != now
        ]
        same_device = present.device == self.device
        try:
            for flag, then, _ in moved:
                flag.set(then)
            with contextlib.nullcontext() if same_device else self.device:
                yield
        finally:
            for flag, _, now in moved:
                flag.set(now)


def _default_device() -> torch.device:
    """Return the device of new tensors; it is set by a function mode if it is not the CPU."""
    return torch.get_default_device() if _torch.num_function_modes() else _CPU


class AutocastState:
    """The autocast state of every device type in use."""

    def __init__(self) -> None:
        kinds = ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]
        self.kinds = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
        }

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """Cast as the recorded call did; without a cache, whose entries would outlive the recomputation."""
        casts = {
            kind for kind, (enabled, _) in self.kinds.items() if enabled or torch.is_autocast_enabled(kind)
        }
        return self._restored(casts) if casts else contextlib.nullcontext()

    @contextlib.contextmanager
    def _restored(self, casts: set[str]) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for kind, (enabled, dtype) in self.kinds.items():
                if kind in casts:
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                    )
            yield


class Restorable(Protocol):
    """A captured state."""

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """Set the state up again, within a ``with`` block."""
        ...


@contextlib.contextmanager
def restored(*states: Restorable) -> Generator[None]:
    """Set up several captured states, within a ``with`` block."""
    with contextlib.ExitStack() as stack:
        for state in states:
            stack.enter_context(state.restored())
        yield


@contextlib.contextmanager
def forward_mode() -> Generator[None]:
    """Silence torch's own deprecation warning: forward mode builds decompositions with torch.jit on first use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated", DeprecationWarning)
        yield
