"""The time that a call takes of the processor."""

from __future__ import annotations

import time
from collections.abc import Callable


def cpu_seconds(call: Callable[[], object], calls: int = 1) -> float:
    """Return the CPU seconds of the fastest of some calls.

    Args:
        call: What to run.
        calls: How often.
    """
    found = []
    for _ in range(calls):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)
