"""The autograd graph: its nodes, and queries about active torch.func transforms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node

from metagrad.core import _torch


def graph_nodes(roots: Iterable[Tensor], visited: set[Node] | None = None) -> Iterator[Node]:
    """Yield each node of the autograd graph of some tensors once.

    Args:
        roots: Tensors where the walk starts.
        visited: Nodes to skip. The walk adds its nodes to this set.
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
    """Return whether a torch.func transform is active."""
    return _torch.functorch_is_active()


def refuse_transforms(call: str) -> None:
    """Raise ``ValueError`` if a torch.func transform is active."""
    if is_transformed():
        raise ValueError(
            f"{call}: inside a torch.func transform there is no autograd graph. Call it outside, and differentiate "
            "its result by backward() or torch.autograd.grad."
        )


def is_differentiated() -> bool:
    """Return whether a differentiating transform is active, which silently gives constants a derivative of zero."""
    return is_transformed() and any(kind != _torch.TransformType.Vmap for kind in _kinds())


def is_on_the_tape(tensors: list[Tensor]) -> bool:
    """Return whether only reverse mode is active, and its innermost level differentiates all of the tensors."""
    innermost = max((interpreter.level() for interpreter in _torch.get_interpreter_stack() or ()), default=-1)
    return all(kind == _torch.TransformType.Grad for kind in _kinds()) and all(
        tensor.requires_grad and _torch.functorch_level_of(tensor) == innermost for tensor in tensors
    )


def _kinds() -> list[_torch.TransformType]:
    return [interpreter.key() for interpreter in _torch.get_interpreter_stack() or ()]
