"""Sparse gradients as optimizers read them."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.sparse.kernels.accumulation import coalesced
from metagrad.sparse.tables.row_sparse import RowSparse


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
