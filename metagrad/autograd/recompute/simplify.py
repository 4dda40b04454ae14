"""Removing operations from a program that autograd runs since it differentiates one function at a time.

It transposes twice, fills tensors with ones to begin from, adds zeros where no gradient flows, and adds a product to
a sum where ``addmm`` does both. For small tensors each such operation takes as long as one that is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from metagrad.autograd.recompute.products import call, transpose_in
from metagrad.core import _torch

aten: Any = torch.ops.aten
_ZEROS = {aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default}
FILLING = {
    *_ZEROS,
    aten.ones_like.default,
    aten.new_ones.default,
    aten.ones.default,
    aten.scalar_tensor.default,
}
"""Operations whose results depend on the shapes and dtypes of their operands alone."""

_VIEWS = {
    aten.expand.default,
    aten.permute.default,
    aten.t.default,
    aten.unsqueeze.default,
    aten.view.default,
}
_ADDED = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}


def simplify(graph: fx.Graph, constants: Mapping[fx.Node, str]) -> None:
    """Remove operations from a graph, none of which writes into a tensor.

    Args:
        graph: The operations; the ``meta["val"]`` of each is a tensor like its result.
        constants: For nodes that depend on no input, the attributes that hold their results.
    """
    _leave_out_zeros(graph)
    _read_constants(graph, constants)
    _name_swaps(graph)
    _share_views(graph)
    transpose_in(graph)
    _share_views(graph)
    _add_to_products(graph)


def _leave_out_zeros(graph: fx.Graph) -> None:
    """Replace a sum with zeros by the other term, unless that is an input or a view of one: gradients are new."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        for zeros, other in (node.args, node.args[::-1]):
            is_zero = isinstance(zeros, fx.Node) and zeros.target in _ZEROS and not node.kwargs
            if is_zero and _are_alike(other, node) and not _is_part_of_input(other):
                node.replace_all_uses_with(other)
                break
    graph.eliminate_dead_code()


def _read_constants(graph: fx.Graph, constants: Mapping[fx.Node, str]) -> None:
    """Read constants from attributes; but results, and what views of become results, belong to the caller."""
    for node, name in constants.items():
        others = (user for user in node.users if user not in constants)
        readers = [user for user in others if user.op != "output" and not _is_view(user)]
        if readers:
            with graph.inserting_before(node):
                kept = graph.get_attr(name)
            kept.meta = node.meta
            node.replace_all_uses_with(kept, delete_user_cb=readers.__contains__)
    graph.eliminate_dead_code()


def _name_swaps(graph: fx.Graph) -> None:
    """Write the transposes of batches of matrices as ``permute``, as inductor does."""
    for node in graph.find_nodes(op="call_function", target=aten.transpose.int):
        tensor, *places = node.args
        if node.meta["val"].ndim == 3 and {place % 3 for place in places} == {1, 2}:
            with graph.inserting_before(node):
                node.replace_all_uses_with(call(graph, aten.permute.default, tensor, [0, 2, 1]))
    graph.eliminate_dead_code()


def _share_views(graph: fx.Graph) -> None:
    """Merge equal views."""
    known: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if _is_view(node) and not node.kwargs:
            first = known.setdefault((node.target, repr(node.args)), node)
            if first is not node:
                node.replace_all_uses_with(first)
    graph.eliminate_dead_code()


def _add_to_products(graph: fx.Graph) -> None:
    """Replace a product and a sum by ``addmm`` or ``baddbmm``."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        for other, product in (node.args, node.args[::-1]):
            if (
                isinstance(product, fx.Node)
                and product.target in _ADDED
                and isinstance(other, fx.Node)
                and other.meta["val"].ndim > 0  # that may be on another device
                and list(product.users) == [node]
                and not node.kwargs
                and _are_alike(product, node)
                and other.meta["val"].dtype == node.meta["val"].dtype
            ):
                with graph.inserting_before(node):
                    node.replace_all_uses_with(call(graph, _ADDED[product.target], other, *product.args))
                break
    graph.eliminate_dead_code()


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and _torch.returns_views(node.target)


def _is_part_of_input(node: fx.Node) -> bool:
    """Say whether a node may return an input or a view of one."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node.op != "call_function" or node.target is operator.getitem


def _are_alike(first: Any, second: fx.Node) -> bool:
    a, b = first.meta["val"] if isinstance(first, fx.Node) else None, second.meta["val"]
    return isinstance(a, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
