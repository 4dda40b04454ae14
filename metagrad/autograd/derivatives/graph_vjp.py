"""Products with the Jacobian of a recorded graph, and with its transpose. The Jacobian of a gradient is a Hessian."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


def graph_vjp(
    outputs: Iterable[Tensor | GradientEdge | None],
    inputs: Sequence[Tensor | GradientEdge],
    cotangents: Iterable[Tensor | None],
    *,
    batched: bool = False,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> list[Tensor | None]:
    r"""Multiply the transposed Jacobian of outputs by cotangents.

    .. math:: \sum_o J_o^\top u_o, \qquad H v = J_g^\top v \text{ for a gradient } g

    Outputs are omitted if they do not require grad, are None, or have a cotangent of None.

    Args:
        outputs: Tensors with a graph, of any shapes, or their gradient edges.
        inputs: The tensors of that graph, or the gradient edges, to differentiate with respect to.
        cotangents: One cotangent for each output, in the shape of the output.
        batched: Take stacks ``[m, *shape]`` of cotangents, and return stacks.
        create_graph: Return differentiable products.
        retain_graph: Keep the graph for further products. The default is ``create_graph``.

    Returns:
        One product for each input, in the shape of the input. None if no output depends on the input.

    Example:
        >>> from metagrad.autograd.derivatives.graph_vjp import graph_vjp
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> graph_vjp([w**2, None], [w], [torch.ones(2), torch.ones(2)])
        [tensor([2., 4.])]
    """
    pairs = [
        (output, cotangent)
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if output is not None
        and cotangent is not None
        and (isinstance(output, GradientEdge) or output.requires_grad)
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    found = torch.autograd.grad(
        [output for output, _ in pairs],  # type: ignore[reportArgumentType, reportCallIssue]
        inputs,  # type: ignore[reportArgumentType, reportCallIssue]
        [cotangent for _, cotangent in pairs],
        is_grads_batched=batched,
        create_graph=create_graph,
        retain_graph=retain_graph,
        allow_unused=True,
    )
    return list(found)
