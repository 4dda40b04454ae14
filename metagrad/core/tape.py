"""The tape: its nodes, and whether derivatives are taken on it or by transforms of torch.func around a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node

from metagrad.core import _torch


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


def is_transformed() -> bool:
    """Say whether a torch.func transform is active."""
    return _torch.functorch_is_active()


def is_differentiated() -> bool:
    """Say whether a transform is active that differentiates: a constant would silently have a derivative of zero."""
    return is_transformed() and any(kind != _torch.TransformType.Vmap for kind in _kinds())


def is_on_the_tape(tensors: list[Tensor]) -> bool:
    """Say whether reverse mode is all that is active, and its innermost level differentiates all of the tensors."""
    return all(kind == _torch.TransformType.Grad for kind in _kinds()) and all(
        tensor.requires_grad and _torch.functorch_level_of(tensor) == _torch.functorch_level()
        for tensor in tensors
    )


def _kinds() -> list[_torch.TransformType]:
    return [interpreter.key() for interpreter in _torch.get_interpreter_stack() or ()]
