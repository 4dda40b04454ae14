"""Progress bars of long computations."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

DELAY = 5.0
"""Seconds after which a bar appears."""


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """Return the items with a bar on standard error, which shows how many are done and the time left.

    The bar appears only in a terminal, after a few seconds, if tqdm is installed. ``TQDM_DISABLE=1`` hides it.
    """
    if not sys.stderr.isatty():
        return items
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=what, total=total, delay=DELAY, leave=False, dynamic_ncols=True)
