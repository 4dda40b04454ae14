"""Record a call of a function, and run it again on other values of the tensors that it read.

A :class:`Call` remembers at call time everything that can differ later:

- The arguments, and the other tensors that the function reads. See :mod:`metagrad.core.reach`.
- The modules. See :mod:`metagrad.core.modules`.
- Random numbers, autocast and flags. See :mod:`metagrad.core.capture`.
- Function modes. See :mod:`metagrad.core.dispatch`.

The second run has the same values of all these. Its results are compared with the first results.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from metagrad.autograd.recompute.fingerprint import (
    Fingerprint,
    are_equal,
    difference,
    is_deterministic,
    kind_of,
)
from metagrad.core._torch import has_dispatch_mode
from metagrad.core.capture import AutocastState, Flags, RandomState, without_autocast_cache
from metagrad.core.dispatch import DispatchState
from metagrad.core.modules import ModuleSnapshot, check_substitutable, content_of, is_as_it_was
from metagrad.core.reach import Place, ReachableObjects, placed
from metagrad.core.substitution import checked_reruns
from metagrad.core.tree import Structure, Tree, dissect, fresh_leaf, plain_values

Edge: TypeAlias = "tuple[Node, int]"
"""A node and the number of one of its inputs. An edge identifies a tensor that has a graph."""

REPEAT = (
    "It must do the same again: depend only on its arguments, on the tensors that it reads, on the random numbers of "
    "torch, NumPy and Python, and on the attributes of its modules."
)
_SMALL = 2**12
"""Maximum bytes of a storage whose tensor is kept. For a smaller tensor, a fingerprint would take longer than
a comparison."""


class CallState:
    """The state that the calls of a loop share: reachable objects, and the settings of torch at the beginning.

    Args:
        fn: The function that the loop calls.
        name: How errors name the function.

    Raises:
        TypeError: TorchScript has compiled one of the modules that ``fn`` can reach.
        ValueError: A parameter of such a module is sharded.
    """

    def __init__(self, fn: Callable[..., Tree], name: str) -> None:
        self.reached = ReachableObjects(fn)
        self.tensors = {id(tensor): tensor for _, tensor in self.reached.tensors}
        check_substitutable(name, self.reached.modules)
        self.settings = Flags(), AutocastState(), DispatchState()

    def now(self) -> CallState:
        """Return the state for a loop that is nested in this loop. Its tensors have other values."""
        other = copy.copy(self)
        other.reached = copy.copy(self.reached)
        other.reached.contents = {}
        other.reached.tensors = [(place, place.get()) for place, _ in self.reached.tensors]
        other.tensors = {id(tensor): tensor for _, tensor in other.reached.tensors}
        return other


class Recording(NamedTuple):
    """A call that was made.

    Attributes:
        call: The call, as a function of ``tensors``.
        tensors: The tensors to differentiate with respect to: those among the arguments, then the other tensors that
            the function read and that require grad.
        outputs: The returned tensors, as fresh leaves that require grad if the tensor had a graph.
        structure: The returned tree without its tensors.
    """

    call: Call
    tensors: list[Tensor]
    outputs: list[Tensor]
    structure: Structure


class Call:
    """A recorded call, as a function of a flat list of tensors that can be run any number of times.

    Attributes:
        fn: The function.
        name: How errors name the call.
        contents: Copy or version of each reachable tensor, by id. None if neither is known.
        leaves: The leaf that an operand was in the first run, by the number of the operand.
        differentiated: For each operand, True if it required grad.
    """

    def __init__(
        self, fn: Callable[..., Tree], name: str, given: list[Tensor], arguments: Structure, state: CallState
    ) -> None:
        self.fn, self.name, self.arguments, self.state = fn, name, arguments, state
        first = {id(tensor): index for index, tensor in reversed(list(enumerate(given)))}
        self.handed = [first[id(tensor)] for tensor in given]
        self.numbers: dict[int, int] = {}
        self.leaves: dict[int, Tensor] = {}
        self.differentiated: list[bool] = []
        self.written: set[int] = set()
        reached, kept = state.reached, state.reached.contents
        self.cells = [(Place(cell, "cell_contents"), cell.cell_contents) for cell in reached.cells]
        self.contents = {key: content_of(t, kept if t.is_cpu else None) for key, t in state.tensors.items()}
        self.random = RandomState(reached.generators, reached.libraries)
        self.modules = ModuleSnapshot(reached.modules, kept)
        self.expected: ExpectedResults | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the function again, on other tensors, and compare."""
        args, kwargs = self.arguments.fill([tensors[i] for i in self.handed])
        with self._set_up(tensors), checked_reruns(self.name, nested=True):
            outputs, _ = dissect(self.fn(*args, **kwargs))
        is_whole = [tensor.requires_grad for tensor in tensors] == self.differentiated
        assert self.expected is not None
        found = self.expected.difference(outputs, _edges(tensors) if is_whole else None)
        if found is not None:
            raise RuntimeError(
                f"{self.name}: the function did not repeat when it was recomputed: {found}. {REPEAT}"
            )
        self.expected.drop(outputs)
        return outputs

    def close(self, given: list[Tensor], outputs: list[Tensor], num_kept: int) -> list[Tensor]:
        """End the record, drop the graph of ``outputs``, and return the tensors that were read but not given."""
        reached = self.state.reached
        self.random.close()
        # Reading the state of NumPy and Python takes long, so a loop does it only once. If only a later call
        # draws from them, its recomputation differs and raises an error.
        reached.libraries = {g.library for g, _ in self.random.states} | (reached.libraries or set())
        self._note_writes()
        tensors = [*self.state.tensors.values(), *given]
        known = _edges(tensors)
        walk = _walk(outputs, known)
        self.expected = ExpectedResults(walk, outputs, num_kept)
        read = [known[edge] for edge in walk.crossed]
        hidden = [weakref.ref(leaf) for leaf in walk.leaves]
        outputs.clear()
        del walk
        # Leaves that the function made are freed with the graph.
        read += [leaf for reference in hidden if (leaf := reference()) is not None]
        own = set(map(id, given))
        read = list({id(t): t for t in read if id(t) not in own}.values())
        numbers = {id(t): i for i, t in reversed(list(enumerate([*given, *read])))}
        self.numbers = {key: numbers[key] for key in self.contents if key in numbers}
        self.leaves = {i: t for i, t in enumerate([*given, *read]) if t.requires_grad and t.is_leaf}
        self.differentiated = [t.requires_grad for t in (*given, *read)]
        return read

    @contextlib.contextmanager
    def _set_up(self, tensors: Sequence[Tensor]) -> Generator[None]:
        """Restore the state around the call, with other tensors for its operands."""
        values = {
            key: tensors[self.numbers[key]] if key in self.numbers else self._again(key)
            for key in self.contents
        }
        places = ((place, values[id(tensor)]) for place, tensor in self.state.reached.tensors)
        with contextlib.ExitStack() as stack:
            for setting in (*self.state.settings, self.random):
                stack.enter_context(setting.restored())
            stack.enter_context(self.modules.restored(self.name))
            stack.enter_context(placed([*self.cells, *places]))
            yield

    def _again(self, key: int) -> Tensor:
        """Return a constant as the call found it: a copy if it has changed or if the call writes into it."""
        tensor, content = self.state.tensors[key], self.contents[key]
        if key not in self.written and is_as_it_was(tensor, content):
            return tensor
        if not isinstance(content, Tensor):
            raise RuntimeError(
                f"{self.name}: a tensor of shape {tuple(tensor.shape)} that the function reads was modified in place "
                "between the forward pass and its recomputation. Call backward before an optimizer writes it, modify "
                "a copy, or pass it as an argument."
            )
        return content.clone()

    def _note_writes(self) -> None:
        """Note which constants the call wrote into. Raise ``ValueError`` if no copy of one of them is kept."""
        for key, tensor in self.state.tensors.items():
            content = self.contents[key]
            if is_as_it_was(tensor, content):
                continue
            if not isinstance(content, Tensor):
                what = "that requires grad" if tensor.requires_grad else "that it did not make"
                raise ValueError(
                    f"{self.name}: the function reads a tensor of shape {tuple(tensor.shape)} {what} and "
                    "writes into it in place, so running it again would see another value. Write into a copy."
                )
            self.written.add(key)


