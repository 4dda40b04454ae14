"""Random probes in the shapes of gradients, dense and sparse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from metagrad.core._torch import without_torch_function
from metagrad.sparse.kernels.accumulation import coalesced
from metagrad.sparse.tables.row_sparse import RowSparse

Generators: TypeAlias = "Callable[[torch.device], torch.Generator | None]"
"""The generator that random numbers on a device come from; None is torch's own."""


def torchs_own(device: torch.device) -> torch.Generator | None:
    """Draw from torch's global generator, whose state is restored where an inner step is recomputed."""
    return None


def drawn_like(gradient: Tensor, distribution: str, generator: torch.Generator | None) -> Tensor:
    """Draw a probe in the shape of a gradient; of a sparse one, in its rows.

    Args:
        gradient: Strided, RowSparse, or COO with one sparse dimension.
        distribution: ``"rademacher"`` or ``"normal"``.
        generator: Of the gradient's device; None is torch's own.
    """
    gradient = as_rows(gradient.detach())
    if isinstance(gradient, RowSparse):
        drawn = drawn_like(gradient.values, distribution, generator)
        return RowSparse(gradient.rows, drawn, gradient.shape)
    if distribution == "normal":
        return torch.empty_like(gradient).normal_(generator=generator)
    return _signs(gradient, generator)


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw -1 and 1: of a random byte, eight."""
    words = torch.empty(-(-like.numel() // 32), dtype=torch.int32, device=like.device)
    octets = words.random_(-(2**31), None, generator=generator).view(torch.uint8)
    signs = _signs_of_bytes(like.dtype, like.device).index_select(0, octets.int())
    return signs.view(-1)[: like.numel()].view(like.shape)


@functools.lru_cache
def _signs_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the bits of every byte as signs, ``[256, 8]``."""
    # A recording that saw how the table is made would miss it in the recomputation.
    with without_torch_function(), torch.inference_mode(False):
        bits = (torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)) & 1
        return (2 * bits - 1).to(dtype)


def as_rows(gradient: Tensor) -> Tensor:
    """Convert the COO gradient of torch's sparse embedding to RowSparse, detached as torch cuts it; others pass."""
    if gradient.layout != torch.sparse_coo:
        return gradient
    if gradient.sparse_dim() != 1:
        raise TypeError(
            f"a COO gradient of shape {tuple(gradient.shape)} has {gradient.sparse_dim()} sparse dimensions, and "
            "only tables with sparse rows, of one, are known here. Make it dense by .to_dense()."
        )
    gradient = coalesced(gradient.detach())
    return RowSparse(gradient.indices()[0], gradient.values(), gradient.shape)
