"""A check for NaN and Inf, with one transfer from the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from metagrad.sparse.tables.row_sparse import RowSparse


def is_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether no entry is NaN or Inf. An accelerator is synchronized once.

    Example:
        >>> from metagrad.autograd.checks.finite import is_finite
        >>> is_finite([torch.ones(2), torch.full((3,), 1e30)]), is_finite([torch.tensor([0.0, float("nan")])])
        (True, False)
    """
    values = [t.values.detach() if isinstance(t, RowSparse) else t.detach() for t in tensors]
    if not values:
        return True
    # The norm of large finite entries can overflow.
    norm = torch.nn.utils.get_total_norm(values)
    return math.isfinite(norm.item()) or all(bool(v.isfinite().all()) for v in values)