class ExpectedResults:
    """What the results of a recomputation are compared with: the first results and the form of their graph.

    Results that the caller keeps, and small ones after them, are kept. The other results have a fingerprint.

    Args:
        walk: The graph of the first results.
        outputs: The first results.
        num_kept: The number of first results that the caller keeps anyway. They are also kept here.
    """

    def __init__(self, walk: _GraphWalk, outputs: list[Tensor], num_kept: int) -> None:
        self.has_mode: bool = has_dispatch_mode()
        self.form = walk.form()
        self.custom = _kept_by_custom(walk.nodes)
        self.count = len(outputs)
        self.kept = {
            i: (output.detach(), output._version)
            for i, output in enumerate(outputs)
            if i < num_kept or (num_kept and _is_small(output))
        }
        others = [output for i, output in enumerate(outputs) if i not in self.kept]
        self.others = Fingerprint(others) if others else None

    def difference(self, outputs: list[Tensor], boundary: Container[Edge] | None) -> str | None:
        """Return a description of the difference from the first run, or None.

        Args:
            outputs: The results of the recomputation.
            boundary: The edges at the end of their graph. None if fewer operands require grad than in the first
                run, so that the graphs cannot be compared. They are also not compared if a dispatch mode, such as
                a memory tracker, was active in one of the runs.
        """
        has_same_mode = has_dispatch_mode() == self.has_mode
        found = self._difference_of_results(outputs, exact=is_deterministic() and has_same_mode)
        if found is not None or boundary is None or not has_same_mode:
            return found
        walk = _walk(outputs, boundary)
        if walk.form() != self.form:
            return "other operations are differentiable than were"
        if self.custom != _kept_by_custom(walk.nodes):
            return "a custom autograd.Function kept other numbers for its backward, or a call within differs"
        return None

    def drop(self, outputs: list[Tensor]) -> None:
        """Replace kept results by a fingerprint, so that a backward pass frees the states behind it."""
        if self.kept:
            self.kept, self.others = {}, Fingerprint(outputs)

    def _difference_of_results(self, outputs: list[Tensor], *, exact: bool) -> str | None:
        if len(outputs) != self.count:
            return f"it returned {self.count} tensors, and returns {len(outputs)}"
        # The caller may write into a result, and its values then differ from the first run.
        kept = [
            (index, tensor, outputs[index])
            for index, (tensor, version) in self.kept.items()
            if tensor._version == version
        ]
        if not are_equal([(tensor, output) for _, tensor, output in kept]):
            for index, tensor, output in kept:
                if found := difference(index, tensor, output, exact=exact):
                    return found
        if self.others is None:
            return None
        others = [output for index, output in enumerate(outputs) if index not in self.kept]
        return self.others.difference(others, exact=exact)


