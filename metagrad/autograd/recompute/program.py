"""The vector-Jacobian product of a recorded call as a program: the operations that autograd ran for it, in order.

Such a program has the operations of the call itself and of its derivatives, without what only other results need. It
serves all calls of one signature, on whatever tensors these have.
"""

from __future__ import annotations

import functools
import operator
import re
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakTensorKeyDictionary

from metagrad.autograd.recompute.signature import kinds
from metagrad.autograd.recompute.simplify import FILLING, simplify
from metagrad.core import _torch
from metagrad.core.tree import tensors_in

aten: Any = torch.ops.aten
_BAKED = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.nondeterministic_seeded,
}
"""Tags of operations that draw random numbers, or whose results are numbers or have shapes that depend on values."""

_MOST_KEPT = 2**12
"""Entries of a constant beyond which it is computed again."""


class Program(NamedTuple):
    """The operations of a vector-Jacobian product.

    Attributes:
        run: Takes operands and cotangents; returns a cotangent for each tensor that is wanted, and the results that
            are compared with those of the call.
        unseen: The inputs that the cotangents depend on and these results do not.
    """

    run: Callable[..., tuple[list[Tensor | None], list[Tensor]]]
    unseen: frozenset[int]


class Programs:
    """The programs of calls of one signature.

    Attributes:
        num_calls: How many calls there were.
        known: The programs, by what is asked for and the kinds of the tensors; None if there is none.
        is_refused: Whether one would not have done the same again.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.known: dict[tuple[Any, ...], Program | None] = {}
        self.is_refused = False
        self._unseen: list[int] | None = None

    def watched(self, num_operands: int) -> tuple[int, ...]:
        """Return which operands of a call to fingerprint; all as long as no program is known."""
        if self._unseen is None:
            return tuple(range(num_operands))
        return tuple([index for index in self._unseen if index < num_operands])

    def add(self, key: tuple[Any, ...], program: Program | None) -> None:
        """Add what was traced."""
        self.known[key] = program
        if program is None:
            self.is_refused = True
        else:
            self._unseen = sorted({*program.unseen, *(self._unseen or ())})


@functools.lru_cache(maxsize=256)
def _programs_of(signature: Hashable) -> Programs:
    return Programs()


forget_programs = _programs_of.cache_clear
"""Forget all programs."""


def programs_of(signature: Hashable | None) -> Programs | None:
    """Return the programs of calls of a signature; None if it was not seen before."""
    if signature is None:
        return None
    programs = _programs_of(signature)
    programs.num_calls += 1
    return programs if programs.num_calls > 1 and not programs.is_refused else None


class Tracer(_torch.EagerDispatchMode):
    """Notes the operations below autograd, as a graph.

    Args:
        inputs: The tensors that may differ in another run.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.literals: dict[str, Tensor] = {}
        self.is_complete = True
        self._nodes = WeakTensorKeyDictionary()
        self._constants: dict[fx.Node, str] = {}
        for index, tensor in enumerate(inputs):
            self._name(tensor, self.graph.placeholder(f"input_{index}"))
        self._inputs = [(tensor, tensor._version) for tensor in inputs if not tensor.is_inference()]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with _torch.without_torch_function():
            result = func(*args, **kwargs)
            if self.is_complete:
                self.is_complete = self._note(func, args, kwargs, result)
        return result

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Note an operation; return whether it does the same whenever it is given tensors of the same kinds."""
        if function is aten.lift_fresh.default:  # a number or a list of numbers, which the journal has
            self._name(result, self._literal(result))
            return True
        operands, made = tensors_in((args, kwargs)), tensors_in(result)
        if not _repeats(function, operands, kwargs) or kinds(made) is None:
            return False
        if any(tensor not in self._nodes for tensor in operands):
            return False
        if function is aten.detach.default:
            self._nodes[result] = self._nodes[args[0]]
            return True
        handed = map_aggregate((args, kwargs), self._node_of)
        node = self.graph.call_function(function, *handed)
        if isinstance(result, Tensor):
            self._name(result, node)
            sources = node.all_input_nodes
            is_constant = bool(sources) and all(source in self._constants for source in sources)
            if (function in FILLING or is_constant) and result.numel() <= _MOST_KEPT:
                self._constants[node] = self._keep(result)
        elif isinstance(result, (list, tuple)):
            node.meta["val"] = None
            for index, item in enumerate(result):
                if isinstance(item, Tensor):
                    self._name(item, self.graph.call_function(operator.getitem, (node, index)))
        return True

    def _name(self, tensor: Tensor, node: fx.Node) -> None:
        """Note that a node computes a tensor, and what kind of tensor that is."""
        self._nodes[tensor] = node
        node.meta["val"] = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )

    def _keep(self, tensor: Tensor) -> str:
        name = f"literal_{len(self.literals)}"
        self.literals[name] = tensor.clone()
        return name

    def _node_of(self, value: Any) -> Any:
        return self._nodes[value] if isinstance(value, Tensor) else value

    def _literal(self, tensor: Tensor) -> fx.Node:
        # It may be written into.
        return self.graph.call_function(aten.clone.default, (self.graph.get_attr(self._keep(tensor)),))

    def program(self, grads: Sequence[Tensor | None], results: Sequence[Tensor]) -> Program | None:
        """Return the program of what was noted; None if it would not do the same again."""
        leaving = [tensor for tensor in (*grads, *results) if tensor is not None]
        is_written = any(tensor._version != version for tensor, version in self._inputs)
        if not self.is_complete or is_written or any(tensor not in self._nodes for tensor in leaving):
            return None
        cotangents, compared = list(map(self._node_of, grads)), list(map(self._node_of, results))
        self.graph.output((cotangents, compared))
        self.graph.eliminate_dead_code()
        # What operations write into, others may read.
        writing = [node for node in self.graph.nodes if node.op == "call_function" and node.is_impure()]
        if not writing:
            simplify(self.graph, self._constants)
            *_, output = self.graph.nodes
            cotangents, compared = output.args[0]
        unseen = _read_by(self.graph, [*cotangents, *writing]) - _read_by(self.graph, compared)
        return Program(_compiled(self.graph, self.literals), unseen)


def _compiled(graph: fx.Graph, literals: dict[str, Tensor]) -> Callable[..., Any]:
    """Return a graph as a Python function, which frees every tensor after its last use."""
    code = graph.python_code("self")
    names: dict[str, Any] = dict(code.globals)

    def without_overload(match: re.Match[str]) -> str:
        name = "_".join(("kernel", *match.groups()))
        names[name] = _torch.kernel_of(getattr(getattr(aten, match[1]), match[2]))
        return f"{name}("

    exec(re.sub(r"torch\.ops\.aten\.(\w+)\.(\w+)\(", without_overload, code.src), names)
    return functools.partial(names["forward"], types.SimpleNamespace(**literals))


def _read_by(graph: fx.Graph, results: Sequence[fx.Node | None]) -> frozenset[int]:
    """Return the inputs of a graph that some results depend on, by their positions."""
    read, waiting = set(results), [node for node in results if node is not None]
    while waiting:
        sources = [source for source in waiting.pop().all_input_nodes if source not in read]
        read.update(sources)
        waiting += sources
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return frozenset(index for index, node in enumerate(inputs) if node in read)


def _repeats(function: Any, operands: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Say whether an operation is a function of its operands whose results have the same kinds each time."""
    if function.namespace != "aten" or kwargs.get("generator") is not None:
        return False
    if function is aten.index.Tensor:
        return all(tensor.dtype not in (torch.bool, torch.uint8) for tensor in operands[1:])
    return _BAKED.isdisjoint(function.tags)
