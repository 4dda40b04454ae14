"""Compiled linear maps: what does not depend on the vector is computed once, and the rest is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from metagrad.autograd.compile.backend import Backend
from metagrad.autograd.compile.compiled import compiler_warnings_ignored
from metagrad.autograd.derivatives.hvp import lacks_forward_derivative
from metagrad.core._torch_compiler import trace
from metagrad.core.capture import forward_mode

Vectors = list[Tensor]


class CompiledLinearMap:
    """A map of vectors that is linear at a point, as a product with a Hessian is.

    The map is traced once, with operations of its derivatives in the graph. All that depends on the point alone is
    computed then and kept; each call computes the rest, by one compiled graph.

    Args:
        function: ``function(point, vector)``, lists of tensors, linear in the second. What it reads otherwise is
            constant.
        point: Where.
        vector: Of the shapes of vectors.
        options: Of torch.compile.
    """

    def __init__(
        self,
        function: Callable[[Vectors, Vectors], Vectors],
        point: Vectors,
        vector: Vectors,
        options: Mapping[str, Any],
    ) -> None:
        with compiler_warnings_ignored():
            constant, linear = split_linear(trace(function, point, vector), len(point))
        with _as_traced(point), compiler_warnings_ignored():
            self.kept = [_materialized(value) for value in constant(*point)]
            self.graph = Backend(**options).compiled(linear, [*self.kept, *vector])

    def __call__(self, vector: Vectors) -> Vectors:
        """Apply the map, without a tape."""
        with _as_traced(vector):
            return list(self.graph(*self.kept, *vector))


@contextlib.contextmanager
def _as_traced(tensors: Vectors) -> Generator[None, None, None]:
    """Keep no tape, and cast nothing: the casts are in the graph."""
    with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
        yield


def compiled_hvp(
    loss_at: Callable[[Vectors], Tensor], point: Vectors, *, forward_only: bool, options: Mapping[str, Any]
) -> CompiledLinearMap:
    """Compile products with the Hessian of a loss at a point.

    They are forward over reverse, whose convolutions are those of a training step (the second derivative of a
    convolution in reverse mode takes others, up to twice as slow); or, unless ``forward_only``, reverse over reverse
    where an operation has no forward derivative.
    """

    def forward(at: Vectors, vector: Vectors) -> Vectors:
        with forward_mode():
            return torch.func.jvp(torch.func.grad(loss_at), (at,), (vector,))[1]

    def reverse(at: Vectors, vector: Vectors) -> Vectors:
        return torch.func.vjp(torch.func.grad(loss_at), at)[1](vector)[0]

    vector = [torch.zeros_like(part, memory_format=torch.contiguous_format) for part in point]
    try:
        return CompiledLinearMap(forward, point, vector, options)
    except RuntimeError as error:
        if forward_only or not lacks_forward_derivative(error):
            raise
    return CompiledLinearMap(reverse, point, vector, options)


def split_linear(module: fx.GraphModule, num_constant: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a graph by whether a node depends on inputs after the first ones.

    Returns:
        A graph of the first inputs, and one of its outputs and the other inputs, with the outputs of the whole.
    """
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    inputs = [node for node in nodes if node.op == "placeholder"]
    variable = set(inputs[num_constant:])
    for node in nodes:
        if not variable.isdisjoint(node.all_input_nodes):
            variable.add(node)
    results: list[Any] = list(module.graph.output_node().args[0])  # type: ignore[reportArgumentType]
    read = {source for node in variable for source in node.all_input_nodes}
    read.update(result for result in results if isinstance(result, fx.Node))
    kept = [node for node in nodes if node not in variable and node in read]
    constant = [node for node in nodes if node not in variable]
    return (
        _graph(module, inputs[:num_constant], constant, kept),
        _graph(module, kept + inputs[num_constant:], [node for node in nodes if node in variable], results),
    )


def _graph(
    module: fx.GraphModule, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    """Copy some nodes of a module's graph into one of their own."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in results])
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)


def _materialized(value: Tensor) -> Tensor:
    """Return a tensor whose numbers are in memory: zeros of forward mode are not."""
    return value.clone() if value._is_zerotensor() else value
