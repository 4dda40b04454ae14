"""A backend of torch.compile that records the graphs that run, so that a loop can call them directly.

Before torch.compile runs compiled code, its guards check everything that the function has read: a tenth of a
millisecond for a step of MAML, whose kernels may take less. Between two steps of a loop only the tensors of the state
change, and those keep their shapes, dtypes and layouts. So one step is called by torch.compile, and the others call
the graph that it ran.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from metagrad.autograd.compile import pooling, products, writes
from metagrad.autograd.compile.kernels import sharing_files
from metagrad.autograd.compile.pooling import max_gradient, mean_gradient
from metagrad.core import _torch_compiler
from metagrad.core.tree import Structure, Tree, dissect, tensors_in

Graph = Callable[..., Sequence[Tensor]]


class GraphCall(NamedTuple):
    """The inputs and outputs of one call of a graph."""

    graph: Graph
    inputs: tuple[object, ...]
    outputs: Sequence[Tensor]


class _Noted(threading.local):
    """The calls of graphs in this thread, while they are being recorded."""

    calls: list[GraphCall] | None = None


_noted = _Noted()


@contextlib.contextmanager
def noting() -> Generator[list[GraphCall]]:
    """Note the calls of graphs; an enclosing ``noting`` gets them as well."""
    before, calls = _noted.calls, []
    _noted.calls = calls
    try:
        yield calls
    finally:
        if before is not None:
            before.extend(calls)
        _noted.calls = before


def _noted_call(graph: Graph, *inputs: object) -> Sequence[Tensor]:
    return _note(graph, inputs, graph(*inputs))


def _note(graph: Graph, inputs: Sequence[object], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    if _noted.calls is not None:
        _noted.calls.append(GraphCall(graph, tuple(inputs), outputs))
    return outputs


class _WithSizes(NamedTuple):
    """A graph some of whose inputs are sizes of others, as a function of the others.

    Attributes:
        graph: The graph.
        sizes: The places of these inputs, of the tensors whose sizes they are, and the axes.
    """

    graph: Graph
    sizes: dict[int, tuple[int, int]]

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        """Call the graph."""
        others = iter(inputs)
        given: list[Any] = [
            None if place in self.sizes else next(others) for place in range(len(inputs) + len(self.sizes))
        ]
        for place, (tensor, axis) in self.sizes.items():
            given[place] = given[tensor].shape[axis]
        return self.graph(*given)

    def noted(self, *inputs: object) -> Sequence[Tensor]:
        """Call the graph with the sizes among the inputs, and note the call without them."""
        others = [value for place, value in enumerate(inputs) if place not in self.sizes]
        return _note(self, others, self.graph(*inputs))


class Backend:
    """A backend of torch.compile whose graphs are noted as they run.

    Args:
        backend: Whose graphs, as torch.compile takes it, and likewise the rest.
        mode: What inductor is to spend its time on.
        options: Of the backend.
        dynamic: Whether sizes may vary.
    """

    def __init__(
        self,
        backend: str | Callable[..., Graph] = "inductor",
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        dynamic: bool | None = None,
    ) -> None:
        self.compile: Callable[..., Any]
        self.compile_for_cpu: Callable[..., Any]
        if backend == "inductor":
            inductor = functools.partial(_torch_compiler.inductor_backend, mode, dynamic, sharing_files)
            common, gradients = {**_corrections(), **(options or {})}, _right_gradients()
            self.compile = inductor(common, gradients)
            self.compile_for_cpu = inductor(
                {**_options_for_cpu(), **common}, {**gradients, **_gradients_for_cpu()}
            )
            _torch_compiler.prepare_compiler()
        else:
            self.compile = _torch_compiler.other_backend(backend, mode, dict(options or {}), dynamic)
            self.compile_for_cpu = self.compile

    def __call__(self, module: fx.GraphModule, examples: list[Tensor]) -> Graph:
        """Compile a graph that Dynamo has made."""
        sizes = _torch_compiler.size_inputs(module)
        graph = self.compiled(module, examples)
        if _torch_compiler.changes_objects():
            return graph
        return _WithSizes(graph, sizes).noted if sizes else functools.partial(_noted_call, graph)

    def compiled(self, module: fx.GraphModule, examples: list[Tensor]) -> Graph:
        """Compile a graph."""
        devices = {tensor.device.type for tensor in examples if isinstance(tensor, Tensor)}
        return (self.compile_for_cpu if devices == {"cpu"} else self.compile)(module, examples)


def _corrections() -> dict[str, Any]:
    """Return the options that keep inductor from wrong results; the files are part of the keys of its caches."""
    files = writes.__file__, products.__file__, pooling.__file__
    return {"post_grad_custom_pre_pass": _torch_compiler.graph_pass(writes.separate_entries, *files)}


def _right_gradients() -> dict[Any, Callable[..., Any]]:
    """Return gradients in place of those that inductor has wrong."""
    aten = torch.ops.aten
    return dict.fromkeys((aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default), mean_gradient)


def _gradients_for_cpu() -> dict[Any, Callable[..., Any]]:
    """Return gradients in place of those that inductor has slow on CPUs."""
    return {torch.ops.aten.max_pool2d_with_indices_backward.default: max_gradient}


def _options_for_cpu() -> dict[str, Any]:
    """Return the defaults of inductor on CPUs.

    Without the layout it runs all convolutions of a graph that has no tape with the channels last, which takes 1.4
    times as long for the query loss of a Conv4 and its gradient: with one input channel, the first convolution is
    slow.
    """
    ours = _torch_compiler.graph_pass(products.transpose_in, products.__file__)
    return {"post_grad_custom_post_pass": ours, "layout_optimization": False}


class Repeated:
    """The calls of a function by a loop, where the function is one call of compiled code."""

    def __init__(self) -> None:
        self.graph: PlacedGraph | None = None

    def __call__(self, function: Callable[..., list[Tensor]], *groups: list[Tensor]) -> list[Tensor]:
        """Call the function of lists or, once its graph is known, the graph."""
        tensors = [tensor for group in groups for tensor in group]
        if len(set(map(id, tensors))) < len(tensors):
            return function(*groups)
        if self.graph is not None:
            return self.graph(tensors)
        with noting() as calls:
            results = function(*groups)
        self.graph = _placed(calls[0], tensors, results) if len(calls) == 1 else None
        return results


class PlacedGraph(NamedTuple):
    """A graph as a function of a list of tensors.

    Attributes:
        graph: The graph.
        constants: Its inputs that are not among the tensors.
        inputs: Where its inputs are, in the tensors followed by the constants.
        results: Where the results are, in the outputs followed by the tensors.
    """

    graph: Graph
    constants: list[object]
    inputs: list[int]
    results: list[int]

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """Call the graph."""
        given: list[Any] = [*tensors, *self.constants] if self.constants else tensors
        outputs = _noted_call(self.graph, *map(given.__getitem__, self.inputs))
        return list(map([*outputs, *tensors].__getitem__, self.results))


def _placed(call: GraphCall, tensors: list[Tensor], results: list[Tensor]) -> PlacedGraph | None:
    """Identify the inputs and outputs of a graph among tensors; None if the function is more than the graph."""
    among = {id(tensor) for tensor in tensors}
    constants = [value for value in call.inputs if id(value) not in among]
    places = {id(value): place for place, value in enumerate((*tensors, *constants))}
    found = {id(value): place for place, value in enumerate((*call.outputs, *tensors))}
    if any(id(result) not in found for result in results):
        return None
    inputs = [places[id(value)] for value in call.inputs]
    return PlacedGraph(call.graph, constants, inputs, [found[id(result)] for result in results])


class KeptCall(NamedTuple):
    """A call of compiled code as a call of its graph.

    Attributes:
        graph: The graph, as a function of the tensors among the arguments.
        structure: Of what the code returns.
        shares: Whether its tensors have memory in common, with each other or with the arguments.
        code: The code.
    """

    graph: PlacedGraph
    structure: Structure
    shares: bool
    code: object

    def __call__(self, args: tuple[Any, ...]) -> Tree:
        """Return what the code returns for other arguments, for which its guards pass."""
        return self.structure.fill(self.graph(tensors_in(args)))


def kept_call(call: GraphCall, args: tuple[Any, ...], result: Tree, code: object) -> KeptCall | None:
    """Return what calls the graph of code; None unless it takes and returns nothing but tensors among the arguments.

    What else it takes was read from elsewhere, such as a buffer of a module, and must be read again.
    """
    tensors = tensors_in(args)
    if len(set(map(id, tensors))) < len(tensors):
        return None
    results, structure = dissect(result)
    placed = _placed(call, tensors, results)
    if placed is None or placed.constants:
        return None
    return KeptCall(placed, structure, _share_memory(tensors, results), code)


def _share_memory(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    """Say whether results have memory in common, with each other or with other tensors."""
    given, made = ({t.untyped_storage().data_ptr() for t in group} for group in (tensors, results))
    return len(made) < len(results) or not made.isdisjoint(given)
