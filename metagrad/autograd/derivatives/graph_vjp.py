"""Vector-Jacobian products of a recorded graph; of the graph of a gradient these are Hessian-vector products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


def graph_vjp(
    outputs: Iterable[Tensor | None],
    inputs: Sequence[Tensor | GradientEdge],
    cotangents: Iterable[Tensor | None],
    *,
    batched: bool = False,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> list[Tensor | None]:
    r"""Multiply cotangents with the transposed Jacobian of outputs.

    .. math:: \sum_o J_o^\top u_o, \qquad H v = J_g^\top v \text{ for a gradient } g

    Outputs that do not require grad, or are None, are left out, and so are those whose cotangent is None.

    Args:
        outputs: Tensors with a graph, of any shapes.
        inputs: What to differentiate with respect to: tensors of that graph, or gradient edges.
        cotangents: One for each output, in its shape.
        batched: Take stacks ``[m, *shape]`` of cotangents, and return stacks.
        create_graph: Put the products on the tape.
        retain_graph: Keep the graph for further products; None is as ``create_graph``.

    Returns:
        One product for each input, in its shape; None where no output depends on it.

    Example:
        >>> from metagrad.autograd.derivatives.graph_vjp import graph_vjp
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> graph_vjp([w**2, None], [w], [torch.ones(2), torch.ones(2)])
        [tensor([2., 4.])]
    """
    pairs = [
        (output, cotangent)
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if output is not None and cotangent is not None and output.requires_grad
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        inputs,  # type: ignore[reportArgumentType, reportCallIssue]
        [cotangent for _, cotangent in pairs],
        is_grads_batched=batched,
        create_graph=create_graph,
        retain_graph=retain_graph,
        allow_unused=True,
    )
    return list(found)
