"""Gradients of a scalar with respect to trees of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import Node

from metagrad._tree import Tree, leaf_names, tree_flatten, tree_unflatten

# Backward nodes of torch that return a gradient without its graph (torch 2.13): the gradient of a sparse
# tensor's values is read by `_values()`, which detaches.
CUTTING_NODES = {
    "SparseCooTensorWithDimsAndTensorsBackward": "torch.sparse_coo_tensor(indices, values)",
    "SparseCompressedTensorBackward": "torch.sparse_csr_tensor and its relatives",
    "ValuesBackward": "Tensor.values()",
}


def grad(
    loss: Tensor,
    params: Tree,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
    materialize_grads: bool = False,
) -> Tree:
    r"""Compute the gradient of a scalar with respect to a tree of tensors.

    .. math:: g_k = \partial\, \mathrm{loss} / \partial\, \mathrm{params}_k

    Args:
        loss: A tensor with one element.
        params: A dict, list, tuple or named tuple (nested as you like) of tensors that require grad, or one.
        create_graph: Keep the gradient on the tape, so that it can be differentiated again.
        retain_graph: Keep the loss's graph for another backward pass; by default as ``create_graph`` says.
        materialize_grads: Return zeros for parameters that the loss does not use, instead of an error.

    Returns:
        The gradients, in the same tree as ``params``; each has the shape of its parameter.

    Raises:
        ValueError: ``loss`` has more than one element or no graph; a parameter does not require grad or is
            not used (each is named by its key); or, with ``create_graph``, a node of the graph would
            return gradients that cannot be differentiated again.
        TypeError: A leaf of ``params`` is not a tensor.

    Example:
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> metagrad.grad((w**3).sum(), {"w": w})
        {'w': tensor([ 3., 12.])}
    """
    leaves, spec = tree_flatten(params)
    _check_loss(loss)
    _check_params(params, leaves)
    if not leaves:
        return tree_unflatten([], spec)
    grads = torch.autograd.grad(
        loss,
        leaves,
        grad_outputs=torch.ones_like(loss),
        create_graph=create_graph,
        retain_graph=retain_graph,
        allow_unused=True,
    )
    unused = [index for index, gradient in enumerate(grads) if gradient is None]
    if unused and not materialize_grads:
        names = leaf_names(params, "params")
        raise ValueError(
            f"grad(loss, params): the loss does not depend on {', '.join(names[i] for i in unused)}. "
            "Leave it out of params, or pass materialize_grads=True to get zeros."
        )
    if create_graph:
        _refuse_cuts(loss, leaves)
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, leaves, strict=True)]
    return tree_unflatten(filled, spec)


def graph_nodes(roots: Iterable[Tensor], visited: set[Node] | None = None) -> Iterator[Node]:
    """Walk every node of the graph behind some tensors, each once.

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


def _check_loss(loss: Tensor) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"grad(loss, params): loss must be a tensor, got {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(
            f"grad(loss, params): loss must have one element, got shape {tuple(loss.shape)}. "
            "Reduce it first, for instance by .sum() or .mean()."
        )
    if not loss.requires_grad:
        raise ValueError(
            "grad(loss, params): the loss has no graph: nothing it was computed from requires grad, "
            "or it was computed under torch.no_grad() or detached."
        )


def _check_params(params: Tree, leaves: list[Tensor]) -> None:
    if all(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return
    for name, leaf in zip(leaf_names(params, "params"), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"grad(loss, params): {name} must be a tensor, got {type(leaf).__name__}.")
        if not leaf.requires_grad:
            raise ValueError(
                f"grad(loss, params): {name} does not require grad. Call {name}.requires_grad_() before the "
                "loss is computed, or leave it out of params."
            )


def _refuse_cuts(loss: Tensor, params: list[Tensor]) -> None:
    # The walk ends at the parameters: in an unrolled loop the steps before lie behind them.
    behind = {node for param in params if (node := param.grad_fn) is not None}
    for node in graph_nodes([loss], behind):
        source = CUTTING_NODES.get(node.name().rstrip("0123456789"))
        if source is not None:
            raise ValueError(
                f"grad(loss, params, create_graph=True): {source} ({node.name()}) is in the graph of the loss, "
                "and its backward returns gradients without a graph: differentiating them again would "
                "silently leave terms out. Compute with the values themselves (gather and index_add) instead."
            )
