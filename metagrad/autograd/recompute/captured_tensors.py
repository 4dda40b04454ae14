"""The tensors that a function reads beside its arguments: found while it runs, replaced when it runs again.

They are found by a ``TorchFunctionMode``: a tensor that enters a torch function and is neither an argument nor the
result of an earlier torch function is *free*. The number of the torch function in the sequence of calls, and the
position among its arguments, say where it was read, so that a deterministic function can be run again with another
tensor in that place, even where the tensor itself is no longer to be found: ``torch.func.functional_call`` puts
weights into a module for the duration of a call only.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from metagrad.autograd.recompute.journal import Entry, Journal, describe, take_apart
from metagrad.core import _torch
from metagrad.core._torch import is_functorch_wrapped
from metagrad.core.capture import RandomState
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import ATOMS, tensors_in
from metagrad.core.writes import ALIASING_NAMES, may_write, written_by

# Metadata of a tensor, not its values: half of the calls that rules and layers make.
_METADATA = {
    *(
        getattr(Tensor, name).__get__
        for name in ("device", "dtype", "is_leaf", "layout", "ndim", "requires_grad", "shape")
    ),
    *(Tensor.numel, Tensor.dim, Tensor.size, Tensor.is_floating_point, Tensor.is_complex),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}


REPEAT = (
    "It must do the same again: depend on its arguments, on the tensors that it reads, on the random numbers of "
    "torch, NumPy and Python, and on the attributes of its modules alone."
)


_NOTHING: dict[str, Any] = {}


class Constant(NamedTuple):
    """A free tensor that does not require grad.

    Attributes:
        tensor: The tensor.
        version: Its version when it was read; None where torch keeps none.
    """

    tensor: Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> Constant:
        """Note the version of a tensor."""
        return cls(tensor, version_of(tensor))

    def is_as_read(self) -> bool:
        """Say whether the tensor was not written into since, as far as torch counts versions."""
        return self.version is None or self.tensor._version == self.version


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was written into; inference tensors do not count it."""
    return None if tensor.is_inference() else tensor._version


def refuse_modified(name: str, reader: str, constants: Iterable[Constant]) -> None:
    """Raise if a tensor that was read was written into since."""
    for constant in constants:
        if not constant.is_as_read():
            raise RuntimeError(
                f"{name}: a tensor of shape {tuple(constant.tensor.shape)} that the {reader} reads was modified in "
                "place between the forward pass and its recomputation. Modify a copy, or pass it as an argument."
            )


class Writes:
    """The storages that a call writes into, or lets others write into, and what they held before.

    Attributes:
        written: Storages that torch functions wrote into; a weak reference keeps their identity from being given
            to another once they are freed.
        before: Copies of those that the call read and did not make.
    """

    def __init__(self) -> None:
        self.written: dict[int, StorageWeakRef] = {}
        self.before: dict[int, torch.UntypedStorage] = {}
        self._known: dict[int, None] = {}

    def know(self, tensor: Tensor) -> None:
        """Note the storage of a tensor that the call reads: before it is written into, it is copied."""
        key = storage_of(tensor)
        if key is not None:
            self._known[key] = None

    def protect(self, function: Callable[..., Any], targets: Iterable[Tensor]) -> None:
        """Copy what a torch function is about to write into, where the call did not make it."""
        is_alias = getattr(function, "__name__", "") in ALIASING_NAMES
        for tensor in targets:
            key = storage_of(tensor)
            if key is None:
                continue
            if not is_alias and key not in self.written:
                self.written[key] = StorageWeakRef(tensor.untyped_storage())
            if key in self._known and key not in self.before:
                self.before[key] = tensor.untyped_storage().clone()

    def reach(self, tensor: Tensor) -> bool:
        """Return whether a torch function wrote into the storage of a tensor."""
        return bool(self.written) and storage_of(tensor) in self.written

    def keep_changes(self, read: Iterable[tuple[Tensor, bool]]) -> None:
        """Drop the copies of storages of which no tensor that was read has changed.

        Args:
            read: The tensors that were read, and whether their versions are as they were. Batch normalisation
                writes its running statistics without a new version, so what they hold is compared as well.
        """
        changed = set()
        for tensor, is_as_read in read:
            key = storage_of(tensor)
            if key in self.before and (not is_as_read or not _same_bytes(self.before[key], tensor)):
                changed.add(key)
        self.before = {key: copy for key, copy in self.before.items() if key in changed}

    def copies(self) -> dict[int, torch.UntypedStorage]:
        """Return the storages that were written into as they were before, to be written into again."""
        return {key: copy.clone() for key, copy in self.before.items()}


