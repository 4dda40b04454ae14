"""Temporary substitution of other tensors for the parameters and buffers of modules."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from metagrad.core import _torch
from metagrad.core.norms import every_order
from metagrad.core.reach import Place, claimed, on_the_stack, placed

_CHECKPOINT = inspect.unwrap(checkpoint)


@dataclasses.dataclass(eq=False)
class _Block:
    """A block of :func:`checked_reruns`.

    Attributes:
        frame: The frame that entered the outermost block.
        seen: The parameters of each call of a module in the block.
    """

    frame: types.FrameType | None
    seen: dict[nn.Module, list[list[weakref.ref[Tensor]]]] = dataclasses.field(default_factory=dict)


_blocks: list[_Block] = []


def tensor_places(*modules: nn.Module) -> list[tuple[Place, Tensor]]:
    """Return the parameters and buffers of modules, each with its place."""
    return [
        (Place(holder, name), tensor)
        for root in modules
        for module in root.modules()
        for holder in (module._parameters, module._buffers)
        for name, tensor in holder.items()
        if tensor is not None
    ]


def sole_use(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context manager that prevents other threads from calling a model with substituted weights.

    Raises:
        RuntimeError: Another thread is already calling the model with substituted weights.
    """
    return claimed(place for place, _ in tensor_places(model))


@contextlib.contextmanager
def replaced(model: nn.Module, values: Mapping[int, Tensor]) -> Generator[None]:
    """Context manager that substitutes tensors for the parameters with these ids. Tied weights stay tied.

    In torch 2.13, :func:`torch.func.functional_call` does not restore the parameters of a module that occurs twice
    in a model.
    """
    places = [
        (Place(module._parameters, name), param)
        for module in model.modules()
        for name, param in module._parameters.items()
    ]
    found = [(place, values[id(param)]) for place, param in places if id(param) in values]
    with claimed(place for place, _ in places), placed(found):
        yield


@contextlib.contextmanager
def own_buffers(modules: Iterable[nn.Module]) -> Generator[None]:
    """Context manager in which modules write to copies of their buffers."""
    before = [(m._buffers, dict(m._buffers)) for m in modules if m._buffers]
    try:
        for buffers, kept in before:
            buffers.update({name: None if b is None else b.clone() for name, b in kept.items()})
        yield
    finally:
        for buffers, kept in before:
            buffers.clear()
            buffers.update(kept)


@contextlib.contextmanager
def exchanged(values: Mapping[Tensor, Tensor]) -> Generator[None]:
    """Context manager in which parameters have other values.

    Their storages are replaced, not written to. Graphs hold the parameters, so their versions must not change.
    """
    kept = {p: p.data for p in values}
    try:
        for p, value in values.items():
            p.data = value
        yield
    finally:
        for p, data in kept.items():
            p.data = data


@contextlib.contextmanager
def copied(
    model: nn.Module, decorate: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Generator[nn.Module]:
    """Yield a copy of a model that keeps the current parameters of the model, even after the ``with`` block.

    A model may recompute parts of its forward pass in the backward pass, as :func:`torch.utils.checkpoint` does. The
    recomputation then calls the copy. The copy shares buffers and hooks with the model. If a forward pass assigns
    an attribute of the copy, the model receives the same value when the block ends.

    Args:
        model: The model.
        decorate: Decorator of the ``forward`` of each copied module. ``forward`` may also run in the backward pass.
    """
    copies = {module: object.__new__(type(module)) for module in model.modules()}
    assigned = []
    for module, copy in copies.items():
        given = {name: _of_copies(value, copies) for name, value in vars(module).items()}
        given["_parameters"] = dict(module._parameters)
        given["forward"] = decorate(given.get("forward", types.MethodType(type(module).forward, copy)))
        vars(copy).update(given)
        assigned.append((vars(module), vars(copy), given))
    yield copies[model]
    for original, now, given in assigned:
        original.update({name: value for name, value in now.items() if value is not given.get(name, given)})


def _of_copies(value: Any, copies: Mapping[nn.Module, nn.Module]) -> Any:
    """Return a value in which the modules are replaced by their copies."""
    again = functools.partial(_of_copies, copies=copies)
    if isinstance(value, nn.Module):
        return copies.get(value, value)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, again(value.__self__))
    if isinstance(value, functools.partial):
        return functools.partial(again(value.func), *map(again, value.args), **again(value.keywords))
    if type(value) in (list, tuple, dict):
        items = list(value.values()) if type(value) is dict else value
        parts = [again(item) for item in items]
        if any(part is not item for part, item in zip(parts, items, strict=True)):
            return dict(zip(value, parts, strict=True)) if type(value) is dict else type(value)(parts)
    return value


