"""Nested inputs and outputs of models, as pytrees of tensors.

Models take dicts and tuples. They return dicts, dataclasses, or objects that are both (Hugging Face).
Pytrees of torch support built-in containers and registered types. This module also splits dataclasses, subclasses of
dict and ``SimpleNamespace`` into tensors without registration, and rebuilds them with the type of the user.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from metagrad.core._torch import pytree
from metagrad.core.modules import called_on
from metagrad.core.tree import TreeSpec, leaf_names, tree_flatten, tree_leaves, tree_unflatten

_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, types.FunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


class Form(NamedTuple):
    """A value without its tensors.

    Attributes:
        kind: The pytree specification of a container, or the type of another object. For a tensor it is the tensor
            number, and for a constant the constant itself.
        names: Access expressions of the parts, such as ``[0]`` or ``.logits``. None for tensors and constants.
        parts: Forms of the parts. The parts of an object are the items of a dict, and then the attributes.
        keys: Dict keys of an object that is a dict.
    """

    kind: Any
    names: tuple[str, ...] | None = None
    parts: tuple[Form, ...] = ()
    keys: tuple[object, ...] = ()

    def __hash__(self) -> int:
        return hash((self.names, self.parts))


class _Number(NamedTuple):
    """Placeholder for a tensor: its index in the list of tensors."""

    number: int


class Structured:
    """A nested value as a pytree node whose children are its tensors.

    Args:
        tensors: The tensors of the value, without duplicates.
        form: The value without its tensors.
    """

    def __init__(self, tensors: Sequence[Tensor], form: Form) -> None:
        self.tensors = tensors
        self.form = form

    @property
    def paths(self) -> list[str]:
        """The access expression of each tensor, such as ``[0].logits``."""
        found: dict[int, str] = {}
        _collect_paths(self.form, "", found)
        return [found[number] for number in range(len(self.tensors))]

    def restored(self) -> Any:
        """Return the nested value, with its original container types."""
        return _filled(self.form, self.tensors)


Nested: TypeAlias = "Tensor | Structured"
"""A tensor, or a nested value that contains tensors."""

pytree.register_pytree_node(
    Structured,
    lambda value: (list(value.tensors), value.form),
    lambda tensors, form: Structured(list(tensors), form),  # type: ignore[reportArgumentType]
    flatten_with_keys_fn=lambda value: (  # type: ignore[reportArgumentType]
        [(pytree.SequenceKey(i), tensor) for i, tensor in enumerate(value.tensors)],
        value.form,
    ),
)


def structured(value: object, call: str) -> Nested:
    """Return a nested value as :class:`Structured`. A tensor is returned unchanged.

    Args:
        value: A tensor, or nested containers, dataclasses and subclasses of dict that contain tensors.
        call: Name of the value in error messages, such as "MAML(model, ...): what the model returns".

    Raises:
        TypeError: The value contains an object of another type, which may hide tensors.
    """
    if isinstance(value, (Tensor, Structured)):
        return value
    tensors: list[Tensor] = []
    return Structured(tensors, _form(value, "", tensors, {}, call))


def arguments(x: object, call: str) -> Nested:
    """Return the inputs of a model as :class:`Structured`. A mapping of any type contains keyword arguments.

    Raises:
        TypeError: The inputs contain no tensor, or an object that may hide tensors.
    """
    if isinstance(x, Tensor):
        return x
    value = structured(dict(x) if isinstance(x, Mapping) else x, call)
    if not tree_leaves(value):
        raise TypeError(
            f"{call} must be a tensor, or a nesting of dicts, tuples and lists that holds some, got a "
            f"{type(x).__name__} without tensors."
        )
    return value


def restored(value: Nested) -> Any:
    """Return the original value of :func:`structured`."""
    return value.restored() if isinstance(value, Structured) else value


def call_on(function: Callable[..., Any], x: Nested) -> Any:
    """Call a function on the arguments in a value, see :func:`~metagrad.core.modules.called_on`."""
    return called_on(function, x.restored()) if isinstance(x, Structured) else function(x)


def _form(value: object, path: str, tensors: list[Tensor], numbers: dict[int, int], call: str) -> Form:
    """Return the form of a value, and append its tensors to ``tensors``."""

    def forms(names: Sequence[str], parts: Sequence[object]) -> tuple[Form, ...]:
        named = zip(names, parts, strict=True)
        return tuple(_form(part, path + name, tensors, numbers, call) for name, part in named)

    if isinstance(value, Tensor):
        if id(value) not in numbers:
            numbers[id(value)] = len(tensors)
            tensors.append(value)
        return Form(_Number(numbers[id(value)]))
    children, spec = tree_flatten(value, is_leaf=lambda part: part is not value)
    if not spec.is_leaf():
        names = leaf_names(value, is_leaf=lambda part: part is not value)
        return Form(spec, tuple(names), forms(names, children))
    if isinstance(value, _CONSTANTS):
        return Form(value)
    is_known = isinstance(value, (dict, types.SimpleNamespace)) or dataclasses.is_dataclass(value)
    if not (is_known or _has_only_attributes(value)):
        raise TypeError(_unknown(value, path, call))
    items: Mapping[Any, object] = value if isinstance(value, dict) else {}
    state = _attributes(value)
    names = (*(f"[{key!r}]" for key in items), *(f".{name}" for name in state))
    return Form(type(value), names, forms(names, [*items.values(), *state.values()]), tuple(items))


def _has_only_attributes(value: object) -> bool:
    """Return whether an object holds nothing but attributes, such as the key-value cache of a language model."""
    kind = type(value)
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    is_plain = kind.__new__ is object.__new__ and not has_slots and hasattr(value, "__dict__")
    return is_plain and not callable(value)  # a module is callable


def _attributes(value: object) -> dict[str, object]:
    """Return the attributes of an object, including the slots of a dataclass."""
    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []  # type: ignore[arg-type]
    missing = object()
    slots = {name: part for name in names if (part := getattr(value, name, missing)) is not missing}
    return slots | getattr(value, "__dict__", {})


def _filled(form: Form, tensors: Sequence[Tensor]) -> Any:
    """Build a value from its form and its tensors."""
    if isinstance(form.kind, _Number):
        return tensors[form.kind.number]
    if form.names is None:
        return form.kind
    parts = [_filled(part, tensors) for part in form.parts]
    if isinstance(form.kind, TreeSpec):
        return tree_unflatten(parts, form.kind)
    # The constructor may compute, so this restores the state without calling it.
    new = form.kind.__new__(form.kind)
    set_item = OrderedDict.__setitem__ if isinstance(new, OrderedDict) else dict.__setitem__
    for key, part in zip(form.keys, parts, strict=False):
        set_item(new, key, part)  # type: ignore[arg-type]
    for name, part in zip(form.names[len(form.keys) :], parts[len(form.keys) :], strict=True):
        object.__setattr__(new, name[1:], part)
    return new


def _collect_paths(form: Form, path: str, found: dict[int, str]) -> None:
    if isinstance(form.kind, _Number):
        found.setdefault(form.kind.number, path)
    for name, part in zip(form.names or (), form.parts, strict=True):
        _collect_paths(part, path + name, found)


def _unknown(value: object, path: str, call: str) -> str:
    kind = type(value).__name__
    if kind == "ndarray":
        return f"{call} holds a NumPy array{f' at {path}' if path else ''}. Use torch.from_numpy(array)."
    return (
        f"{call} holds a {kind}{f' at {path}' if path else ''}, which may hide tensors. Use tensors, numbers, dicts, "
        "tuples, lists, dataclasses or subclasses of dict, or make it known by "
        f"torch.utils._pytree.register_pytree_node({kind}, ...)."
    )
