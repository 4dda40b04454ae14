"""What is computed of a structure once and kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from metagrad.core import _torch

P = ParamSpec("P")
R = TypeVar("R")


def structural(compute: Callable[P, R]) -> Callable[P, R]:
    """Hide a computation of indices from torch function modes.

    Recomputation (``checkpoint``, ``unroll``) follows a function by the sequence of its torch functions, which must
    not depend on whether a map is known already.
    """

    @functools.wraps(compute)
    def unseen(*args: P.args, **kwargs: P.kwargs) -> R:
        with _torch.without_torch_function():
            return compute(*args, **kwargs)

    return unseen