@contextlib.contextmanager
def checked_reruns(call: str, *, nested: bool = False) -> Generator[None]:
    """Context manager that raises if a module runs again in a backward pass with other parameters.

    :func:`torch.func.functional_call` puts parameters into a module for the duration of a call. Layers that run
    again later, as in :func:`torch.utils.checkpoint`, would read the original parameters of the module.

    Args:
        call: Name of the call in error messages.
        nested: If True, check only within another ``checked_reruns`` block.

    Raises:
        RuntimeError: A module is about to run again with other parameters.
    """
    if nested and not _blocks:
        yield
        return
    block = _Block(_blocks[0].frame if _blocks else _frame_of_with())
    outside = _torch.current_graph_task()

    def check(module: nn.Module, _: object) -> None:
        if _blocks[-1] is not block or not module._parameters:
            return
        params = [p for p in module._parameters.values() if p is not None]
        if _torch.current_graph_task() == outside:
            block.seen.setdefault(module, []).append(list(map(weakref.ref, params)))
            is_substituted = not all(isinstance(p, nn.Parameter) for p in params)
            is_wrong = is_substituted and on_the_stack(_CHECKPOINT, within=block.frame)
        else:
            known = block.seen.get(module, [])
            is_wrong = not all(ref() is p for refs in known for ref, p in zip(refs, params, strict=True))
        if is_wrong:
            raise RuntimeError(
                f"{call}: {type(module).__name__} runs again in the backward pass, without the parameters that the "
                "forward pass puts into it, as torch.func.functional_call does. Call metagrad.checkpoint in place of "
                "torch.utils.checkpoint."
            )

    handle = register_module_forward_pre_hook(check)
    _blocks.append(block)
    try:
        yield
    finally:
        _blocks.remove(block)
        handle.remove()


def _frame_of_with() -> types.FrameType | None:
    """Return the frame whose ``with`` statement enters the context manager that calls this function."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == contextlib.__file__:
        frame = frame.f_back
    return frame


class Read(NamedTuple):
    """A read of a parameter with ``requires_grad=True`` from a module.

    Attributes:
        module: The class and the path of the module.
        value: The parameter, or the tensor that is substituted for it.
        is_original: False if another tensor is substituted for the parameter.
        is_reentrant: Whether :func:`torch.utils.checkpoint` with ``use_reentrant=True`` calls the module.
        is_hidden: Whether an ``autograd.Function`` calls the module, so that its graph lacks the parameter.
    """

    module: str
    value: Tensor
    is_original: bool
    is_reentrant: bool
    is_hidden: bool


@contextlib.contextmanager
def noted_reads(model: nn.Module, reads: list[Read]) -> Generator[None]:
    """Context manager that appends the reads of parameters from the modules of a model to a list."""
    before = [(path, module, module._parameters) for path, module in model.named_modules()]
    for path, module, parameters in before:
        recorder = vars(module)["_parameters"] = _RecordingDict(parameters)
        recorder.first, recorder.reads = dict(parameters), reads
        recorder.name = f"{type(module).__name__} ({path or 'the model itself'})"
    try:
        yield
    finally:
        for _, module, parameters in before:
            vars(module)["_parameters"] = parameters


def refuse_hidden(call: str, reads: Iterable[Read], without: Container[int]) -> None:
    """Raise ``ValueError`` if an ``autograd.Function`` hides parameters from the graph.

    Args:
        call: Name of the caller in the error message.
        reads: The reads of the forward pass.
        without: The ids of parameters that have no gradient.
    """
    for read in reads:
        if read.is_hidden and id(read.value) in without:
            raise ValueError(
                f"{call}: an autograd.Function, such as torch.utils.checkpoint(..., use_reentrant=True), calls "
                f"{read.module} and gives no gradient here. Pass the parameters to apply() and return their "
                "gradients, or call metagrad.checkpoint in its place."
            )


class _RecordingDict(dict[str, Any]):
    """A parameter dict that records the reads of parameters."""

    first: dict[str, Any]
    reads: list[Read]
    name: str

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if value is not None and value.requires_grad:
            is_hidden = not torch.is_grad_enabled() and on_the_stack(*_forwards(torch.autograd.Function))
            is_reentrant = is_hidden and on_the_stack(CheckpointFunction.forward)
            self.reads.append(Read(self.name, value, value is self.first[name], is_reentrant, is_hidden))
        return value


def _forwards(function: type[torch.autograd.Function]) -> Iterator[Callable[..., Any]]:
    """Yield the ``forward`` of each subclass of a Function. ``Function.apply`` itself may have no Python frame."""
    for subclass in function.__subclasses__():
        yield subclass.forward
        yield from _forwards(subclass)


@contextlib.contextmanager
def differentiable_run(call: str, modules: Iterable[nn.Module]) -> Generator[None]:
    """Context manager for a forward pass that is differentiated several times.

    Norms and attention have derivatives of every order. Modules in training mode write to copies of their buffers. A
    module that runs again with other parameters raises ``RuntimeError``, as in :func:`checked_reruns`.
    """
    training = (module for module in modules if module.training)
    with every_order(), own_buffers(training), checked_reruns(call):
        yield
