"""One call of a function, recorded so that it can be run again on other values of what it read.

A :class:`Call` remembers, at call time, everything that can differ later: the arguments, the tensors that the
function read without being handed them (:mod:`metagrad.core.reach`), the modules (:mod:`metagrad.core.modules`),
random numbers, autocast and flags (:mod:`metagrad.core.capture`), and function modes (:mod:`metagrad.core.dispatch`).
The second run has all of these as the first one had them, and its results are compared with those of the first.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from metagrad.autograd.recompute.fingerprint import Fingerprint, are_equal, difference, is_deterministic
from metagrad.core.capture import AutocastState, Flags, RandomState, restored
from metagrad.core.dispatch import DispatchState
from metagrad.core.modules import ModuleSnapshot, check_substitutable, content_of, is_as_it_was
from metagrad.core.reach import Place, Reached, placed
from metagrad.core.tree import Structure, Tree, dissect, fresh_leaf, plain_values

Edge: TypeAlias = "tuple[Node, int]"
"""A node, and which of its inputs: what a tensor with a graph is known by."""

REPEAT = (
    "It must do the same again: depend on its arguments, on the tensors that it reads, on the random numbers of "
    "torch, NumPy and Python, and on the attributes of its modules alone."
)


class Recording(NamedTuple):
    """A call that was made.

    Attributes:
        call: The call, as a function of ``tensors``.
        tensors: What it can be differentiated with respect to: the tensors among its arguments, then the other
            tensors that it read and that require grad.
        outputs: The tensors it returned, each a fresh leaf whose ``requires_grad`` says if it had a graph.
        structure: Where these stand in the returned tree.
    """

    call: Call
    tensors: list[Tensor]
    outputs: list[Tensor]
    structure: Structure


class Found(NamedTuple):
    """A tensor that a call could read without being handed it."""

    place: Place
    tensor: Tensor
    content: Tensor | int | None


class Call:
    """A recorded call, as a function of a flat list of tensors that can be run any number of times.

    Attributes:
        fn: The function.
        name: How errors name the call.
        leaves: By the number of an operand: the leaf that the operand was in the first run.
        differentiated: Which operands required grad.
    """

    def __init__(
        self, fn: Callable[..., Tree], name: str, given: list[Tensor], arguments: Structure, reached: Reached
    ) -> None:
        self.fn, self.name, self.arguments = fn, name, arguments
        first = {id(tensor): index for index, tensor in reversed(list(enumerate(given)))}
        self.handed = [first[id(tensor)] for tensor in given]
        self.numbers: list[int | None] = []
        self.leaves: dict[int, Tensor] = {}
        self.differentiated: list[bool] = []
        self.written: set[int] = set()
        self.cells = [(Place(cell, "cell_contents"), cell.cell_contents) for cell in reached.cells]
        kept = reached.contents
        self.found = [
            Found(place, t, content_of(t, kept if t.is_cpu else None)) for place, t in reached.tensors
        ]
        self.random = RandomState(reached.generators, reached.libraries)
        self.surroundings = Flags(), AutocastState(), self.random, DispatchState()
        self.modules = ModuleSnapshot(reached.modules, reached.contents)
        self.graph: Graph | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the function again, on other tensors, and compare."""
        args, kwargs = self.arguments.fill([tensors[i] for i in self.handed])
        with self._set_up(tensors):
            outputs, _ = dissect(self.fn(*args, **kwargs))
        is_whole = [tensor.requires_grad for tensor in tensors] == self.differentiated
        assert self.graph is not None
        found = self.graph.difference(outputs, _edges(tensors) if is_whole else None)
        if found is not None:
            raise RuntimeError(
                f"{self.name}: the function did not repeat when it was recomputed: {found}. {REPEAT}"
            )
        return outputs

    def close(
        self, given: list[Tensor], outputs: list[Tensor], reached: Reached, num_kept: int
    ) -> list[Tensor]:
        """End the record, and drop the graph of ``outputs``; return the tensors that were read besides ``given``."""
        self.random.close()
        # The state of NumPy and Python takes long to read. A later call of a loop that is the first to draw from them
        # does not repeat, which is an error.
        reached.libraries = {g.library for g, _ in self.random.states} | (reached.libraries or set())
        self._note_writes()
        tensors = [*(found.tensor for found in self.found), *given]
        known = _edges(tensors)
        walk = _walk(outputs, known)
        self.graph = Graph(walk, outputs, num_kept)
        read = [known[edge] for edge in walk.crossed]
        hidden = [weakref.ref(leaf) for leaf in walk.leaves]
        outputs.clear()
        del walk
        # Leaves that the function made itself are gone with the graph.
        read += [leaf for reference in hidden if (leaf := reference()) is not None]
        own = set(map(id, given))
        read = list({id(t): t for t in read if id(t) not in own}.values())
        numbers = {id(t): i for i, t in reversed(list(enumerate([*given, *read])))}
        self.numbers = [numbers.get(id(found.tensor)) for found in self.found]
        self.leaves = {i: t for i, t in enumerate([*given, *read]) if t.requires_grad and t.is_leaf}
        self.differentiated = [t.requires_grad for t in (*given, *read)]
        return read

    @contextlib.contextmanager
    def _set_up(self, tensors: Sequence[Tensor]) -> Generator[None]:
        """Set up what was around the call, with other tensors for the operands that it finds there."""
        copies: dict[int, Tensor] = {}
        values = [
            (found.place, self._again(found, copies) if number is None else tensors[number])
            for found, number in zip(self.found, self.numbers, strict=True)
        ]
        with (
            restored(*self.surroundings),
            self.modules.restored(self.name),
            placed([*self.cells, *values]),
        ):
            yield

    def _again(self, found: Found, copies: dict[int, Tensor]) -> Tensor:
        """Return a constant as the call found it: a copy if it has changed since, or if the call writes into it."""
        key = id(found.tensor)
        if key in self.written or not is_as_it_was(found.tensor, found.content):
            if not isinstance(found.content, Tensor):
                raise RuntimeError(
                    f"{self.name}: a tensor of shape {tuple(found.tensor.shape)} that the function reads was "
                    "modified in place between the forward pass and its recomputation. Modify a copy, or pass it as "
                    "an argument."
                )
            return copies.setdefault(key, found.content.clone())
        return found.tensor

    def _note_writes(self) -> None:
        """Note which constants the call wrote into.

        Raises:
            ValueError: No copy is kept of one of them.
        """
        self.written = {id(f.tensor) for f in self.found if not is_as_it_was(f.tensor, f.content)}
        for found in self.found:
            if id(found.tensor) in self.written and not isinstance(found.content, Tensor):
                what = "that requires grad" if found.tensor.requires_grad else "that it did not make"
                raise ValueError(
                    f"{self.name}: the function reads a tensor of shape {tuple(found.tensor.shape)} {what} and "
                    "writes into it in place, so running it again would see another value. Write into a copy."
                )


