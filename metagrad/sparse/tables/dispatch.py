"""The arithmetic of :class:`~metagrad.sparse.tables.RowSparse`: what keeps to rows, and nothing else.

Two tables say what is known. ``COMPOSED`` holds the functions that a user calls whose derivatives torch would
compute from the whole tensor: they are written on ``values``, on the ordinary tape. ``OPERATIONS`` holds what torch
calls below its tape: accumulation of gradients, its own backward formulas, and the linear functions, whose formulas
are right as they are. What stands in neither raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metagrad.sparse.tables import arithmetic, views

aten = torch.ops.aten


def operate(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation of torch's, below the tape."""
    handler = OPERATIONS.get(func.overloadpacket)
    if handler is None:
        raise arithmetic.unknown(
            f"{func.overloadpacket.__name__}(...)", "it is not known to keep to the rows"
        )
    return handler(*args, **kwargs)


OPERATIONS: dict[Any, arithmetic.Handler] = {
    aten.add: arithmetic.add,
    aten.add_: arithmetic.add_into,
    aten.sub: arithmetic.subtract,
    aten.sub_: arithmetic.subtract_into,
    aten.rsub: arithmetic.subtract_from,
    aten.mul: arithmetic.multiply,
    aten.mul_: arithmetic.in_place(arithmetic.multiply),
    aten.div: arithmetic.divide,
    aten.div_: arithmetic.in_place(arithmetic.divide),
    aten.neg: arithmetic.elementwise(torch.neg),
    aten.neg_: arithmetic.in_place(arithmetic.elementwise(torch.neg)),
    aten.abs: arithmetic.elementwise(torch.abs),
    aten.sgn: arithmetic.elementwise(torch.sgn),
    aten.pow: arithmetic.raised,
    aten.sum: arithmetic.total,
    aten.mean: arithmetic.mean,
    aten.linalg_vector_norm: arithmetic.vector_norm,
    aten.index_select: arithmetic.index_select,
    aten.is_same_size: lambda x, y: x.shape == y.shape,
    aten._has_same_storage_numel: lambda x, y: x.shape == y.shape,
    aten.view: views.view,
    aten.slice: views.cut,
    aten.slice_backward: views.put_back,
    aten.permute: views.permute,
    aten.detach: views.alias,
    aten.alias: views.alias,
    aten.clone: views.clone,
    aten._to_copy: views.to_copy,
    aten.zeros_like: views.zeros_like,
    aten.new_empty_strided: views.new_empty_strided,
    aten.zero_: arithmetic.in_place(views.zeros_like),
    aten.copy_: views.copy_into,
}


def _named(handler: arithmetic.Handler, *names: str) -> dict[Any, arithmetic.Handler]:
    """Key a handler by every function of torch with one of these names."""
    places = (torch, Tensor)
    return {getattr(place, name): handler for name in names for place in places if hasattr(place, name)}


COMPOSED: dict[Any, arithmetic.Handler] = {
    **_named(arithmetic.multiply, "mul", "multiply", "__mul__", "__rmul__"),
    **_named(arithmetic.divide, "div", "divide", "true_divide", "__truediv__"),
    **_named(arithmetic.raised, "pow", "__pow__"),
    **_named((lambda x: arithmetic.raised(x, 2)), "square"),
    **_named(arithmetic.elementwise(torch.abs), "abs", "absolute", "__abs__"),
    **_named(arithmetic.elementwise(torch.sign), "sign", "sgn"),
    **_named(arithmetic.total, "sum"),
    **_named(arithmetic.mean, "mean"),
    **_named(arithmetic.norm, "norm"),
    torch.linalg.vector_norm: arithmetic.vector_norm,
    **_named(arithmetic.extremum(torch.max), "max"),
    **_named(arithmetic.extremum(torch.min), "min"),
    **_named(arithmetic.index_select, "index_select"),
}
