"""What is asked of a closure that is called for the curvature of a part of the data."""

from __future__ import annotations

import inspect
from collections.abc import Callable


def check_fraction(name: str, fraction: float) -> None:
    """Refuse what is no part of the data; ``name`` is that of the optimizer."""
    if not 0 < fraction <= 1:
        raise ValueError(f"{name}(params): curvature_fraction must be above 0 and at most 1, got {fraction}.")


def check_takes_fraction(name: str, closure: Callable[..., object], fraction: float) -> None:
    """Refuse a closure that cannot be called as ``closure(fraction=...)``, before it is called at all."""
    try:
        inspect.signature(closure).bind(fraction=fraction)
    except TypeError as error:
        raise TypeError(
            f"{name}.step(closure): curvature_fraction={fraction:g} calls closure(fraction={fraction:g}) for the "
            f"curvature of a part of the data, and closure does not take that: {error}. Write "
            "`def closure(fraction=1.0):`, with the loss of the first round(fraction * len(x)) examples; or call "
            "opt.step(closure, curvature=part), with a closure of the part."
        ) from None