class Graph:
    """What a recomputation is compared with: the results, and the graph that they have.

    Args:
        walk: The graph.
        outputs: The results.
        num_kept: How many of the first results are kept themselves.
    """

    def __init__(self, walk: _Walk, outputs: list[Tensor], num_kept: int) -> None:
        self.form = walk.form()
        self.custom = _kept_by_custom(walk.nodes)
        self.kept = [(output.detach(), output._version) for output in outputs[:num_kept]]
        self.others = Fingerprint(outputs[num_kept:]) if outputs[num_kept:] else None

    def difference(self, outputs: list[Tensor], boundary: Container[Edge] | None) -> str | None:
        """Return what is not as it was; None if nothing is.

        Args:
            outputs: The results of the recomputation.
            boundary: Where their graph ends; None if not all that required grad does again.
        """
        found = self._difference_of_results(outputs)
        if found is not None or boundary is None:
            return found
        walk = _walk(outputs, boundary)
        if walk.form() != self.form:
            return "other operations are differentiable than were"
        if self.custom != _kept_by_custom(walk.nodes):
            return "a custom autograd.Function kept other numbers for its backward, or a call within differs"
        return None

    def _difference_of_results(self, outputs: list[Tensor]) -> str | None:
        exact = is_deterministic()
        # Who wrote into a result since may do so.
        kept = [
            (index, tensor, output)
            for index, ((tensor, version), output) in enumerate(zip(self.kept, outputs, strict=False))
            if tensor._version == version
        ]
        if not are_equal([(tensor, output) for _, tensor, output in kept]):
            for index, tensor, output in kept:
                if found := difference(index, tensor, output, exact=exact):
                    return found
        others = outputs[len(self.kept) :]
        if self.others is None:
            return "it returns more tensors" if others else None
        return self.others.difference(others, exact=exact)


