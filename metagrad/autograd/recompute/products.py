"""Batched matrix products in compiled graphs, each or its transpose, whichever a CPU computes faster.

``A B`` is ``(Bᵀ Aᵀ)ᵀ``, and a product takes its factors in any layout at the same cost. Two things make one of them
faster (torch 2.13 with MKL, measured):

- A CPU vectorizes along the rows of a result. Where those are shorter than a vector, the product takes up to 8 times
  as long as the transposed one. The derivative of a weight's gradient with respect to what reached the layer is such
  a product, with a column for each example: in a step of MAML on small tasks, the most expensive one.
- A result that is only read transposed, as the gradient of a weight that entered its product transposed, is read with
  strides by every sum, several times as slowly as along memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_bmm = _aten.bmm.default
_permute = _aten.permute.default
_ELEMENTWISE = {_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor}
_SWAP = [0, 2, 1]
_VECTOR = 16
"""How many float32 fit into the widest vector register of a CPU."""


def transpose_in(graph: fx.Graph) -> None:
    """Move transposes out of sums into the products that they apply to, then transpose narrow products."""
    for node in list(graph.find_nodes(op="call_function", target=_permute)):
        if _is_swap(node) and _can_move(node.args[0], node):
            with graph.inserting_before(node):
                node.replace_all_uses_with(_transposed(graph, node.args[0]))
    graph.eliminate_dead_code()
    for product in graph.find_nodes(op="call_function", target=_bmm):
        if _is_narrow(product):
            with graph.inserting_before(product):
                result = call(graph, _permute, _transposed(graph, product), _SWAP)
            product.replace_all_uses_with(result)
            graph.erase_node(product)


def _can_move(node: Any, reader: fx.Node) -> bool:
    """Say whether what a node computes can be computed transposed, as its only reader takes it."""
    value = node.meta["val"]
    if _is_swap(node) or value.ndim != 3 or list(node.users) != [reader]:
        return _is_swap(node)
    if node.target in _ELEMENTWISE and len(node.args) == 2 and not node.kwargs:
        return all(
            _is_scalar(arg) or (arg.meta["val"].shape == value.shape and _can_move(arg, node))
            for arg in node.args
        )
    return node.target is _bmm and not _is_narrow(node, transposed=True)


def _transposed(graph: fx.Graph, node: Any) -> Any:
    """Compute the transpose of what a node computes."""
    if _is_swap(node):
        return node.args[0]
    if node.target is _bmm:
        a, b = (f.args[0] if _is_swap(f) else call(graph, _permute, f, _SWAP) for f in node.args)
        return call(graph, _bmm, b, a)
    args = (arg if _is_scalar(arg) else _transposed(graph, arg) for arg in node.args)
    return call(graph, node.target, *args)


def _is_swap(node: Any) -> bool:
    return node.target is _permute and list(node.args[1]) == _SWAP


def _is_scalar(arg: object) -> bool:
    return not isinstance(arg, fx.Node) or arg.meta["val"].ndim == 0


def _is_narrow(product: fx.Node, transposed: bool = False) -> bool:
    """Say whether a product, or its transpose, has rows shorter than a vector."""
    value = product.meta["val"]
    _, rows, columns = value.mT.shape if transposed else value.shape
    # A size that is not known does not compare.
    known = isinstance(rows, int) and isinstance(columns, int)
    return known and 1 < columns < _VECTOR <= rows


def call(graph: fx.Graph, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call into a graph of inductor's; ``kwargs`` are constants."""
    node = graph.call_function(function, args, kwargs)
    values = (arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args)
    node.meta["val"] = function(*values, **kwargs)
    return node
