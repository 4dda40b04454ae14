"""Random probes: rows z with E[z z^T] = I, drawn in pieces that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from metagrad.core.budget import Bytes, checked_bytes
from metagrad.core.checks import check_choice, check_count, check_type
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
    distribution probes
    ============ ==========================================================================================
    "rademacher" signs. The diagonal of :math:`A` adds no variance to :math:`z^T A z`.
    "normal"     independent standard normal elements. Rotation invariant.
    "sphere"     uniform directions of norm :math:`\sqrt n`. Rotation invariant, with less variance.
    ============ ==========================================================================================

    Every row is drawn by its own call, so rows drawn in several calls are bitwise identical to rows drawn in one.

    Args:
        count: Number of probes, 1 or more.
        n: Number of elements of each probe, 0 or more.
        distribution: A row of the table.
        dtype: A floating point dtype.
        device: Device of the probes.
        generator: Draws the numbers on its own device, before they move to ``device``. The default is torch's default
            generator of ``device``. The same state gives bitwise identical probes.

    Returns:
        The probes, shape [count, n].

    Raises:
        ValueError: ``distribution`` is unknown, or a number is out of range.
        TypeError: ``generator`` is not a :class:`torch.Generator`, or ``dtype`` is not floating point.

    Example:
        >>> from metagrad.curvature.estimators.probes import sample_probes
        >>> z = sample_probes(4, 9, distribution="sphere", generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(z.square().sum(1), torch.full((4,), 9.0))
        True

    References:
        Girard, Numer. Math. 56, 1989, for normal probes; Hutchinson, Commun. Stat. Simul. 18(3), 1989, for signs;
        Epperly, Tropp, Webber, "XTrace", SIAM J. Matrix Anal. Appl. 45(1), 2024, for the sphere.
    """
    check_choice("sample_probes(...): distribution", distribution, Distribution)
    check_type("sample_probes(...): generator", generator, torch.Generator, optional=True)
    check_count("sample_probes(count, n): count", count)
    check_count("sample_probes(count, n): n", n, 0)
    if not dtype.is_floating_point:
        raise TypeError(f"sample_probes(..., dtype): expected a floating point dtype, got {dtype}.")
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


def piece_sizes(operator: object, count: int, rows: int) -> Iterator[int]:
    """Split ``count`` vectors into pieces of at most ``rows`` vectors and at most the operator's ``num_together``."""
    while count > 0:
        size = min(count, rows, getattr(operator, "num_together", None) or rows)
        yield size
        count -= size


def rows_in_chunk(call: str, chunk: Bytes, n: int, dtype: torch.dtype) -> int:
    """Return how many rows of n elements fit into a chunk, at least one."""
    return max(1, checked_bytes(call, "chunk", chunk) // max(1, n * dtype.itemsize))


def _fill(row: Tensor, distribution: Distribution, generator: torch.Generator | None) -> None:
    if distribution == "rademacher":
        row.random_(0, 2, generator=generator).mul_(2).sub_(1)
        return
    row.normal_(generator=generator)
    if distribution == "sphere":
        row.mul_(math.sqrt(row.numel()) / norm(row))
