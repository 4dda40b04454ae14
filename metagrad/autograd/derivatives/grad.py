"""Gradients of a scalar with respect to pytrees of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metagrad.autograd.checks.lint import refuse_defects
from metagrad.core._torch import gradients_or_none
from metagrad.core.checks import is_a
from metagrad.core.modules import is_freed, refuse_freed
from metagrad.core.tape import is_differentiated, is_transformed
from metagrad.core.tree import Tree, leaf_names, tree_flatten, tree_unflatten, zeros_for_none


def grad(
    loss: Tensor,
    params: Tree,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
    materialize_grads: bool = False,
) -> Tree:
    r"""Compute the gradient of a scalar with respect to a pytree of tensors.

    .. math:: g_k = \partial\, \mathrm{loss} / \partial\, \mathrm{params}_k

    Args:
        loss: A tensor with one element.
        params: A tensor that requires grad, or a nested dict, list, tuple or named tuple of such tensors.
        create_graph: Return gradients that can be differentiated again. Inside a transform such as
            ``torch.func.grad``, gradients are always differentiable.
        retain_graph: Keep the graph of the loss for another backward pass. The default is ``create_graph``.
        materialize_grads: Return zeros for parameters that the loss does not use, instead of raising.

    Returns:
        The gradients, as a pytree like ``params``. Each gradient has the shape of its parameter.

    Raises:
        ValueError: ``loss`` has more than one element, is complex or has no graph. A parameter does not require grad
            or is not used, and the message names it. With ``create_graph``, the gradients cannot be differentiated
            again: :func:`metagrad.autograd.lint` finds an incorrect or missing derivative of order 2. An incorrect
            derivative of order 3, as ``layer_norm`` has, raises when the gradient is differentiated with
            ``create_graph``. Dense gradients of sparse tensors do not raise.
        TypeError: A leaf of ``params`` is not a tensor.

    Example:
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> metagrad.grad((w**3).sum(), {"w": w})
        {'w': tensor([ 3., 12.])}
    """
    leaves, spec = tree_flatten(params)
    check_loss("grad(loss, params)", loss)
    check_params("grad(loss, params)", params, leaves)
    if not leaves:
        return tree_unflatten([], spec)
    if create_graph:
        refuse_defects("grad(loss, params, create_graph=True)", loss, leaves)
    create_graph = create_graph or is_differentiated()
    grads = gradients_or_none(
        loss,
        leaves,
        grad_outputs=torch.ones_like(loss),
        create_graph=create_graph,
        retain_graph=retain_graph,
        allow_unused=True,
    )
    if create_graph and any(map(is_freed, leaves)):
        names = leaf_names(params, "params")
        refuse_freed("grad(loss, params, create_graph=True)", dict(zip(names, leaves, strict=True)))
    unused = [index for index, gradient in enumerate(grads) if gradient is None]
    if unused and not materialize_grads:
        names = leaf_names(params, "params")
        raise ValueError(
            f"grad(loss, params): the loss does not depend on {', '.join(names[i] for i in unused)}. "
            "Leave it out of params, or pass materialize_grads=True to get zeros."
        )
    return tree_unflatten(zeros_for_none(grads, leaves), spec)


def check_loss(call: str, loss: Tensor) -> None:
    """Raise ``ValueError`` or ``TypeError`` unless ``loss`` is a real scalar with a graph."""
    if not is_a(loss, Tensor):
        raise TypeError(f"{call}: loss must be a tensor, got {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(
            f"{call}: loss must have one element, got shape {tuple(loss.shape)}. "
            "Reduce it first, for instance by .sum() or .mean()."
        )
    refuse_complex(call, loss)
    if not loss.requires_grad and is_transformed():
        raise ValueError(
            f"{call}: the loss has no graph inside a torch.func transform, which follows functions and not graphs. "
            "Call torch.func.grad or metagrad.hvp there, which take the loss as a function."
        )
    if not loss.requires_grad:
        raise ValueError(
            f"{call}: the loss has no graph: nothing it was computed from requires grad, "
            "or it was computed under torch.no_grad() or detached."
        )


def refuse_complex(call: str, loss: Tensor) -> None:
    """Raise ``ValueError`` if a loss is complex. Torch silently uses the real part if a cotangent is given."""
    if loss.is_complex():
        raise ValueError(
            f"{call}: the loss must be real, got {loss.dtype}; a complex number has no gradient to descend along. "
            "Take its absolute value, or its real part."
        )


def check_params(call: str, params: Tree, leaves: Sequence[object]) -> None:
    """Raise unless all leaves are tensors that require grad. The message names the leaf."""
    if all(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return
    for name, leaf in zip(leaf_names(params, "params"), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{call}: {name} must be a tensor, got {type(leaf).__name__}. Those of a model by name are "
                "dict(model.named_parameters())."
            )
        if not leaf.requires_grad:
            raise ValueError(
                f"{call}: {name} does not require grad. Call {name}.requires_grad_() before the "
                "loss is computed, or leave it out of params."
            )
