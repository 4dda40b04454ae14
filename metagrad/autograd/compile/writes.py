"""Writes into expanded tensors in compiled graphs.

Where nothing else reads a tensor, inductor writes into it instead of a copy. In torch 2.13 it does so with expanded
tensors, too, and entries in one memory get each other's values, without an error (pytorch/pytorch issue 183986).
``torch.vmap`` makes such graphs of ``zeros.index_put(indices, values)`` with values for each example: it expands what
is common to all.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from metagrad.autograd.compile.products import call

_aten = torch.ops.aten
_CONTIGUOUS = torch.contiguous_format
_WRITES = (
    _aten.index_put.default,
    _aten._unsafe_index_put.default,
    _aten.as_strided_scatter.default,
    _aten.diagonal_scatter.default,
    _aten.select_scatter.default,
    _aten.slice_scatter.default,
)


def separate_entries(graph: fx.Graph) -> None:
    """Copy tensors that are written into, where their entries may share memory."""
    for write in _WRITES:
        for node in graph.find_nodes(op="call_function", target=write):
            if may_overlap(node.args[0].meta["val"]):
                with graph.inserting_before(node):
                    node.update_arg(
                        0, call(graph, _aten.clone.default, node.args[0], memory_format=_CONTIGUOUS)
                    )


def may_overlap(tensor: Tensor) -> bool:
    """Say whether entries may share memory: the stride of a dimension is less than what the faster ones span.

    With symbolic sizes or strides they may.
    """
    if not all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride())):
        return True
    if 0 in tensor.shape:
        return False
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            return True
        reach += (size - 1) * stride
    return False
