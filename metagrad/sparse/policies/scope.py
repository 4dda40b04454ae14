"""Settings of a ``with`` block that hold in the backward passes run in it, whatever thread runs them."""

from __future__ import annotations

from typing import Generic, TypeVar

from metagrad.core import _torch

T = TypeVar("T")


class Scope(Generic[T]):
    """A variable of this thread and of the threads in which torch runs its backward passes.

    The derivatives of CUDA tensors are computed in threads of torch's own, which Python's context variables do
    not reach. torch hands them the thread-local state of the caller, as its CUDA graph trees rely on, so the value
    is kept there.
    """

    def __init__(self, name: str) -> None:
        self._key = f"metagrad.sparse.{name}"

    def get(self) -> T | None:
        """Return the value, or None in a thread that set none."""
        return _torch.get_in_thread_state(self._key) if _torch.is_in_thread_state(self._key) else None

    def set(self, value: T | None) -> None:
        """Replace the value."""
        _torch.put_in_thread_state(self._key, value)
