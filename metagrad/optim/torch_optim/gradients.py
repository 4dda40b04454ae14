"""Gradients that keep their graph for as long as curvature is computed, and leave none behind in ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from metagrad.core.graph import graph_nodes
from metagrad.curvature.likelihoods.recognition import KNOWN_LOSSES, Evaluated, evaluate
from metagrad.sparse.tables.row_sparse import RowSparse


class Recording(TorchFunctionMode):
    """For the duration of a closure, hands ``Tensor.backward`` to somebody else, and notes the losses computed.

    Args:
        backward: Called as ``backward(loss, gradient, retain_graph, create_graph, inputs)``.
        note_losses: Whether calls of losses of known form are noted, which holds their graphs.

    Attributes:
        losses: What was noted.
    """

    def __init__(self, backward: Any, *, note_losses: bool) -> None:
        super().__init__()
        self._backward = backward
        self._note_losses = note_losses
        self.losses: list[Evaluated] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        if self._note_losses and func in KNOWN_LOSSES:
            return self._noted(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _noted(self, func: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.is_leaf:
            input = input.view_as(input)  # a parameter itself would have no place of its own in the graph
        evaluated = evaluate(lambda output, _: func(output, *args, **kwargs), input, ())
        if evaluated.known is not None:
            self.losses.append(evaluated)
        return evaluated.value


def leaves_behind(loss: Tensor) -> list[Tensor]:
    """Find every tensor whose ``.grad`` a backward pass of a loss would write."""
    if loss.grad_fn is None:
        return [loss]
    nodes = graph_nodes([loss])
    return [node.variable for node in nodes if type(node).__name__ == "AccumulateGrad"]  # type: ignore[attr-defined]


def accumulate(leaf: Tensor, gradient: Tensor) -> None:
    """Add a gradient to ``.grad`` as a backward pass does, by its values alone."""
    gradient = gradient.detach()
    is_strided = gradient.layout == torch.strided and not isinstance(gradient, RowSparse)
    if leaf.grad is None:
        # Two leaves may have been given the same tensor, and the graph may hold it: .grad is a copy.
        leaf.grad = torch.empty_like(leaf).copy_(gradient) if is_strided else gradient.clone()
    elif is_strided:
        leaf.grad.add_(gradient)
    else:
        leaf.grad = leaf.grad + gradient
    hooks: dict[int, Any] | None = getattr(leaf, "_post_accumulate_grad_hooks", None)
    for hook in (hooks or {}).values():
        hook(leaf)


def weights_of(loss: Tensor, gradient: Tensor | None, parts: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the derivative of a loss with respect to its parts; None of those that it does not contain."""
    if not parts:
        return ()
    return torch.autograd.grad(loss, parts, gradient, retain_graph=True, allow_unused=True)


def unknown_loss(name: str) -> str:
    """Say to the user of an optimizer that none of the losses noted has a known form."""
    *others, last = (f"F.{function.__name__}" for function in KNOWN_LOSSES)
    return (
        f"{name}: the loss contains none whose curvature in the output is known. Compute it inside the closure, or "
        f"within `with opt.recording():`, by {', '.join(others)} or {last}, reduced to a mean or a sum; "
        "residuals r by F.mse_loss(r, torch.zeros_like(r)), or a likelihood written by hand by "
        "opt.output_loss(loss_fn, output), of which GaussNewton takes the Hessian."
    )
