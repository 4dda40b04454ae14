"""Compiled functions that keep their graphs for the first derivative, and run eagerly for higher ones.

torch refuses to differentiate the backward of compiled code, so a derivative that is to be differentiated again is
taken of the eager function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from metagrad.autograd.compile.compiled import operand
from metagrad.autograd.derivatives.graph_vjp import graph_vjp
from metagrad.autograd.recompute.checkpoint import Backward, TensorFunction, attached
from metagrad.core import _torch
from metagrad.core.tree import is_differentiable


def held(
    run: Callable[[list[Tensor]], Sequence[Tensor]], eager: TensorFunction, tensors: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Call a function of compiled pieces, keeping their graphs, so that its derivatives of every order are right.

    Args:
        run: The function; it is handed leaves.
        eager: The same, not compiled.
        tensors: What to differentiate with respect to.
    """
    inputs = [operand(tensor, tensor.requires_grad) for tensor in tensors]
    with torch.enable_grad():
        outputs = run(inputs)

    def pull(backward: Backward) -> Sequence[Tensor | None]:
        wanted = [tensor for tensor, need in zip(inputs, backward.needed, strict=True) if need]
        # Kept as long as the graph that is being walked. Under its default setting torch 2.13 refuses to keep one if
        # another was walked before it that was not kept, although its code was compiled to donate no buffers.
        keeps = _torch.keeps_graph()
        with _torch.functorch_config.patch(donated_buffer=False) if keeps else contextlib.nullcontext():
            grads = iter(graph_vjp(outputs, wanted, backward.cotangents, retain_graph=keeps))
        return [next(grads) if need else None for need in backward.needed]

    return attached(eager, tensors, outputs, pull=pull)


def rooted(tensor: Tensor) -> Tensor:
    """Return a tensor with a graph, if its dtype can have one: torch.compile tells it from a leaf."""
    if tensor.grad_fn is not None or not is_differentiable(tensor):
        return tensor
    return (tensor if tensor.requires_grad else tensor.detach().requires_grad_()).clone()
