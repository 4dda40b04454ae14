"""Recording one call of a function so that it can be run again on other values of what it read.

Recomputation is right only if the second run does what the first one did. A :class:`Call` therefore captures, at
call time, everything that can differ later: the arguments, the tensors that the function read without being handed
them (:mod:`~.captured_tensors`), random numbers, autocast and flags (:mod:`metagrad.core.capture`), and the
modules (:mod:`metagrad.core.modules`). And it holds the second run to the first, by the torch functions that
were called (:mod:`~.journal`) and by their results (:mod:`~.fingerprint`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from metagrad.autograd.derivatives.quick.plain import QuickFunction
from metagrad.autograd.recompute.captured_tensors import (
    REPEAT,
    FunctionModes,
    Observer,
    Reads,
    Recorder,
    shown,
    tell_recorders,
    unobserved,
    unrecorded,
    version_of,
)
from metagrad.autograd.recompute.containers import Containers
from metagrad.autograd.recompute.fingerprint import Copy, Fingerprint, is_deterministic
from metagrad.autograd.recompute.program import Programs, programs_of
from metagrad.autograd.recompute.signature import signature_of
from metagrad.core import _torch
from metagrad.core.capture import AutocastState, Flags, RandomState, restored
from metagrad.core.modules import ModuleState, check_substitutable, modules_of
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import Structure, Tree, dissect, fresh_leaf, plain_values


class Recording(NamedTuple):
    """A call that was made.

    Attributes:
        call: The call, as a function of ``tensors``.
        tensors: What it can be differentiated with respect to: the tensors among its arguments, then the
            free tensors that require grad.
        outputs: The tensors it returned, each a fresh leaf whose ``requires_grad`` says if it had a graph.
        structure: Where these stand in the returned tree.
    """

    call: Call
    tensors: list[Tensor]
    outputs: list[Tensor]
    structure: Structure


class Call:
    """A recorded call, as a function of a flat list of tensors that can be run any number of times."""

    def __init__(
        self,
        fn: Callable[..., Tree],
        name: str,
        arguments: Structure,
        num_arguments: int,
        modules: list[nn.Module],
    ) -> None:
        check_substitutable(name, modules)
        self.fn = fn
        self.name = name
        self.arguments = arguments
        self.num_arguments = num_arguments
        self.results: Fingerprint | Copy | None = None
        self.constants: list[tuple[Any, ...]] = []
        self.differentiated: list[bool] = []  # which tensors required grad
        self.returned: list[bool] = []  # which results are tensors that it was handed or read, as they are
        self.compared: list[int] = []  # the results whose fingerprints are kept
        self.programs: Programs | None = None  # of calls with the same derivative
        self.watched: tuple[int, ...] = ()  # the operands whose fingerprints are kept
        self._operands: Fingerprint | None = None
        self.function_modes = FunctionModes()
        with unobserved():
            self.modules = ModuleState(modules)
            self.reads = Reads(RandomState())
            self.flags, self.autocast = Flags(), AutocastState()

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the function again, on the recorded tensors or copies of them."""
        outputs = self.run(tensors)
        with unobserved():
            self.verify(tensors, outputs)
        return outputs

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the function again, without comparing its results."""
        handed, free = tensors[: self.num_arguments], tensors[self.num_arguments :]
        args, kwargs = self.arguments.fill(handed)
        surroundings = self.flags, self.autocast, self.reads.random, self.modules, self.function_modes
        with restored(*surroundings), self.reads.substituted(self.name, handed, free):
            outputs, _ = dissect(self.fn(*args, **kwargs))
            return [t.view_as(t) if read else t for t, read in zip(outputs, self.returned, strict=False)]

    def has_plain_surroundings(self) -> bool:
        """Say whether nothing around the call changes what torch functions do but flags."""
        casts = any(enabled for enabled, _ in self.autocast.kinds.values())
        return not casts and not self.function_modes.modes

    def keep_fingerprints(
        self, programs: Programs | None, operands: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Keep the fingerprints that a recomputation is compared with.

        Of all results; or, where programs have the derivative, of one result and of the operands that it does not
        depend on: if these agree, so does everything else.
        """
        if programs is None:
            self.compared = list(range(len(outputs)))
        else:
            self.programs = programs
            self.compared = _smallest(outputs)
            self.watched = programs.watched(len(operands))
            self._operands = Fingerprint([operands[i] for i in self.watched]) if self.watched else None
        results = [outputs[i] for i in self.compared]
        self.results = Copy(results[0]) if Copy.suits(results) else Fingerprint(results)

    def verify_operands(self, operands: Sequence[Tensor]) -> None:
        """Raise if operands that the results do not show are not as they were."""
        if self._operands is not None:
            self._refuse(self._operands.difference([operands[i] for i in self.watched], exact=True))

    def verify_results(self, results: Sequence[Tensor], exact: bool) -> None:
        """Raise if the results that are compared are not as they were."""
        assert self.results is not None
        self._refuse(self.results.difference(results, exact=exact))

    def verify(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Raise if operands, results, or what custom functions keep, are not as they were."""
        self.verify_operands([*tensors, *(constant.tensor for constant in self.reads.constants)])
        self.verify_results([outputs[i] for i in self.compared], is_deterministic())
        if self.constants:
            inputs = {node for tensor in tensors if (node := tensor.grad_fn) is not None}
            found = _constants_in(graph_nodes(outputs, inputs))
            # Where fewer derivatives are taken, the graph is a part of the recorded one.
            whole = torch.is_grad_enabled() and [t.requires_grad for t in tensors] == self.differentiated
            if found != self.constants if whole else any(each not in self.constants for each in found):
                self._refuse("a custom autograd.Function kept other numbers for its backward")

    def _refuse(self, difference: str | None) -> None:
        if difference is not None:
            raise RuntimeError(
                f"{self.name}: the function did not repeat when it was recomputed: {difference}. {REPEAT}"
            )


def record(
    fn: Callable[..., Tree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    modules: list[nn.Module] | None = None,
) -> Recording:
    """Call ``fn(*args, **kwargs)`` and record what it takes to call it again.

    The graph of what is returned is dropped. A tensor that leaves by another way, such as a penalty that is appended
    to a list, keeps its own, which leads to the arguments; so it does where the list is an argument.

    Args:
        fn: Returns a tree of tensors, and does the same when it is run again.
        args: Trees of tensors and constants.
        kwargs: Likewise.
        name: How errors name the call.
        modules: The modules that ``fn`` calls, if they are known.

    Raises:
        ValueError: ``fn`` writes in place into an argument or a tensor that requires grad, or depends on a tensor
            that requires grad and that no torch function was seen to read.
    """
    given, arguments = dissect((args, kwargs))
    tensors = [tensor.clone() if tensor.is_inference() else tensor for tensor in given]
    with unrecorded() as enclosing:
        tensors = [shown(tensor, enclosing) for tensor in tensors]
        recording = _record(fn, _Given((args, kwargs), given), tensors, arguments, name, modules, enclosing)
        tell_recorders(recording.outputs)
    return recording


class _Given(NamedTuple):
    """The arguments of the caller, and the tensors among them."""

    tree: Tree
    tensors: list[Tensor]


def _record(
    fn: Callable[..., Tree],
    given: _Given,
    tensors: list[Tensor],
    arguments: Structure,
    name: str,
    modules: list[nn.Module] | None,
    enclosing: list[Observer],
) -> Recording:
    call = Call(fn, name, arguments, len(tensors), modules_of(fn) if modules is None else modules)
    with torch.enable_grad():
        handed = [t.view_as(t) if t.requires_grad else t.detach() for t in tensors]
        versions = [version_of(tensor) for tensor in handed]
        fresh_args, fresh_kwargs = arguments.fill(handed)
        containers = Containers(given.tree, (fresh_args, fresh_kwargs))
        with Recorder(call.reads, handed, enclosing) as recorder:
            outputs, structure = dissect(fn(*fresh_args, **fresh_kwargs))
            call.returned = [not recorder.has_made(output) for output in outputs]
            # As the argument of a torch function, they count as read.
            outputs = [t.view_as(t) if read else t for t, read in zip(outputs, call.returned, strict=True)]
    containers.write_back({id(copy): own for copy, own in zip(handed, given.tensors, strict=True)})
    with unobserved():
        call.reads.random.close()
        call.reads.close(name, handed, versions)
        nodes = list(graph_nodes(outputs, recorder.inputs()))
        recorder.refuse_unseen(name, nodes)
        call.constants = _constants_in(nodes)
        call.differentiated = [t.requires_grad for t in (*handed, *call.reads.differentiable)]
        plain = not any(map(_is_custom, nodes)) and call.has_plain_surroundings()
        signature = signature_of(recorder, outputs, call.flags.key()) if plain else None
        call.keep_fingerprints(programs_of(signature), recorder.operands(), outputs)
        outputs = [fresh_leaf(output) for output in outputs]
    return Recording(call, tensors + call.reads.differentiable, outputs, structure)


def _smallest(outputs: Sequence[Tensor]) -> list[int]:
    """Return the smallest differentiable result, the last of several: it is computed along with a derivative."""
    differentiable = [i for i, output in enumerate(outputs) if output.requires_grad]
    return sorted(differentiable, key=lambda i: (outputs[i].numel(), -i))[:1]


def _constants_in(nodes: Iterable[Node]) -> list[tuple[Any, ...]]:
    """Return the plain values that custom functions keep for their backward: no mode sees ``apply``."""
    return [
        (type(node), values) for node in nodes if _is_custom(node) and (values := plain_values(vars(node)))
    ]


def _is_custom(node: Node) -> bool:
    """Say whether a node is of a custom function, and not of one that stands for a function of torch."""
    return isinstance(node, BackwardCFunction) and not issubclass(_torch.function_of(node), QuickFunction)
