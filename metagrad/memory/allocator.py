"""glibc's allocator, which returns memory to the system that a loop asks for again at every step."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import sys
from collections.abc import Iterable

from torch import Tensor

log = logging.getLogger("metagrad")

_LARGE = 2**17  # bytes, from which on glibc maps an allocation by itself, and unmaps it
_KEPT = {"MALLOC_TRIM_THRESHOLD_": 2**31 - 1, "MALLOC_TOP_PAD_": 2**26, "MALLOC_MMAP_THRESHOLD_": 2**25}
_PARAMETERS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3}  # malloc.h
_told: list[str] = []


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, instead of returning it to the system and mapping it again, page by page.

    That is what ``MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_TOP_PAD_=67108864 MALLOC_MMAP_THRESHOLD_=33554432`` in the
    environment does from the start. Loops on a CPU that allocate and free the same memory again and again, over steps
    that are recomputed or over tasks, are up to 1.3 times as fast. The process then never becomes smaller.

    Returns:
        Whether it does: other systems have other allocators, which are left as they are.

    Example:
        >>> metagrad.memory.keep_freed_memory()  # doctest: +SKIP
        True
    """
    if not is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    accepted = [mallopt(_PARAMETERS[name], size) == 1 for name, size in _KEPT.items()]
    _told.append("set")
    return all(accepted)


def advise(call: str, tensors: Iterable[Tensor]) -> None:
    """Say once in a process that a loop is faster if the allocator keeps memory, where it does not."""
    if _told or not any(t.device.type == "cpu" and t.nbytes >= _LARGE for t in tensors):
        return
    _told.append(call)
    if is_glibc() and "MALLOC_TRIM_THRESHOLD_" not in os.environ and "GLIBC_TUNABLES" not in os.environ:
        settings = " ".join(f"{name}={size}" for name, size in _KEPT.items())
        log.warning(
            "%s: it frees memory and allocates the same again, step after step, which glibc returns to the system "
            "each time. With %s in the environment, or after metagrad.memory.keep_freed_memory(), it keeps the "
            "memory, and the loop is up to 1.3 times as fast. (Said once.)",
            call,
            settings,
        )


@functools.cache
def is_glibc() -> bool:
    """Say whether memory is glibc's to give: not where another allocator is loaded before it."""
    is_replaced = "malloc" in os.environ.get("LD_PRELOAD", "")
    return sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc" and not is_replaced
