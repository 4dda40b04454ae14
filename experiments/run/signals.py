"""Signals that end a run: Ctrl-C, SIGTERM and SIGUSR1 from `kill` or a cluster, SIGHUP from a closed terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")


class Interrupted(KeyboardInterrupt):
    """A signal has ended a run. A sweep ends with it."""

    def __init__(self, number: int, message: str = "", *, at: str = "") -> None:
        super().__init__(message or f"Interrupted by {signal.Signals(number).name}{at and f' {at}'}.")
        self.number = number
        self.status = 128 + number

    def ending(self, how_to_go_on: str) -> Interrupted:
        """Return the same error, with the next command."""
        words = f"{self} {how_to_go_on}" if how_to_go_on else f"{self} There is no checkpoint to go on from."
        return Interrupted(self.number, words)


PASSED_ON = 1.0
"""Seconds within which the same signal counts once. A cluster may signal every process of a job, including torchrun,
which passes the signal on. A second SIGINT is from a person, so it always counts."""


@dataclass
class Deferred:
    """The signal that waits for the end of a step, and its time. None if no signal waits."""

    number: int | None = None
    since: float = 0.0


_deferred: Deferred | None = None


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Raise `Interrupted` when a signal arrives.

    Only the main thread can handle signals, so other threads ignore them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # `nohup` ignores SIGHUP, and a shell's `&` SIGINT
            signal.signal(number, _handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_deferred() -> Iterator[Deferred]:
    """Defer a signal until the loop reads `number`. A second signal raises."""
    global _deferred
    _deferred = Deferred()
    try:
        yield _deferred
    finally:
        _deferred = None


def _handle(number: int, frame: Any) -> None:
    now = time.monotonic()
    if (
        _deferred is not None
        and number == _deferred.number != signal.SIGINT
        and now < _deferred.since + PASSED_ON
    ):
        return
    if _deferred is None or _deferred.number is not None:
        raise Interrupted(number)
    _deferred.number, _deferred.since = number, now
    # This avoids loggers and streams, since the signal may have interrupted one of them.
    os.write(
        2, f"\n{signal.Signals(number).name}: saving after this step; once more to stop at once.\n".encode()
    )