def record(
    fn: Callable[..., Tree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    reached: Reached | None = None,
    num_kept: int = 0,
) -> Recording:
    """Call ``fn(*args, **kwargs)`` and record what it takes to call it again.

    The graph of what is returned is dropped. A tensor that leaves by another way, such as a penalty that is appended
    to a list, keeps its own.

    Args:
        fn: Returns a tree of tensors, and does the same when it is run again.
        args: Trees of tensors and constants.
        kwargs: Likewise.
        name: How errors name the call.
        reached: What ``fn`` can reach, if it is known.
        num_kept: How many of the first results are kept somewhere anyway, so that they can be compared with the
            recomputed ones themselves; of the others a fingerprint is kept.

    Raises:
        ValueError: ``fn`` writes in place into an argument, or into another tensor that is no buffer of a module.
    """
    given, arguments = dissect((args, kwargs))
    reached = Reached(fn) if reached is None else reached
    check_substitutable(name, reached.modules)
    versions = [_version(tensor) for tensor in given]
    call = Call(fn, name, given, arguments, reached)
    with torch.enable_grad():
        outputs, structure = dissect(fn(*args, **kwargs))
    if [_version(tensor) for tensor in given] != versions:
        raise ValueError(
            f"{name}: the function writes in place into one of its arguments, so running it again would see another "
            "value. Write into a copy."
        )
    results = [fresh_leaf(output) for output in outputs]
    tensors = [tensor.clone() if tensor.is_inference() else tensor for tensor in given]
    tensors += call.close(given, outputs, reached, num_kept)
    return Recording(call, tensors, results, structure)


class _Walk(NamedTuple):
    """What is behind some tensors.

    Attributes:
        nodes: The nodes, without those of leaves.
        num_edges: How many edges lead on from them.
        crossed: The edges at which the walk stopped.
        leaves: The leaves that it ended at.
    """

    nodes: list[Node]
    num_edges: int
    crossed: dict[Edge, None]
    leaves: list[Tensor]

    def form(self) -> tuple[int, int]:
        """Return what tells most graphs apart: the kinds of their nodes, and how many edges there are."""
        kinds = (_RESHAPES.get(type(node), type(node)) for node in self.nodes)
        return hash(tuple(kinds)), self.num_edges


# Torch reshapes by a view if a dispatch mode is active, as in a trial of a budget, and otherwise by an alias.
with torch.inference_mode(False), torch.enable_grad():
    _COLUMN = torch.zeros(2, 2, requires_grad=True)[:, :1]
    _RESHAPES = {type(shaped.grad_fn): Tensor.reshape for shaped in (_COLUMN.view(2), _COLUMN.reshape(2))}


def _walk(outputs: Iterable[Tensor], boundary: Container[Edge]) -> _Walk:
    """Walk a graph up to the edges of some tensors."""
    nodes: list[Node] = []
    crossed: dict[Edge, None] = {}
    leaves = [tensor for tensor in outputs if tensor.requires_grad and tensor.grad_fn is None]
    num_edges = 0
    seen: set[Node] = set()
    stack: list[Any] = [(t.grad_fn, t.output_nr) for t in outputs if t.grad_fn is not None]
    while stack:
        edge = stack.pop()
        node = edge[0]
        if edge in boundary:
            crossed[edge] = None
        elif node not in seen:
            seen.add(node)
            successors = [successor for successor in node.next_functions if successor[0] is not None]
            if successors:
                nodes.append(node)
                num_edges += len(successors)
                stack += successors
            elif (leaf := getattr(node, "variable", None)) is not None:
                leaves.append(leaf)
    return _Walk(nodes, num_edges, crossed, leaves)


def _edges(tensors: Iterable[Tensor]) -> dict[Edge, Tensor]:
    return {(tensor.grad_fn, tensor.output_nr): tensor for tensor in tensors if tensor.grad_fn is not None}


def _version(tensor: Tensor) -> int | None:
    """Return how often a tensor was written into; inference tensors do not count it."""
    return tensor._version if tensor.requires_grad or not tensor.is_inference() else None


def _kept_by_custom(nodes: Iterable[Node]) -> list[tuple[Any, ...]]:
    """Return the plain values that custom functions keep for their backward, and the graphs of calls within."""
    found = []
    for node in nodes:
        if isinstance(node, BackwardCFunction):
            inner = getattr(getattr(node, "call", None), "graph", None)
            found.append((type(node), plain_values(vars(node)), inner and (inner.form, inner.custom)))
    return found