def copy_of(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor | None:
    """Return the tensor of the same strides on the copy of its storage; None if there is none."""
    storage = storages.get(storage_of(tensor)) if storages else None  # type: ignore[arg-type]
    if storage is None:
        return None
    with torch.no_grad():
        return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[arg-type]


def storage_of(tensor: Tensor) -> int | None:
    """Identify the storage of a tensor; None where it has none of its own."""
    if is_functorch_wrapped(tensor) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()._cdata


def _same_bytes(copy: torch.UntypedStorage, tensor: Tensor) -> bool:
    now = tensor.untyped_storage()
    if now.nbytes() != copy.nbytes():
        return False
    views = (torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(s) for s in (copy, now))  # type: ignore[call-overload]
    return torch.equal(*views)


class Reads:
    """The torch functions that a call ran, and the free tensors that they read.

    Attributes:
        journal: The torch functions that it called, in their order.
        slots: By the number of a torch function and the position among its tensors: which free tensor stands
            there, as (requires grad, index among the free tensors of that kind).
        differentiable: The free tensors that require grad.
        constants: The others.
        flow: For each torch function, where the tensors that it was handed come from.
        made: For each, the shapes and dtypes of the tensors that it returned.
        is_transparent: Whether all tensors were arguments, free, or made by torch functions.
        writes: What the call writes into that it did not make.
        random: The random generators that it draws from.
    """

    def __init__(self, random: RandomState) -> None:
        self.random = random
        self.journal = Journal()
        self.slots: dict[int, dict[int, tuple[bool, int]]] = {}
        self.flow: list[list[int]] = []
        self.made: dict[int, tuple[Any, ...]] = {}
        self.is_transparent = True
        self.differentiable: list[Tensor] = []
        self.constants: list[Constant] = []
        self.writes = Writes()

    def keep(self, tensor: Tensor, differentiable: bool) -> tuple[bool, int]:
        """Add a free tensor; return its slot."""
        if differentiable:
            self.differentiable.append(tensor)
            return True, len(self.differentiable) - 1
        with unobserved():
            self.constants.append(Constant.of(tensor))
            self.writes.know(tensor)
        return False, len(self.constants) - 1

    def close(self, name: str, handed: Sequence[Tensor], versions: Sequence[int | None]) -> None:
        """Check that the earlier values of everything that the call wrote into are known."""
        for tensor, version in zip(handed, versions, strict=True):
            if version_of(tensor) != version or self.writes.reach(tensor):
                raise ValueError(
                    f"{name}: the function writes in place into one of its arguments, so running it again would "
                    "see another value. Write into a copy."
                )
        for tensor in self.differentiable:
            if self.writes.reach(tensor):
                raise ValueError(
                    f"{name}: the function reads a tensor of shape {tuple(tensor.shape)} that requires grad and "
                    "writes into it in place, so running it again would see another value. Write into a copy."
                )
        self.writes.keep_changes((constant.tensor, constant.is_as_read()) for constant in self.constants)
        copies = self.writes.copies()
        for constant in self.constants:
            if not constant.is_as_read() and copy_of(constant.tensor, copies) is None:
                raise ValueError(
                    f"{name}: the function reads a tensor of shape {tuple(constant.tensor.shape)} that it did not "
                    "make and that is then written into in place by something else than a torch function, so "
                    "running it again would see another value. Return the new value instead."
                )

    def undo_writes(self) -> None:
        """Restore what the call wrote into."""
        copies = self.writes.copies()
        with torch.no_grad():
            for constant in self.constants:
                copy = copy_of(constant.tensor, copies)
                if copy is not None:
                    constant.tensor.copy_(copy)

    @contextlib.contextmanager
    def substituted(self, name: str, handed: Sequence[Tensor], free: Sequence[Tensor]) -> Generator[None]:
        """Replace the free tensors by the given ones, in the order of ``differentiable``; others are arguments."""
        with unobserved():
            constants = self.constants_again(name)
        with _Substitution(name, self, Origins(handed), list(free), constants) as substitution:
            yield
        substitution.close()

    def constants_again(self, name: str) -> list[Tensor]:
        """Return the constants that the call read; copies of those that it wrote into."""
        copies = self.writes.copies()
        constants = []
        for constant in self.constants:
            copy = copy_of(constant.tensor, copies)
            if copy is None:
                refuse_modified(name, "function", [constant])
            constants.append(constant.tensor if copy is None else copy)
        return constants


def unobserved() -> contextlib.AbstractContextManager[object]:
    """Hide the library's own operations from modes: an enclosing recording counts the calls that it sees."""
    return _torch.without_torch_function()


@contextlib.contextmanager
def _pushed(modes: Sequence[TorchFunctionMode]) -> Generator[None]:
    """Push modes onto the stack, without entering their blocks."""
    for mode in modes:
        _torch.push_function_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _torch.pop_function_mode()


class FunctionModes:
    """The function modes around a call that are no recordings or replays, and whether tensor subclasses take part."""

    def __init__(self) -> None:
        self.modes = [mode for mode in _torch.function_modes() if not isinstance(mode, Observer)]
        self.has_subclasses = _torch.has_torch_function_of_subclasses()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Activate them again: torch takes them off the stack while one handles ``torch.autograd.grad`` itself."""
        active = set(map(id, _torch.function_modes()))
        is_hidden = self.has_subclasses and not _torch.has_torch_function_of_subclasses()
        with (
            _torch.with_torch_function() if is_hidden else contextlib.nullcontext(),
            _pushed([mode for mode in self.modes if id(mode) not in active]),
        ):
            yield


@contextlib.contextmanager
def unrecorded() -> Generator[list[Observer]]:
    """Hide calls from enclosing recordings and replays, which count them, and from no other mode.

    Yields:
        Those that were active, the outermost first.
    """
    hidden = [_torch.pop_function_mode() for _ in range(_torch.num_function_modes())][::-1]
    try:
        with _pushed([mode for mode in hidden if not isinstance(mode, Observer)]):
            yield [mode for mode in hidden if isinstance(mode, Observer)]
    finally:
        for mode in hidden:
            _torch.push_function_mode(mode)


def shown(tensor: Tensor, observers: Sequence[Observer]) -> Tensor:
    """Show a tensor to recordings and replays that are off the stack, which may replace it."""
    if not observers:
        return tensor
    with _pushed(observers):
        return tensor.view_as(tensor)


class _Active(threading.local):
    """The active recorders of this thread, the outermost first."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []


_active = _Active()


def tell_recorders(made: Sequence[Tensor]) -> None:
    """Report the outputs of a ``Function.apply``, which no mode sees, to enclosing recordings."""
    for recorder in _active.recorders:
        recorder.note(made)
        recorder.reads.is_transparent = False


_FREE = -1


class Origins:
    """Where the tensors of a run come from: from which torch function, or which argument they are.

    Attributes:
        made: What torch functions returned, and the arguments, which are made outside.
        codes: For each the number of the torch function and the position among its results, as one number; below
            ``_FREE`` for arguments.
    """

    def __init__(self, arguments: Iterable[Tensor]) -> None:
        self.made: dict[int, weakref.ref[Tensor]] = {}
        self.codes: dict[int, int] = {}
        for position, tensor in enumerate(arguments):
            self.made[id(tensor)] = weakref.ref(tensor)
            self.codes[id(tensor)] = _FREE - 1 - position

    def note(self, tensor: Tensor, number: int, position: int) -> None:
        """Note what a torch function returned."""
        key = id(tensor)
        self.made[key] = weakref.ref(tensor)
        self.codes[key] = number << 16 | position

    def of(self, tensor: Tensor) -> int | None:
        """Return the code of a tensor; None if it is not known."""
        made = self.made.get(id(tensor))
        return self.codes.get(id(tensor)) if made is not None and made() is tensor else None


class Observer(TorchFunctionMode):
    """Observe the torch functions that a function calls, the same ones each time it runs.

    Modes that were active before, which handle every operation or count it, may call functions of their own: within
    a custom ``autograd.Function``, where torch saves its outputs, function modes see these.
    """

    def __init__(self) -> None:
        super().__init__()
        self._modes_before = _torch.num_dispatch_modes()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # A mode is off the stack while it handles an operation.
        if func in _METADATA or _torch.num_dispatch_modes() < self._modes_before:
            return func(*args, **kwargs) if kwargs else func(*args)
        tensors: list[Tensor] = []
        constants: list[Any] = [torch.is_grad_enabled(), func]
        for value in (
            (*args, *kwargs.values()) if kwargs else args
        ):  # without a call for each: it shows in a step
            if isinstance(value, Tensor):
                tensors.append(value)
                constants.append(Tensor)
            elif type(value) in ATOMS:
                constants.append(value)
            else:
                take_apart(value, tensors, constants)
        if kwargs:
            constants += kwargs
        return self._called(tuple(constants), tensors, func, args, kwargs or _NOTHING)

    def _called(
        self,
        entry: Entry,
        tensors: list[Tensor],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        raise NotImplementedError

    def absorb(self, inner: Recorder) -> None:
        """Add the calls of a recording inside this one, which hid them."""
        raise NotImplementedError


class Recorder(Observer):
    """Finds the free tensors of a function while it runs.

    Args:
        reads: Where they are recorded.
        arguments: The arguments of the function.
        enclosing: The recordings and replays to which all calls are reported at the end; :func:`unrecorded` hides
            them until then.
    """

    def __init__(self, reads: Reads, arguments: Sequence[Tensor], enclosing: Sequence[Observer] = ()) -> None:
        super().__init__()
        self.reads = reads
        self.enclosing = enclosing
        self.arguments = {id(tensor): tensor for tensor in arguments}
        self.entrances = {node for tensor in arguments if (node := tensor.grad_fn) is not None}
        self.origins = Origins(arguments)
        self.made, self.codes = self.origins.made, self.origins.codes
        self._free_tensors: dict[tuple[int, bool], tuple[tuple[bool, int], Tensor]] = {}
        self.without_grad: set[int] = set()
        self.own: set[Node] = set(self.entrances)
        """Nodes that only the function can have built on: those of its arguments, and of recordings inside this one,
        since a transform hides what it makes from modes."""
        self.outside: set[Node] = set(self.entrances)

    def _called(
        self,
        entry: Entry,
        tensors: list[Tensor],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if kwargs and kwargs.get("generator") is not None:
            for recorder in (self, *self._enclosing_recorders()):
                recorder.reads.random.note(kwargs["generator"])
        # Before the call, which may raise or leave the operator to the other operand.
        number = self.reads.journal.append(entry)
        free = self._free(tensors)
        if free:
            others = {i: self._read(tensor, number, i) for i, tensor in free.items()}
            args, kwargs = _replace_tensors((args, kwargs), others)
        if may_write(function, kwargs) and (targets := written_by(function, args, kwargs)):
            with unobserved():
                for recorder in (self, *self._enclosing_recorders()):
                    recorder.reads.writes.protect(function, targets)
        result = function(*args, **kwargs)
        made = (result,) if isinstance(result, Tensor) else tensors_in(result)
        self._note_made(made, number, free.values(), entry[0])
        return result

    def _note_made(
        self, made: Sequence[Tensor], number: int, free: Collection[Tensor], grad_mode: bool
    ) -> None:
        """Note what a torch function returned, in one loop: it shows in a step."""
        kinds = []
        for position, tensor in enumerate(made):
            kinds.append((tensor.shape, tensor.dtype))
            if tensor.requires_grad:
                self.reads.journal.with_grad[number] = True
            if free and any(tensor is other for other in free):
                continue
            self.origins.note(tensor, number, position)
            if grad_mode:
                self.without_grad.discard(id(tensor))
            else:
                self.without_grad.add(id(tensor))
        self.reads.made[number] = tuple(kinds)

    def _read(self, tensor: Tensor, number: int, position: int) -> Tensor:
        """Note that torch function ``number`` reads a free tensor; return the tensor to read instead.

        Enclosing recordings and replays see the tensor, and may replace it, before this one keeps it.
        """
        # Without grad mode, as inside the forward of a custom autograd.Function, it is a constant.
        with unobserved():
            differentiable = tensor.requires_grad and torch.is_grad_enabled()
        key = id(tensor), differentiable
        if key not in self._free_tensors:
            kept = self.reads.keep(shown(tensor, self.enclosing), differentiable)
            self._free_tensors[key] = kept, tensor  # whose id is not to be given to another
        slot = self._free_tensors[key][0]
        self.reads.slots.setdefault(number, {})[position] = slot
        return self.reads.differentiable[slot[1]] if differentiable else self.reads.constants[slot[1]].tensor

    def _enclosing_recorders(self) -> list[Recorder]:
        found = [observer for observer in self.enclosing if isinstance(observer, Recorder)]
        return found + [other for recorder in found for other in recorder._enclosing_recorders()]

    def absorb(self, inner: Recorder) -> None:
        """Add the calls of a recording inside this one, which hid them."""
        self.reads.journal.extend(inner.reads.journal)
        self.reads.is_transparent = False
        self.made |= inner.made
        self.without_grad.difference_update(inner.made)
        self.without_grad |= inner.without_grad
        self.note(inner.arguments.values())

    def _free(self, tensors: list[Tensor]) -> dict[int, Tensor]:
        """Return the free ones among tensors by their positions.

        Most tensors are arguments, or were just made with a graph; that is seen without a call of torch.
        """
        doubtful: dict[int, Tensor] = {}
        flow: list[int] = []
        for position, tensor in enumerate(tensors):
            key = id(tensor)
            made = self.made.get(key)
            if made is None or made() is not tensor or key in self.without_grad:
                doubtful[position] = tensor
            flow.append(self.codes.get(key, _FREE))
        self.reads.flow.append(flow)
        return self._free_among(doubtful, flow) if doubtful else doubtful

    def _free_among(self, doubtful: dict[int, Tensor], flow: list[int]) -> dict[int, Tensor]:
        free = {}
        with unobserved():
            for position, tensor in doubtful.items():
                if not self._is_own(tensor):
                    free[position] = tensor
                    flow[position] = _FREE
                elif not self._is_known(tensor):
                    self.reads.is_transparent = False
        return free

    def __enter__(self) -> Recorder:
        for recorder in _active.recorders:
            recorder.own |= self.entrances
        _active.recorders.append(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _active.recorders.remove(self)
        super().__exit__(*error)
        for observer in self.enclosing:
            observer.absorb(self)

    def has_made(self, tensor: Tensor) -> bool:
        """Say whether a torch function of the call returned the tensor."""
        made = self.made.get(id(tensor))
        return made is not None and made() is tensor and id(tensor) not in self.arguments

    def note(self, made: Iterable[Tensor]) -> None:
        """Remember tensors as made by the function, without a torch function that a mode sees."""
        mark = self.without_grad.discard if torch.is_grad_enabled() else self.without_grad.add
        for tensor in made:
            self.made[id(tensor)] = weakref.ref(tensor)
            mark(id(tensor))

    def _is_as_made(self, tensor: Tensor) -> bool:
        """Say whether a tensor has the graph that it was made with: a custom ``autograd.Function`` adds one later."""
        return id(tensor) not in self.without_grad or tensor.is_leaf

    def _is_known(self, tensor: Tensor | None) -> bool:
        """Say whether a tensor is an argument, or the result of a torch function."""
        if tensor is None or id(tensor) in self.arguments:
            return tensor is not None
        made = self.made.get(id(tensor))
        return made is not None and made() is tensor and self._is_as_made(tensor)

    def _is_own(self, tensor: Tensor) -> bool:
        if self._is_known(tensor):
            return True
        if is_functorch_wrapped(tensor):
            # Made by a torch.func transform inside the function; it cannot outlive the transform.
            return True
        return self._depends_on_arguments(tensor)

    def _depends_on_arguments(self, tensor: Tensor) -> bool:
        """Say whether a tensor is the output of a custom ``autograd.Function`` or of a transform, which no mode sees.

        Its graph may also end at leaves that the function made: those of a recording inside this one.
        """
        if tensor.grad_fn in self.own:
            return True
        nodes = list(graph_nodes([tensor], self.outside))
        found = any(self._is_known(getattr(node, "variable", None)) for node in nodes) or any(
            successor in self.own for node in nodes for successor, _ in node.next_functions
        )
        if found:
            self.outside.difference_update(nodes)
        return found

    def origin_of(self, tensor: Tensor) -> int | None:
        """Say where a tensor that the function returns comes from; None if that is not known."""
        return self.origins.of(tensor) if self._is_known(tensor) else None

    def operands(self) -> list[Tensor]:
        """Return what the function read: its arguments, then its free tensors."""
        constants = [constant.tensor for constant in self.reads.constants]
        return [*self.arguments.values(), *self.reads.differentiable, *constants]

    def inputs(self) -> set[Node]:
        """Return the nodes of what the function read, where its own graph ends."""
        return self.entrances | {node for t in self.reads.differentiable if (node := t.grad_fn) is not None}

    def refuse_unseen(self, name: str, nodes: Iterable[Node]) -> None:
        """Raise if a graph ends at a tensor that was never seen: its gradient would be lost."""
        leaves = {id(tensor) for tensor in self.reads.differentiable}
        for node in nodes:
            if type(node) is not _torch.AccumulateGrad:
                continue
            variable = node.variable  # type: ignore[attr-defined]
            if id(variable) not in leaves and not self._is_known(variable):
                raise ValueError(
                    f"{name}: the function depends on a tensor of shape {tuple(variable.shape)} that requires "
                    "grad and that only a custom autograd.Function or a torch.func transform reads. Pass it "
                    "as an argument, or its gradient would be lost."
                )


class _Substitution(Observer):
    """Checks that a second run of a function repeats the first, and substitutes other tensors for its free ones."""

    def __init__(
        self, name: str, reads: Reads, origins: Origins, free: list[Tensor], constants: list[Tensor]
    ) -> None:
        super().__init__()
        self.origins = origins
        self.name = name
        self.reads = reads
        self.free = free
        self.constants = constants
        self.with_graph = torch.is_grad_enabled()
        self.number = 0

    def _called(
        self,
        entry: Entry,
        tensors: list[Tensor],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        number = self.number
        entries = self.reads.journal.entries
        if number < len(entries) and entries[number] == entry:
            self.number = number + 1
        else:
            number = self._advance(entry)
        slots, others = self.reads.slots.get(number), {}
        if slots is not None:
            others = {
                position: (self.free if differentiable else self.constants)[index]
                for position, (differentiable, index) in slots.items()
            }
            args, kwargs = _replace_tensors((args, kwargs), others)
        if not self.reads.is_transparent:
            return function(*args, **kwargs)
        self._compare_origins(number, tensors)
        result = function(*args, **kwargs)
        made = [result] if isinstance(result, Tensor) else tensors_in(result)
        for position, tensor in enumerate(made):
            if not any(tensor is other for other in others.values()):
                self.origins.note(tensor, number, position)
        return result

    def _compare_origins(self, number: int, tensors: list[Tensor]) -> None:
        """Refuse a tensor of this run that was another one in the first; others may have been kept since then."""
        for position, (tensor, code) in enumerate(zip(tensors, self.reads.flow[number], strict=True)):
            if code != _FREE and self.origins.of(tensor) not in (None, code):
                entry = describe(self.reads.journal.entries[number])
                raise self._astray(
                    f"torch function {number}, {entry}, had another tensor in place {position}"
                )

    def _advance(self, entry: Entry) -> int:
        """Return the number that the next torch function had in the first run."""
        if not self.with_graph:
            entry = (None, *entry[1:])
        number = self.reads.journal.find(self.number, entry)
        if number is None:
            raise self._astray(self.reads.journal.difference(self.number, entry))
        self.number = number + 1
        return number

    def absorb(self, inner: Recorder) -> None:
        """Check the calls of a recording inside this replay against those of the first run."""
        for entry in inner.reads.journal.entries:
            self._advance(entry)

    def close(self) -> None:
        """Check that the run did not end early."""
        if not self.reads.journal.is_complete(self.number):
            raise self._astray(f"it ended after {self.number} torch functions")

    def _astray(self, how: str) -> RuntimeError:
        return RuntimeError(
            f"{self.name}: the function took another path when it was recomputed: {how}. {REPEAT}"
        )


def _replace_tensors(value: Any, others: dict[int, Tensor]) -> Any:
    """Replace the tensors at some positions, counted as :func:`tensors_in` yields them."""
    return _replaced(value, others, itertools.count())


def _replaced(value: Any, others: dict[int, Tensor], positions: Iterator[int]) -> Any:
    # Not a closure that calls itself: that is a reference cycle, which keeps the tensors until garbage is collected.
    if isinstance(value, Tensor):
        return others.get(next(positions), value)
    if isinstance(value, list):
        return [_replaced(item, others, positions) for item in value]
    if isinstance(value, tuple):
        items = [_replaced(item, others, positions) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: _replaced(item, others, positions) for key, item in value.items()}
    return value
