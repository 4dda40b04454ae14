"""Walking the graph that autograd has recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node


def graph_nodes(roots: Iterable[Tensor], visited: set[Node] | None = None) -> Iterator[Node]:
    """Walk every node of the graph that leads to some tensors, each once.

    Args:
        roots: Where to begin.
        visited: Nodes not to enter; the nodes walked are added.
    """
    seen = set() if visited is None else visited
    stack = [node for tensor in roots if (node := tensor.grad_fn) is not None and node not in seen]
    seen.update(stack)
    while stack:
        node = stack.pop()
        yield node
        for successor, _ in node.next_functions:
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append(successor)
