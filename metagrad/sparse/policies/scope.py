"""Settings of a ``with`` block that hold in the backward passes run in it, whatever thread runs them."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

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
        return torch._C._get_obj_in_tls(self._key) if torch._C._is_key_in_tls(self._key) else None

    def set(self, value: T | None) -> None:
        """Replace the value."""
        torch._C._stash_obj_in_tls(self._key, value)
