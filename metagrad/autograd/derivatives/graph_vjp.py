"""Products with the Jacobian of a recorded graph, and with its transpose. The Jacobian of a gradient is a Hessian."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

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

    Outputs that do not require grad, or that are None or have a cotangent of None, are omitted.

    Args:
        outputs: Tensors with a graph, of any shapes, or their gradient edges.
        inputs: The tensors of that graph, or the gradient edges, to differentiate with respect to.
        cotangents: One for each output, in its shape.
        batched: Take stacks ``[m, *shape]`` of cotangents, and return stacks.
        create_graph: Return differentiable products.
        retain_graph: Keep the graph for further products. The default is ``create_graph``.

    Returns:
        One product for each input, in its shape. None if no output depends on the input.

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


class TransposedProduct(NamedTuple):
    """The product of the transposed Jacobian of a graph with variable cotangents, with its graph.

    Attributes:
        cotangents: One leaf of zeros for each output, which requires grad where the output does.
        products: One for each input, in its shape. None if no output depends on the input.
    """

    cotangents: list[Tensor]
    products: list[Tensor | None]

    def jvp(
        self,
        tangents: Iterable[Tensor | None],
        *,
        create_graph: bool = False,
        retain_graph: bool | None = None,
    ) -> list[Tensor | None]:
        """Multiply the Jacobian by tangents, as :func:`graph_jvp` does.

        ``retain_graph`` keeps the recorded graph for further products. The default is ``create_graph``.
        """
        variables = [cotangent for cotangent in self.cotangents if cotangent.requires_grad]
        found = iter(
            graph_vjp(
                self.products, variables, tangents, create_graph=create_graph, retain_graph=retain_graph
            )
        )
        return [next(found) if cotangent.requires_grad else None for cotangent in self.cotangents]


def transposed_product(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor | GradientEdge]
) -> TransposedProduct:
    r"""Record the backward pass for cotangents that are variables, for products with the Jacobian itself.

    .. math:: J v = \nabla_u \langle J^\top u, v \rangle

    :math:`J^\top u` is linear in :math:`u`, so this gradient does not depend on :math:`u`. It is the vector-Jacobian
    product of the recorded graph with :math:`v`.

    Args:
        outputs: Tensors with a graph, of any shapes.
        inputs: The tensors of that graph, or the gradient edges, to differentiate with respect to.

    References:
        Townsend, "A new trick for calculating Jacobian vector products", 2017.
    """
    with torch.enable_grad():
        cotangents = [torch.zeros_like(z, requires_grad=z.requires_grad) for z in outputs]
        return TransposedProduct(cotangents, graph_vjp(outputs, inputs, cotangents, create_graph=True))


def graph_jvp(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor | GradientEdge],
    tangents: Iterable[Tensor | None],
    *,
    create_graph: bool = False,
) -> list[Tensor | None]:
    r"""Multiply the Jacobian of outputs by tangents, with two vector-Jacobian products.

    Args:
        outputs: Tensors with a graph, of any shapes. The graph is kept.
        inputs: The tensors of that graph, or the gradient edges, to differentiate with respect to.
        tangents: One for each input, in its shape. None stands for zero.
        create_graph: Return differentiable products.

    Returns:
        One product for each output, in its shape. None if the output depends on no input that has a tangent.

    Example:
        >>> from metagrad.autograd.derivatives.graph_vjp import graph_jvp
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> graph_jvp([w**3, w.detach()], [w], [torch.tensor([1.0, 10.0])])
        [tensor([  3., 120.]), None]
    """
    return transposed_product(outputs, inputs).jvp(tangents, create_graph=create_graph)
