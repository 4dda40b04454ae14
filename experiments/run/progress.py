"""Progress and time left: a bar in a terminal, lines on standard error elsewhere.

Standard output is only for tables, so that `python -m experiments.benchmarks.maml > bench.txt` writes only these.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from tqdm import tqdm

FIRST, EVERY = 5.0, 30.0
"""Seconds before the first line and between lines. Shorter work prints no line."""
LINE = "{desc}{n:.0f} of {total:.0f} {unit}s, {percentage:.0f} %, {elapsed} taken, {remaining} left{postfix}"

T = TypeVar("T")


class Lines:
    """A file that receives the progress bar if there is no terminal, and prints a line every `EVERY` seconds."""

    def __init__(self) -> None:
        self._due, self._shown, self._last = time.monotonic() + FIRST, "", ""

    def write(self, text: str) -> None:
        """Receive the text of a bar: the bar many times, blanks that clear the bar, and a line feed at the end."""
        self._last = text.strip() or self._last
        is_last = text == "\n" and self._shown
        if self._last != self._shown and (is_last or time.monotonic() >= self._due):
            print(self._last, file=sys.stderr, flush=True)
            self._due, self._shown = time.monotonic() + EVERY, self._last

    def flush(self) -> None:
        """Do nothing: a line is flushed when it is printed."""


class Progress(tqdm, Generic[T]):
    """A progress bar with the time left. Without a terminal, the bar is printed as lines.

    Args:
        over: The iterable. None if `update()` counts.
        total: The number of items. None for the length of `over`.
        unit: The name of an item, in the singular.
        initial: The number of items that were done before.
        hidden: Whether to show nothing, as in all processes of a run except the first.
        leave: Whether the bar stays when all is done.
    """

    def __init__(
        self,
        over: Iterable[T] | None = None,
        *,
        total: float | None = None,
        unit: str,
        initial: int = 0,
        hidden: bool = False,
        leave: bool = True,
    ) -> None:
        lines = {"file": Lines(), "bar_format": LINE, "mininterval": 1.0, "position": 0}
        where: dict[str, Any] = {"dynamic_ncols": True} if sys.stderr.isatty() else lines
        super().__init__(over, total=total, unit=unit, initial=initial, disable=hidden, leave=leave, **where)


def tell(text: str = "", end: str = "\n") -> None:
    """Print a part of a table to standard output, above the bar."""
    tqdm.write(text, file=sys.stdout, end=end)
    sys.stdout.flush()
