"""What a computation takes from its surroundings, to be set up again later.

Random numbers of torch, NumPy and Python; autocast; and the flags of torch that choose dtypes, devices and kernels.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


def _is_same(first: Any, second: Any) -> bool:
    """Compare two states of one generator."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second)
    if isinstance(first, dict):
        return all(_is_same(value, second[key]) for key, value in first.items())
    return bool(first == second)


class _Generator(NamedTuple):
    """A random generator, and the library it belongs to."""

    library: str
    get: Callable[[], Any]
    set: Callable[[Any], object]


_HOST = [
    _Generator("torch", torch.get_rng_state, torch.set_rng_state),
    _Generator("random", random.getstate, random.setstate),
    _Generator("numpy.random", lambda: np.random.get_state(legacy=False), np.random.set_state),
]


def _generators(others: Iterable[torch.Generator]) -> Iterator[_Generator]:
    yield from _HOST
    if torch.cuda.is_initialized():
        for i in range(torch.cuda.device_count()):
            get = functools.partial(torch.cuda.get_rng_state, i)
            yield _Generator("torch", get, functools.partial(torch.cuda.set_rng_state, device=i))
    for generator in others:
        yield _Generator("torch", generator.get_state, generator.set_state)


class RandomState:
    """The state of random generators, kept only if a call draws from them.

    Args:
        generators: Generators of torch besides the global ones of torch, NumPy and Python.
        libraries: The libraries whose global generators count; None means all. Torch always counts.
    """

    def __init__(
        self, generators: Iterable[torch.Generator] = (), libraries: Container[str] | None = None
    ) -> None:
        self.states = [
            (generator, generator.get())
            for generator in _generators(generators)
            if libraries is None or generator.library == "torch" or generator.library in libraries
        ]

    def close(self) -> None:
        """Forget the states that the call left as they were."""
        self.states = [(g, state) for g, state in self.states if not _is_same(state, g.get())]

    def moved(self) -> set[str]:
        """Return the libraries that have drawn since."""
        return {g.library for g, state in self.states if not _is_same(state, g.get())}

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
    *(
        _Flag(functools.partial(getattr, backend, name), functools.partial(setattr, backend, name))
        for backend, name in (
            (torch.backends.cudnn, "enabled"),
            (torch.backends.cudnn, "allow_tf32"),
            (torch.backends.cudnn, "deterministic"),
            (torch.backends.mkldnn, "enabled"),
        )
    ),
]


class Flags:
    """Settings of torch that choose dtypes, devices and kernels."""

    def __init__(self) -> None:
        self.values = [flag.get() for flag in _FLAGS]
        self.device = torch.get_default_device()

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
