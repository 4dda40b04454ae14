"""Sparse gradients in optimizers, and steps that update only some rows of a table."""

from __future__ import annotations

import torch
from torch import Tensor

from metagrad.core.tree import widened
from metagrad.optim.rule import Rule
from metagrad.optim.torch_optim.state import ParameterState, PendingUpdate, apart, joined
from metagrad.sparse.kernels.products import coalesced
from metagrad.sparse.tables.row_sparse import RowSparse, gather_rows


def as_rows(gradient: Tensor) -> Tensor:
    """Convert the COO gradient of a sparse embedding to a detached RowSparse. Return other gradients unchanged."""
    if gradient.layout != torch.sparse_coo:
        return gradient
    if gradient.sparse_dim() != 1:
        raise TypeError(
            f"a COO gradient of shape {tuple(gradient.shape)} has {gradient.sparse_dim()} sparse dimensions, and "
            "only tables with sparse rows, of one, are known here. Make it dense by .to_dense()."
        )
    gradient = coalesced(gradient.detach())
    return RowSparse(gradient.indices()[0], gradient.values(), gradient.shape)


def step_rows(rule: Rule, key: str, table: Tensor, gradient: Tensor, kept: ParameterState) -> PendingUpdate:
    """Compute a step of all rows that had a gradient so far. The dense rule changes only these rows.

    The state has a slot ``rows``, int64 and ascending. Every other slot holds only these rows.
    """
    known = _known_rows(kept, table)
    touched = (
        gradient.rows if isinstance(gradient, RowSparse) else torch.arange(len(table), device=table.device)
    )
    rows = torch.unique(torch.cat([known, touched]))
    values = {key: widened(table.index_select(0, rows))}
    state = rule.init(values)
    if "step" in kept:
        state = joined(rule, {key: _grown(state, key, kept, torch.searchsorted(rows, known))}, values)
    own = gather_rows(gradient, rows, unique=True) if isinstance(gradient, RowSparse) else gradient
    moved, state = rule.update({key: widened(own)}, state, values)
    return PendingUpdate({key: table}, moved, {key: {**apart(state, [key])[key], "rows": rows}}, rows)


def _known_rows(kept: ParameterState, table: Tensor) -> Tensor:
    """Return the rows that the state holds, which are all rows after a dense gradient."""
    if "step" not in kept:
        return torch.empty(0, dtype=torch.int64, device=table.device)
    return kept["rows"] if "rows" in kept else torch.arange(len(table), device=table.device)


def _grown(fresh: object, key: str, kept: ParameterState, places: Tensor) -> ParameterState:
    """Copy the state of known rows into the state of more rows."""
    grown = dict(kept)
    for field, value in fresh._asdict().items():  # type: ignore[attr-defined]
        if isinstance(value, dict):
            grown[field] = value[key].index_copy(0, places, kept[field]) if field in kept else value[key]
    return grown
