"""Preconditioners, and a check that a map of rows is symmetric."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from metagrad.core._torch import to_list
from metagrad.curvature.estimators.probes import draw_for
from metagrad.curvature.linear_map import LinearMap, Rows
from metagrad.curvature.rows import dot, norm

Preconditioner: TypeAlias = Callable[[Tensor], Tensor] | Tensor
"""A symmetric positive definite map of rows [k, n] close to the inverse, or the operator's diagonal [n]."""


_FIX = (
    "Symmetrize it, or solve the normal equations with x -> A^T A x. If the difference is noise that you accept, "
    "pass check_symmetry=False."
)


def check_symmetric(call: str, name: str, operator: LinearMap, products: Rows, *, fix: str = _FIX) -> None:
    """Raise ``ValueError`` unless x^T A y and y^T A x agree on one random pair.

    An asymmetric map passes with probability 0. The numbers are drawn from a separate generator.
    """
    pair = draw_for(operator, 2, "normal", torch.Generator().manual_seed(0))
    with torch.no_grad():
        images = products(pair).detach()
    if images.shape != pair.shape:
        raise ValueError(
            f"{call}: {name} must map rows {tuple(pair.shape)} to rows of the same shape, got {tuple(images.shape)}."
        )
    if not bool(images.isfinite().all()):
        return  # the solve reports it, with the row and the step
    forth, back = to_list(dot(pair, images.flip(0)))
    scale = float((norm(pair) * norm(images.flip(0))).sum())
    # For independent x and y, x^T A y has the size |x| |A y| / sqrt(n).
    tolerance = 10 * math.sqrt(torch.finfo(operator.dtype).eps) * scale / math.sqrt(operator.shape[0])
    if abs(forth - back) > tolerance:
        raise ValueError(
            f"{call}: {name} must be symmetric, but for random x and y, x^T A y = {forth:.6g} and "
            f"y^T A x = {back:.6g}. {fix}"
        )


def checked_preconditioner(
    call: str,
    preconditioner: Preconditioner | None,
    operator: LinearMap,
    damping: float,
    check_symmetry: bool,
) -> Rows | None:
    """Return the user's preconditioner as a map of rows."""
    if preconditioner is None:
        return None
    n = operator.shape[0]
    if isinstance(preconditioner, Tensor):
        if preconditioner.shape != (n,) or preconditioner.dtype != operator.dtype:
            raise ValueError(
                f"{call}: as a tensor, preconditioner must be the operator's diagonal, [{n}] of {operator.dtype}, "
                f"got {list(preconditioner.shape)} of {preconditioner.dtype}."
            )
        damped = preconditioner + damping
        if not bool((damped > 0).all()):
            raise ValueError(
                f"{call}: every element of the preconditioner plus the damping must be above 0, the least is "
                f"{float(damped.min()):.3g}. Take absolute values, a lower bound, or more damping."
            )
        return lambda rows: rows / damped
    if not callable(preconditioner):
        raise TypeError(
            f"{call}: preconditioner must be a map of rows or a diagonal [{n}], got {type(preconditioner).__name__}."
        )
    if check_symmetry:
        check_symmetric(call, "preconditioner", operator, preconditioner)
    return preconditioner
