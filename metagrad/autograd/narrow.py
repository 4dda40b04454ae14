"""Batched matrix products with few columns, which a CPU computes faster as their transposes.

A CPU vectorizes along the rows of a result. Where those are shorter than a vector, ``A B`` takes up to 8 times as
long as ``(Bᵀ Aᵀ)ᵀ``, depending on the layout of the factors (torch 2.13 with MKL). Such a product, with a column for
each example, is the derivative of a weight's gradient with respect to what reached the layer: in a step of MAML on
small tasks, the most expensive one.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_bmm = torch.ops.aten.bmm.default
_permute = torch.ops.aten.permute.default
_VECTOR = 16
"""How many float32 fit into the widest vector register of a CPU."""


class TransposeNarrow(CustomGraphPass):
    """A pass over the graphs of inductor that transposes narrow products; their users read them through strides."""

    def __call__(self, graph: fx.Graph) -> None:
        """Exchange every narrow product on a CPU for its transpose."""
        for product in graph.find_nodes(op="call_function", target=_bmm):
            if _is_narrow(product.meta["val"]):
                with graph.inserting_before(product):
                    a, b = (_transposed(graph, factor) for factor in product.args)
                    result = _transposed(graph, _call(graph, _bmm, b, a))
                product.replace_all_uses_with(result)
                graph.erase_node(product)

    def uuid(self) -> object:
        """Tell inductor's cache what the pass does."""
        return get_hash_for_files((__file__,))


def _is_narrow(product: torch.Tensor) -> bool:
    _, rows, columns = product.shape
    # A size that is not known does not compare.
    known = isinstance(rows, int) and isinstance(columns, int)
    return product.device.type == "cpu" and known and 1 < columns < _VECTOR <= rows


def _transposed(graph: fx.Graph, matrix: fx.Node) -> fx.Node:
    return _call(graph, _permute, matrix, [0, 2, 1])


def _call(graph: fx.Graph, function: torch._ops.OpOverload, *args: object) -> fx.Node:
    node = graph.call_function(function, args)  # type: ignore[arg-type]
    node.meta["val"] = function(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
    return node
