"""Calling a module with other values for its parameters."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, nn

from metagrad.core.substitution import replaced
from metagrad.meta.structured import Nested, call_on
from metagrad.optim.rules import Params
from metagrad.sparse.tables.table_proxy import LocalRows

Values: TypeAlias = dict[int, "Tensor | LocalRows"]
"""Values by the id of the parameter they stand for, so that tied weights stay tied."""


def values_for(model: nn.Module, params: Params, rows: Params) -> Values:
    """Find the parameters that are named, and key their values by identity; of some, only rows have values."""
    return {
        id(p): LocalRows(name, tuple(p.shape), rows[name], params[name]) if name in rows else params[name]
        for name, p in model.named_parameters()
        if name in params
    }


def call_with(model: nn.Module, values: Values, x: Nested) -> Any:
    """Return what a model makes of its inputs with other values for some of its parameters."""
    tensors = {key: v.stand_in() if isinstance(v, LocalRows) else v for key, v in values.items()}
    with replaced(model, tensors):
        return call_on(model, x)
