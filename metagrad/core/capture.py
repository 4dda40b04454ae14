"""Snapshots of the global state that a computation depends on, which a recomputation restores.

The state consists of random generators (torch, NumPy and Python), autocast, and global torch settings. The settings
choose dtypes, devices and kernels.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two states of a generator are equal."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second)
    if isinstance(first, dict):
        return all(_is_same(value, second[key]) for key, value in first.items())
    return bool(first == second)


class _Generator(NamedTuple):
    """A random generator and its library."""

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
    """Snapshot of random generators. After :meth:`close`, it stores only the generators that a call has used.

    Args:
        generators: Torch generators, in addition to the global generators of torch, NumPy and Python.
        libraries: Libraries whose global generators are recorded, or None for all. Torch is always recorded.
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
        """Discard the states of generators that the call did not use."""
        self.states = [(g, state) for g, state in self.states if not _is_same(state, g.get())]

    def moved(self) -> set[str]:
        """Return the libraries whose generators were used since the snapshot."""
        return {g.library for g, state in self.states if not _is_same(state, g.get())}

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Context manager that repeats the random numbers of the recorded call and then resets the generators."""
        now = [(generator, generator.get()) for generator, _ in self.states]
        self.restore()
        try:
            yield
        finally:
            for generator, state in now:
                generator.set(state)

    def restore(self) -> None:
        """Set the generators to the recorded states."""
        for generator, state in self.states:
            generator.set(state)


def entropy(*numbers: int) -> int:
    """Return 63 bits that depend on all numbers.

    References:
        Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64).
    """
    state, mask = 0, 2**64 - 1
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & mask
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        state ^= state >> 31
    return state >> 1


_cuda = torch.backends.cuda
_FLAGS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    *(
        (functools.partial(getattr, backend, name), functools.partial(setattr, backend, name))
        for backend, name in (
            (torch.backends.cudnn, "enabled"),
            (torch.backends.cudnn, "allow_tf32"),
            (torch.backends.cudnn, "deterministic"),
            (torch.backends.mkldnn, "enabled"),
        )
    ),
]
"""The getter and the setter of each global torch setting."""


class Flags:
    """Snapshot of the global torch settings that choose dtypes, devices and kernels."""

    def __init__(self) -> None:
        self.values = [get() for get, _ in _FLAGS]
        self.device = torch.get_default_device()

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Context manager that restores the settings that have changed since the snapshot."""
        now = Flags()
        setters = (set_ for _, set_ in _FLAGS)
        changed = [
            change for change in zip(setters, self.values, now.values, strict=True) if change[1] != change[2]
        ]
        try:
            for set_, then, _ in changed:
                set_(then)
            with contextlib.nullcontext() if now.device == self.device else self.device:
                yield
        finally:
            for set_, _, present in changed:
                set_(present)


class AutocastState:
    """Snapshot of the autocast state of every device type in use."""

    def __init__(self) -> None:
        kinds = ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]
        self.kinds = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
        }

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Context manager that restores autocast, without its cache."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_autocast_cache())
            for kind, (enabled, dtype) in self.kinds.items():
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


@contextlib.contextmanager
def without_autocast_cache() -> Generator[None]:
    """Context manager in which autocast casts a tensor at each use.

    The cache has only leaves, and a recomputation can have a leaf where the first run had none. The cache would
    also outlive the recomputation.
    """
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


@contextlib.contextmanager
def forward_mode() -> Generator[None]:
    """Context manager that hides the deprecation warning of ``torch.jit.script`` on the first use of forward mode."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated", DeprecationWarning)
        yield
