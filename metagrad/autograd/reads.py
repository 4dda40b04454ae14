"""The tensors that a function reads without being handed them, found while it runs and exchanged when it runs again.

They are found by a ``TorchFunctionMode``: a tensor that enters a torch function and is neither an argument nor the
result of an earlier torch function is *free*. The number of the torch function in the sequence of calls, and the
position among its arguments, say where it was read, so that a deterministic function can be run again with another
tensor in that place, even where the tensor itself is no longer to be found: ``torch.func.functional_call`` puts
weights into a module for the duration of a call only.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from metagrad._tree import tensors_in
from metagrad.autograd.graph import graph_nodes

# Functions that write into arguments though their names do not end in an underscore.
_WRITERS = {torch.nn.functional.batch_norm, torch.nn.functional.instance_norm}
_IN_PLACE = {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"}
_IN_PLACE_OPERATORS = {f"__i{name}__" for name in _IN_PLACE} | {"__setitem__"}

# What is said of a tensor, rather than read from it: the half of what rules and layers ask torch for.
_ATTRIBUTES = {
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "grad_fn", "is_leaf", "layout", "ndim", "requires_grad", "shape")
}


class Constant(NamedTuple):
    """A free tensor that does not require grad.

    Attributes:
        tensor: The tensor.
        version: Its version when it was read.
        before: A copy of what it held then, if the function that read it may have written into it, as batch
            normalisation writes its running statistics.
    """

    tensor: Tensor
    version: int
    before: Tensor | None

    def replayed(self, name: str) -> Tensor:
        """Return what the call read; to write into it again leaves the tensor itself alone."""
        if self.before is not None:
            return self.before.clone()
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"{name}: a tensor of shape {tuple(self.tensor.shape)} that the function reads was modified in "
                "place between the forward pass and its recomputation. Modify a copy, or pass it as an argument."
            )
        return self.tensor


def _may_write(function: Callable, kwargs: dict[str, Any]) -> bool:
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _IN_PLACE_OPERATORS or function in _WRITERS or "out" in kwargs


class Place(NamedTuple):
    """A torch function in the sequence of calls, and the free tensors at some positions of its arguments.

    A slot is (requires grad, index among the free tensors of that kind).
    """

    function: Callable
    slots: dict[int, tuple[bool, int]]


class Reads:
    """The free tensors of a call, and where in its sequence of torch functions each was read."""

    def __init__(self) -> None:
        self.differentiable: list[Tensor] = []
        self.constants: list[Constant] = []
        self.places: dict[int, Place] = {}
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._slots: dict[tuple[int, bool], tuple[bool, int]] = {}
        self._read: list[Tensor] = []

    def add(self, tensor: Tensor, function: Callable, number: int, position: int, writes: bool) -> Tensor:
        """Note that call ``number`` reads a free tensor; return what it is to read in its place."""
        # Without grad mode, as inside the forward of a custom autograd.Function, it is a constant.
        with unobserved():
            key = id(tensor), tensor.requires_grad and torch.is_grad_enabled()
        if key not in self._slots:
            self._slots[key] = self._new_slot(_as_modes_see(tensor), key[1], writes)
            self._read.append(tensor)
        slot = self._slots[key]
        self.places.setdefault(number, Place(function, {})).slots[position] = slot
        differentiable, index = slot
        return self.differentiable[index] if differentiable else self.constants[index].tensor

    def _new_slot(self, tensor: Tensor, differentiable: bool, writes: bool) -> tuple[bool, int]:
        if differentiable:
            self.differentiable.append(tensor)
            return True, len(self.differentiable) - 1
        with unobserved():
            before = tensor.clone() if writes else None
            self.constants.append(Constant(tensor, tensor._version, before))
        return False, len(self.constants) - 1

    def close(self, name: str) -> None:
        """Check that what the call wrote into is known as it was before."""
        self._slots, self._read = {}, []
        for index, constant in enumerate(self.constants):
            if constant.before is not None:
                # Not by version: batch normalisation writes its running statistics without a new one.
                if torch.equal(constant.before, constant.tensor):
                    self.constants[index] = constant._replace(before=None)
            elif constant.tensor._version != constant.version:
                raise ValueError(
                    f"{name}: the function reads a tensor of shape {tuple(constant.tensor.shape)} that it did "
                    "not make and then writes into it in place, so running it again would see another value. "
                    "Return the new value instead."
                )

    @contextlib.contextmanager
    def substituted(self, name: str, free: Sequence[Tensor]) -> Iterator[None]:
        """Hand the given tensors, in the order of ``differentiable``, to the functions that read them."""
        with unobserved():
            constants = [constant.replayed(name) for constant in self.constants]
        with self._generators_restored():
            if not self.places:
                yield
                return
            with _Substitution(name, self.places, list(free), constants) as substitution:
                yield
            substitution.close()

    @contextlib.contextmanager
    def _generators_restored(self) -> Iterator[None]:
        """Set the generators that the call was seen to draw from back for the duration of a replay."""
        now = [(generator, generator.get_state()) for generator, _ in self.generators.values()]
        for generator, state in self.generators.values():
            generator.set_state(state)
        try:
            yield
        finally:
            for generator, state in now:
                generator.set_state(state)


def unobserved() -> contextlib.AbstractContextManager:
    """Hide our own bookkeeping from modes: an enclosing recording counts the calls it sees."""
    return torch._C.DisableTorchFunction()


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Hide calls from enclosing recordings and replays, which count them, but from no other mode."""
    hidden = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    others = [mode for mode in reversed(hidden) if not isinstance(mode, _Numbering)]
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in reversed(hidden):
            _push_mode(mode)


