"""What is measured: something that is held, a graph mostly, and a result that is computed from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad.sparse import RowSparse


class Run(NamedTuple):
    """Something to measure: what is held, and what is computed from it.

    Attributes:
        hold: Computes what is held until the result is there: the graph of a loss or of its gradient.
        finish: Returns the result.
        is_kept: Whether what is held serves many results, so that the time of one is that of `finish` alone.
    """

    hold: Callable[[], Any]
    finish: Callable[[Any], Any]
    is_kept: bool = False


def at_once(compute: Callable[[], Any]) -> Run:
    """Make a run that holds nothing in between."""
    return Run(lambda: None, lambda _: compute())


def half_square(grads: Sequence[Tensor]) -> Tensor:
    """Return half the squared norm, whose gradient is the Hessian times the gradient."""
    parts = [(g.values if isinstance(g, RowSparse) else g) for g in grads]
    return torch.stack([part.square().sum() for part in parts]).sum() / 2


def dense(tensor: Tensor) -> Tensor:
    """Return rows of a table as the table."""
    return tensor.to_dense() if isinstance(tensor, RowSparse) else tensor


def flat(result: Any) -> Tensor:
    """Return a result as one vector in float64, on the CPU."""
    parts = (
        result.values() if isinstance(result, dict) else [result] if isinstance(result, Tensor) else result
    )
    return torch.cat([dense(part).detach().double().cpu().flatten() for part in parts])
