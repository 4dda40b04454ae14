"""Questions to one backward node: what it saved, and what it differentiates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.autograd.graph import Node

Predicate = Callable[[Node], bool]

COO = frozenset({torch.sparse_coo})
COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def both(first: Predicate, second: Predicate) -> Predicate:
    """Ask one question, and if the answer is yes, another."""
    return lambda node: first(node) and second(node)


def flag(name: str) -> Predicate:
    """Ask for a saved argument; a node that does not tell, in another version of torch, counts as if it were set."""
    return lambda node: bool(getattr(node, name, True))


def needs_gradient(index: int) -> Predicate:
    """Ask whether a gradient flows to one of the inputs."""
    return lambda node: node.next_functions[index][0] is not None


def layout_in(name: str, layouts: frozenset[torch.layout]) -> Predicate:
    """Ask for the layout of a saved tensor, which unpacks it."""
    return lambda node: getattr(node, name).layout in layouts


def without_strides(name: str) -> Predicate:
    """Ask whether a matrix was sparse, by its saved strides: sparse layouts have none. Unpacks nothing."""
    return lambda node: getattr(node, name) == ()


def pads_its_output(node: Node) -> bool:
    """Ask whether a convolution is transposed, with output padding."""
    return node._saved_transposed and any(node._saved_output_padding)  # type: ignore[attr-defined]


# Every wrapper that once_differentiable makes shares this code object.
_ONCE = once_differentiable(lambda ctx: None).__code__


def is_once_differentiable(node: Node) -> bool:
    """Ask whether a custom function's backward has the decorator, perhaps below others."""
    if not isinstance(node, BackwardCFunction):  # as those of torch.distributed.rpc, which are C++
        return False
    backward = type(node)._forward_cls.backward  # type: ignore[attr-defined]
    while backward is not None:
        if getattr(backward, "__code__", None) is _ONCE:
            return True
        backward = getattr(backward, "__wrapped__", None)
    return False


def is_of_masked_tensor(node: Node) -> bool:
    """Ask whether a custom function belongs to ``torch.masked``."""
    return type(node)._forward_cls.__module__.startswith("torch.masked.")  # type: ignore[attr-defined]
