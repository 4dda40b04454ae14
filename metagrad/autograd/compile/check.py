"""What compiled code would lose, found by running a function once as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from metagrad.autograd.recompute.replay import Recording, record
from metagrad.core.capture import RandomState


class UncompilableError(Exception):
    """A function can be run, but not be compiled; says why, to follow "because"."""


class FreeTensorError(ValueError):
    """A step reads a tensor that requires grad without being handed it."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__(
            f"{name}: with compile, a tensor of shape {shape} that requires grad is read without being handed over, "
            "so its gradient would be lost. Pass it as an argument."
        )
        self.shape = shape


def check_compilable(fn: Callable[..., Any], args: tuple, name: str) -> list[Tensor]:
    """Run a function once without compiling it, and refuse what compiling would lose.

    Returns:
        The tensors that it reads without being handed them.

    Raises:
        FreeTensorError: It reads one that requires grad.
        UncompilableError: It draws random numbers, or writes into a tensor that it did not make.
    """
    recording = _recorded(fn, args, name)
    modules = recording.call.modules
    rebound = modules.rebound_buffer()
    modules.put_back()
    if rebound is not None:
        raise UncompilableError(
            f"the buffer {rebound!r} is another tensor after a call, where only values may flow from step to step"
        )
    if _draws(recording):
        raise UncompilableError(
            "random numbers are drawn, as dropout does, and a recomputation would draw others"
        )
    reads = recording.call.reads
    if any(function is Tensor.register_hook for _, function, *_ in reads.journal.entries):
        raise UncompilableError("a hook is registered on a tensor, which compiled code would pass by")
    if reads.writes.before:
        raise UncompilableError(
            "running statistics are written, as BatchNorm does, where only values may flow "
            "(with track_running_stats=False it has none)"
        )
    for tensor in reads.differentiable:
        raise FreeTensorError(name, tuple(tensor.shape))
    return [constant.tensor for constant in reads.constants]


def _recorded(fn: Callable[..., Any], args: tuple, name: str) -> Recording:
    """Record a call that leaves no trace: neither in random generators nor in running statistics."""
    random = RandomState()
    try:
        recording = record(fn, args, {}, name=name)
    finally:
        random.restore()
    recording.call.reads.undo_writes()
    return recording


def _draws(recording: Recording) -> bool:
    return bool(recording.call.random.states) or bool(recording.call.reads.generators)