def _as_modes_see(tensor: Tensor) -> Tensor:
    """Let an enclosing recording or replay see the tensor, and replace it, before this one keeps it."""
    return tensor.view_as(tensor) if torch._C._len_torch_function_stack() else tensor


class _Active(threading.local):
    """The recorders at work in this thread, the outermost first."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []


_active = _Active()


def tell_recorders(made: Sequence[Tensor]) -> None:
    """Tell enclosing recordings of the outputs of a ``Function.apply``, of which no mode is told."""
    for recorder in _active.recorders:
        recorder.note(made)


class _Numbering(TorchFunctionMode):
    """Numbers the torch functions that a function calls, the same each time it runs.

    Modes that were at work before, which look at every operation or count it, may call functions of their own: within
    a custom ``autograd.Function``, where torch saves its outputs, function modes are told of these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.call_number = 0
        self._modes_before = torch._C._len_torch_dispatch_stack()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # A mode is off the stack while it looks at an operation.
        if func in _ATTRIBUTES or torch._C._len_torch_dispatch_stack() < self._modes_before:
            return func(*args, **(kwargs or {}))
        number, self.call_number = self.call_number, self.call_number + 1
        return self._called(number, func, args, kwargs or {})

    def _called(self, number: int, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class Recorder(_Numbering):
    """Finds the free tensors of a function while it runs."""

    def __init__(self, reads: Reads, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.reads = reads
        self.arguments = {id(tensor): tensor for tensor in arguments}
        self.made: dict[int, weakref.ref[Tensor]] = {}
        self.without_grad: set[int] = set()
        self.outside: set[Node] = set()

    def _called(self, number: int, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        generator = kwargs.get("generator")
        if generator is not None:
            self.reads.generators.setdefault(id(generator), (generator, generator.get_state()))
        free = self._free(tensors_in((args, kwargs) if kwargs else args))
        if free:
            writes = _may_write(function, kwargs)
            stand_ins = {i: self.reads.add(t, function, number, i, writes) for i, t in free.items()}
            args, kwargs = _replace_tensors((args, kwargs), stand_ins)
        result = function(*args, **kwargs)
        made = tensors_in(result)
        self.note([t for t in made if not any(t is known for known in free.values())] if free else made)
        return result

    def _free(self, tensors: list[Tensor]) -> dict[int, Tensor]:
        """Return the free ones among tensors by their positions.

        Most tensors are arguments, or were just made with a graph; to see that, nothing is asked of torch.
        """
        doubtful: dict[int, Tensor] = {}
        for position, tensor in enumerate(tensors):
            key = id(tensor)
            if key not in self.arguments:
                made = self.made.get(key)
                if made is None or made() is not tensor or key in self.without_grad:
                    doubtful[position] = tensor
        if not doubtful:
            return doubtful
        with unobserved():
            return {position: tensor for position, tensor in doubtful.items() if not self._is_own(tensor)}

    def __enter__(self):
        _active.recorders.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        _active.recorders.remove(self)
        return super().__exit__(*error)

    def note(self, made: Iterable[Tensor]) -> None:
        """Remember tensors as made by the function."""
        mark = self.without_grad.discard if torch.is_grad_enabled() else self.without_grad.add
        for tensor in made:
            key = id(tensor)
            self.made[key] = weakref.ref(tensor)
            mark(key)

    def _is_as_made(self, tensor: Tensor) -> bool:
        """A custom ``autograd.Function`` gives a graph to what its forward made without one."""
        return id(tensor) not in self.without_grad or tensor.is_leaf

    def _is_known(self, tensor: Tensor | None) -> bool:
        """Recognise an argument, or what a torch function made."""
        if tensor is None or id(tensor) in self.arguments:
            return tensor is not None
        made = self.made.get(id(tensor))
        return made is not None and made() is tensor and self._is_as_made(tensor)

    def _is_own(self, tensor: Tensor) -> bool:
        if self._is_known(tensor):
            return True
        if is_functorch_wrapped_tensor(tensor):
            # Made by a torch.func transform inside the function; it cannot outlive the transform.
            return True
        return self._depends_on_arguments(tensor)

    def _depends_on_arguments(self, tensor: Tensor) -> bool:
        """Recognise the output of a custom ``autograd.Function`` or of a transform, of which no mode is told.

        Its graph may also end at leaves that the function made: those of a recording inside this one.
        """
        nodes = list(graph_nodes([tensor], self.outside))
        found = any(self._is_known(getattr(node, "variable", None)) for node in nodes)
        if found:
            self.outside.difference_update(nodes)
        return found

    def refuse_unseen(self, name: str, outputs: Sequence[Tensor]) -> None:
        """Raise if an output depends on a tensor that was never seen: its gradient would be lost."""
        seen = {node for tensor in self.reads.differentiable if (node := tensor.grad_fn) is not None}
        leaves = {id(tensor) for tensor in self.reads.differentiable} | set(self.arguments)
        for node in graph_nodes(outputs, seen):
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor) and id(variable) not in leaves:
                raise ValueError(
                    f"{name}: the function depends on a tensor of shape {tuple(variable.shape)} that requires "
                    "grad and that only a custom autograd.Function or a torch.func transform reads. Pass it "
                    "as an argument, or its gradient would be lost."
                )


class _Substitution(_Numbering):
    """Replays a function with other tensors in the places where it reads its free ones."""

    def __init__(
        self, name: str, places: dict[int, Place], free: list[Tensor], constants: list[Tensor]
    ) -> None:
        super().__init__()
        self.name = name
        self.places = places
        self.free = free
        self.constants = constants

    def _called(self, number: int, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        place = self.places.get(number)
        if place is not None:
            if place.function != function:
                raise self._astray(f"{place.function} became {function}")
            stand_ins = {
                position: (self.free if differentiable else self.constants)[index]
                for position, (differentiable, index) in place.slots.items()
            }
            args, kwargs = _replace_tensors((args, kwargs), stand_ins)
        return function(*args, **kwargs)

    def close(self) -> None:
        """Check that every place was reached."""
        if self.call_number <= max(self.places):
            raise self._astray(f"it ended after {self.call_number} torch functions")

    def _astray(self, how: str) -> RuntimeError:
        return RuntimeError(
            f"{self.name}: the function took another path when it was recomputed ({how}). It must depend on "
            "its arguments, its free tensors and torch's random numbers alone."
        )


def _replace_tensors(value: Any, stand_ins: dict[int, Tensor]) -> Any:
    """Replace the tensors at some positions, counted as :func:`tensors_in` yields them."""
    position = -1

    def visit(value: Any) -> Any:
        nonlocal position
        if isinstance(value, Tensor):
            position += 1
            return stand_ins.get(position, value)
        if isinstance(value, list):
            return [visit(item) for item in value]
        if isinstance(value, tuple):
            items = [visit(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, dict):
            return {key: visit(item) for key, item in value.items()}
        return value

    return visit(value)
