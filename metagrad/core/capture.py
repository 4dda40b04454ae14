"""What a computation takes from its surroundings, to be set up again later.

Random numbers of torch, NumPy and Python; autocast; and the flags of torch that choose dtypes, devices and kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from metagrad.core import _torch


def _equal_in_python(first: tuple, second: tuple) -> bool:
    """Compare two states of ``random``: 624 words, all of which change together, and a position."""
    return all(first[1][i] == second[1][i] for i in (-1, 0, 1, -2)) and first[2] == second[2]


class _Generator(NamedTuple):
    """A global random generator, and the library it belongs to."""

    library: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    equal: Callable[[Any, Any], bool]


class _NumpyState:
    """The state of ``numpy.random``, copied only if it has moved: that takes NumPy a tenth of a millisecond."""

    def __init__(self) -> None:
        self._raw = b""
        self._state: dict[str, Any] = {}

    def get(self) -> dict[str, Any]:
        """Return the state."""
        raw = _raw_numpy_state()
        if not raw or raw != self._raw or self._state["has_gauss"]:
            self._state = np.random.get_state(legacy=False)  # type: ignore[assignment]
            self._raw = raw
        return self._state

    def equal(self, first: dict[str, Any], second: dict[str, Any]) -> bool:
        """Compare two states."""
        return first is second or _comparable(first) == _comparable(second)


def _raw_numpy_state() -> bytes:
    """Return the memory of NumPy's generator, if it is the usual one: 624 words and a position.

    A normal number that was drawn along with another and is still to be handed out is not in it.
    """
    address = _address(np.random.get_bit_generator())  # type: ignore[reportAttributeAccessIssue]
    return ctypes.string_at(address, 625 * 4) if address else b""


@functools.lru_cache(maxsize=1)
def _address(generator: np.random.BitGenerator) -> int:
    return generator.ctypes.state_address if isinstance(generator, np.random.MT19937) else 0


def _comparable(state: dict[str, Any]) -> tuple:
    """Return a state of NumPy's in a form that can be compared."""
    inner = {
        key: value.tobytes() if isinstance(value, np.ndarray) else value
        for key, value in state["state"].items()
    }
    return inner, state.get("has_gauss"), state.get("gauss")


_numpy_state = _NumpyState()


def _generators() -> Iterator[_Generator]:
    yield _Generator("torch", torch.get_rng_state, torch.set_rng_state, torch.equal)
    yield _Generator("random", random.getstate, random.setstate, _equal_in_python)
    yield _Generator("numpy.random", _numpy_state.get, np.random.set_state, _numpy_state.equal)
    if torch.cuda.is_initialized():
        for i in range(torch.cuda.device_count()):
            get = functools.partial(torch.cuda.get_rng_state, i)
            yield _Generator("torch", get, functools.partial(torch.cuda.set_rng_state, device=i), torch.equal)


class RandomState:
    """The state of the global random generators of torch, NumPy and Python, kept only if a call draws from them."""

    def __init__(self) -> None:
        self.states = [(generator, generator.get()) for generator in _generators()]

    def close(self) -> None:
        """Forget the states that the call left as they were."""
        self.states = [(g, state) for g, state in self.states if not g.equal(state, g.get())]

    def moved(self) -> set[str]:
        """Return the libraries that have drawn since."""
        return {g.library for g, state in self.states if not g.equal(state, g.get())}

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Draw again what the recorded call drew, and leave the generators untouched."""
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
    *(_Flag(*pair) for pair in _torch.backend_flags),
]


class Flags:
    """Settings of torch that choose dtypes, devices and kernels."""

    def __init__(self) -> None:
        self.values = [flag.get() for flag in _FLAGS]
        self.device = torch.get_default_device()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Set what has been changed since back, for a while."""
        moved = [
            (flag, then, now)
            for flag, then, now in zip(_FLAGS, self.values, (flag.get() for flag in _FLAGS), strict=True)
            if then != now
        ]
        same_device = torch.get_default_device() == self.device
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

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Cast as the recorded call did; without a cache, whose entries would outlive the recomputation."""
        with contextlib.ExitStack() as stack:
            for kind, (enabled, dtype) in self.kinds.items():
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                    )
            yield


@contextlib.contextmanager
def forward_mode() -> Iterator[None]:
    """Keep torch's word about itself to itself: it builds decompositions with torch.jit, on their first use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated", DeprecationWarning)
        yield
