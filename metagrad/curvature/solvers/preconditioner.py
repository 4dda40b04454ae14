"""A check that a map of rows is symmetric."""

from __future__ import annotations

import math

import torch

from metagrad.core._torch import to_list
from metagrad.core.checks import refuse
from metagrad.curvature.estimators.probes import draw_for
from metagrad.curvature.linear_map import LinearMap, Rows
from metagrad.curvature.rows import dot, norm

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
        refuse(f"{call}: {name}", f"rows of the shape it receives, {tuple(pair.shape)}", tuple(images.shape))
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
