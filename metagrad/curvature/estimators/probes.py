"""Random probes: rows z with E[z z^T] = I, drawn in pieces that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from metagrad.core.budget import Bytes, checked_bytes
from metagrad.curvature.linear_map import LinearMap
from metagrad.curvature.rows import norm

Distribution = Literal["rademacher", "normal", "sphere"]


def sample_probes(
    count: int,
    n: int,
    *,
    distribution: Distribution = "rademacher",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Draw probes, rows :math:`z` with :math:`E[z z^T] = I`.

    ============ ==========================================================================================
    distribution what
    ============ ==========================================================================================
    "rademacher" signs; :math:`z^T A z` has no variance from the diagonal of :math:`A`
    "normal"     independent standard normal elements; rotation invariant
    "sphere"     uniform directions of norm :math:`\sqrt n`; rotation invariant, with less variance
    ============ ==========================================================================================

    Every row is drawn by a call of its own, so rows drawn in several calls are bit for bit those of one.

    Args:
        count: How many.
        n: Elements of each.
        distribution: From which distribution.
        dtype: Of the probes.
        device: Where the probes go.
        generator: Draws the numbers on its own device, from which they are moved; torch's default generator of
            ``device`` otherwise. The same state gives the same bits.

    Returns:
        The probes, shape [count, n].

    Raises:
        ValueError: ``distribution`` is unknown, or ``count`` is below 1.
        TypeError: ``generator`` is no :class:`torch.Generator`.

    Example:
        >>> from metagrad.curvature.estimators.probes import sample_probes
        >>> z = sample_probes(4, 9, distribution="sphere", generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(z.square().sum(1), torch.full((4,), 9.0))
        True

    References:
        Girard, Numer. Math. 56, 1989, for normal probes; Hutchinson, Commun. Stat. Simul. 18(3), 1989, for signs;
        Epperly, Tropp, Webber, "XTrace", SIAM J. Matrix Anal. Appl. 45(1), 2024, for the sphere.
    """
    check_drawing("sample_probes(...)", distribution, generator)
    if count < 1:
        raise ValueError(f"sample_probes(count, n): count must be at least 1, got {count}.")
    place = generator.device if generator is not None else device
    rows = torch.empty(count, n, dtype=dtype, device=place)
    for row in rows:
        _fill(row, distribution, generator)
    return rows if device is None else rows.to(device)


def draw_for(
    operator: LinearMap, count: int, distribution: Distribution, generator: torch.Generator | None
) -> Tensor:
    """Draw probes, [count, n], for an operator."""
    dtype, device = operator.dtype, operator.device
    n = operator.shape[0]
    return sample_probes(count, n, distribution=distribution, dtype=dtype, device=device, generator=generator)


def check_drawing(call: str, distribution: str, generator: object) -> None:
    """Check the arguments for random probes."""
    if distribution not in get_args(Distribution):
        known = ", ".join(f'"{name}"' for name in get_args(Distribution))
        raise ValueError(f"{call}: distribution must be one of {known}, got {distribution!r}.")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"{call}: generator must be a torch.Generator or None, got {type(generator).__name__}. "
            "torch.Generator().manual_seed(0) makes one."
        )


def piece_sizes(operator: object, count: int, rows: int) -> Iterator[int]:
    """Split ``count`` vectors into pieces of at most ``rows``, and of the operator's ``num_together``."""
    while count > 0:
        size = min(count, rows, getattr(operator, "num_together", None) or rows)
        yield size
        count -= size


def rows_in_chunk(call: str, chunk: Bytes, n: int, dtype: torch.dtype) -> int:
    """Return how many rows of n elements fit into a chunk; at least one."""
    return max(1, checked_bytes(call, "chunk", chunk) // max(1, n * dtype.itemsize))


def _fill(row: Tensor, distribution: Distribution, generator: torch.Generator | None) -> None:
    if distribution == "rademacher":
        row.random_(0, 2, generator=generator).mul_(2).sub_(1)
        return
    row.normal_(generator=generator)
    if distribution == "sphere":
        row.mul_(math.sqrt(row.numel()) / norm(row))
