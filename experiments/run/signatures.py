"""Schemas made of signatures: a key for each argument, with the type, default and sentence that it has there."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from hydra.utils import get_object
from omegaconf import MISSING

from experiments.run.help import arguments_of
from experiments.run.schema import Target, key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

TYPES: dict[str, Any] = {
    "Hyperparameter": float,
    "float": float,
    "int": int,
    "bool": bool,
    "str": str,
    "Literal": str,
    "tuple": list[float],
}
"""Types of keys by the beginning of an annotation."""


class Argument(NamedTuple):
    """An argument of a class or a function."""

    name: str
    annotation: str
    default: Any
    sentence: str
    inherited: bool  # whether it is an argument of the class above, which takes `**arguments`


def arguments(make: Any, inherited: bool = False) -> Iterator[Argument]:
    """Yield the arguments of a class or a function, and after them those that it passes on to the class above."""
    sentences, passes_on = arguments_of(f"{make.__module__}.{make.__qualname__}"), False
    for name, argument in inspect.signature(make).parameters.items():
        if argument.kind is inspect.Parameter.VAR_KEYWORD:
            passes_on = isinstance(make, type)
        else:
            words = argument.annotation
            text = words if isinstance(words, str) else inspect.formatannotation(words)
            yield Argument(name, text, argument.default, sentences.get(name, ""), inherited)
    if passes_on:
        above = next(parent for parent in make.__mro__[1:] if "__init__" in vars(parent))
        chosen = _chosen_by(make)
        yield from (one for one in arguments(above, inherited=True) if one.name not in chosen)


def _chosen_by(make: type) -> set[str]:
    """Return the arguments of the class above that a class sets itself, in its call of `super().__init__`."""
    calls = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(make.__init__))))
    above = (
        call for call in calls if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__"
    )
    return {word.arg for call in above for word in call.keywords if word.arg is not None}


def schema_of(
    target: str,
    base: type[Target],
    *,
    types: Mapping[str, Any] = TYPES,
    other: Any = None,
    without: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> type[Any]:
    """Return the schema of a class: a key for each argument that its docstring explains.

    Args:
        target: Its dotted name.
        base: The schema that it extends.
        types: Types of keys by the first word of an annotation.
        other: The type of the other keys; None leaves them out.
        without: Arguments that have no key.
        defaults: Defaults that differ from those of the class.
    """
    make = get_object(target)
    keys: dict[str, tuple[str, Any, Any]] = {"_target_": ("_target_", str, key("What is built.", target))}
    for argument in arguments(make):
        kind = _type(argument.annotation, types, other)
        if kind is not None and argument.sentence and argument.name not in (*keys, *without):
            default = (defaults or {}).get(argument.name, argument.default)
            keys[argument.name] = (argument.name, kind, _field(default, argument))
    return make_dataclass(make.__name__, list(keys.values()), bases=(base,))


def option_name(name: str) -> str:
    """Return the name of a class in snake case."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _type(annotation: str, types: Mapping[str, Any], other: Any) -> Any:
    words = annotation.replace("[", " ").split()
    is_number = words[0] == "Literal" and not {"'", '"'} & set(annotation)
    kind = int if is_number else types.get(words[0], other)
    return Optional[kind] if kind is not None and words[-1] == "None" else kind  # noqa: UP045  # made at run time


def _field(default: Any, argument: Argument) -> Any:
    metadata = {"help": argument.sentence, "inherited": argument.inherited}
    if isinstance(default, (tuple, list)):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=MISSING if default is inspect.Parameter.empty else default, metadata=metadata)