def record(
    fn: Callable[..., Tree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    state: CallState | None = None,
    num_kept: int = 0,
) -> Recording:
    """Call ``fn(*args, **kwargs)`` and record everything that calling it again needs.

    The graph of the returned tensors is dropped. A tensor that leaves ``fn`` in another way, such as a penalty that
    is appended to a list, keeps its own graph.

    Args:
        fn: Returns a tree of tensors, and repeats its computation when it is called again.
        args: Trees of tensors and constants.
        kwargs: Trees of tensors and constants.
        name: How errors name the call.
        state: The state that the calls of a loop share. None for a single call.
        num_kept: The number of first results that the caller keeps anyway. The recomputed ones are compared with
            them.

    Raises:
        ValueError: ``fn`` writes in place into an argument, or into another tensor that is not a buffer of a module.
    """
    given, arguments = dissect((args, kwargs))
    state = CallState(fn, name) if state is None else state
    versions = [_version(tensor) for tensor in given]
    call = Call(fn, name, given, arguments, state)
    with torch.enable_grad(), without_autocast_cache():
        outputs, structure = dissect(fn(*args, **kwargs))
    if [_version(tensor) for tensor in given] != versions:
        raise ValueError(
            f"{name}: the function writes in place into one of its arguments, so running it again would see another "
            "value. Write into a copy."
        )
    results = [fresh_leaf(output) for output in outputs]
    tensors = [tensor.clone() if tensor.is_inference() else tensor for tensor in given]
    tensors += call.close(given, outputs, num_kept)
    return Recording(call, tensors, results, structure)


class _GraphWalk(NamedTuple):
    """The graph behind some tensors.

    Attributes:
        nodes: The nodes, without the nodes of leaves.
        num_edges: The number of edges that leave the nodes.
        crossed: The edges at which the walk stopped.
        leaves: The leaves of the graph.
    """

    nodes: list[Node]
    num_edges: int
    crossed: dict[Edge, None]
    leaves: list[Tensor]

    def form(self) -> tuple[int, int]:
        """Return a hash of the kinds of nodes, and the number of edges, which distinguish most graphs."""
        return hash(tuple(map(type, self.nodes))), self.num_edges


def _walk(outputs: Iterable[Tensor], boundary: Container[Edge]) -> _GraphWalk:
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
            continue
        if node in seen:
            continue
        seen.add(node)
        before = num_edges
        for successor in node.next_functions:
            if successor[0] is not None:
                num_edges += 1
                stack.append(successor)
        if num_edges > before:
            nodes.append(node)
        elif (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
    return _GraphWalk(nodes, num_edges, crossed, leaves)


def _edges(tensors: Iterable[Tensor]) -> dict[Edge, Tensor]:
    return {(tensor.grad_fn, tensor.output_nr): tensor for tensor in tensors if tensor.grad_fn is not None}


def _version(tensor: Tensor) -> int | None:
    """Return how often a tensor was written into, or None for inference tensors, which do not count writes."""
    return tensor._version if tensor.requires_grad or not tensor.is_inference() else None


def _is_small(tensor: Tensor) -> bool:
    """Return whether keeping a plain tensor takes little memory. A small view can hold a large storage."""
    return kind_of(tensor) is not None and tensor.untyped_storage().nbytes() <= _SMALL


def _kept_by_custom(nodes: Iterable[Node]) -> list[tuple[Any, ...]]:
    """Return the plain values that custom functions keep for their backward, and the graphs of calls within."""
    found = []
    for node in nodes:
        if isinstance(node, BackwardCFunction):
            inner = getattr(getattr(node, "call", None), "expected", None)
            found.append((type(node), plain_values(vars(node)), inner and (inner.form, inner.custom)))
    return found
