"""Products with the Jacobian of a recorded graph and with its transpose; of a gradient, with the Hessian."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

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


class TransposedProduct(NamedTuple):
    """The product of the transposed Jacobian of a graph with cotangents, as a function of these, with its graph.

    Attributes:
        cotangents: One leaf of zeros for each output, which requires grad where the output does.
        products: One for each input, in its shape; None where no output depends on it.
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
        """Multiply the Jacobian with tangents; takes and returns what :func:`graph_jvp` does.

        ``retain_graph`` keeps the recorded graph for further products; None is as ``create_graph``.
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

    :math:`J^\top u` is linear in :math:`u`, so this gradient is the same at every :math:`u`: it is the
    vector-Jacobian product of what is recorded here with :math:`v`.

    Args:
        outputs: Tensors with a graph, of any shapes.
        inputs: What to differentiate with respect to: tensors of that graph, or gradient edges.

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
    r"""Multiply the Jacobian of outputs with tangents, by two vector-Jacobian products.

    Args:
        outputs: Tensors with a graph, of any shapes; it is kept.
        inputs: What to differentiate with respect to: tensors of that graph, or gradient edges.
        tangents: One for each input, in its shape; None where it is zero.
        create_graph: Put the products on the tape.

    Returns:
        One product for each output, in its shape; None where it depends on no input that has a tangent.

    Example:
        >>> from metagrad.autograd.derivatives.graph_vjp import graph_jvp
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> graph_jvp([w**3, w.detach()], [w], [torch.tensor([1.0, 10.0])])
        [tensor([  3., 120.]), None]
    """
    return transposed_product(outputs, inputs).jvp(tangents, create_graph=create_graph)
