"""The pages of the reference, and docstrings and signatures as they stand when the library is imported."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from typing import Any

import griffe

import metagrad
from docs._hooks.families import own_pages

ROOMS = [room for room in metagrad.__all__ if inspect.ismodule(getattr(metagrad, room))]
ROOMS += ["optim.rules", "info"]


@functools.cache
def public(room: str) -> dict[str, object]:
    """Return the public names of a room of the library, and what they are."""
    module = importlib.import_module(f"metagrad.{room}")
    names = getattr(module, "__all__", [name for name in vars(module) if _is_own(module, name)])
    return {name: value for name in names if not inspect.ismodule(value := getattr(module, name))}


def _is_own(module: Any, name: str) -> bool:
    return name[0] != "_" and getattr(vars(module)[name], "__module__", None) == module.__name__


def room_page(room: str) -> str:
    """Return the page of a room: its docstring, and those of its public names."""
    about = inspect.getdoc(importlib.import_module(f"metagrad.{room}"))
    pages = own_pages(room)
    names = [
        _pointer(name, pages[name], value) if name in pages else f"::: metagrad.{room}.{name}"
        for name, value in sorted(public(room).items(), key=lambda item: item[0].lower())
    ]
    return "\n\n".join([f"# metagrad.{room}", str(about), *names]) + "\n"


def _pointer(name: str, page: str, value: object) -> str:
    """Return what stands for a class that has a page of its own."""
    about = (inspect.getdoc(value) or "").partition("\n")[0]
    return f"## [`{name}`](../{page})\n\n{about}"


def names_page() -> str:
    """Return the page of all public names, by room."""
    package = set(metagrad.__all__)
    parts = ["# All public names", "Names in bold are in `metagrad` itself: `mg.MAML`."]
    for room in ROOMS:
        links = [_linked(room, name, name in package) for name in sorted(public(room), key=str.lower)]
        parts += [f"## [metagrad.{room}]({room}.md)", " &middot; ".join(links)]
    return "\n\n".join(parts) + "\n"


def _linked(room: str, name: str, is_in_package: bool) -> str:
    link = f"[`{name}`][metagrad.{room}.{name}]"
    return f"**{link}**" if is_in_package else link


class Runtime(griffe.Extension):
    """Docstrings and signatures that are made when the library is imported, as those of optimizers are."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Name the sections of examples as griffe knows them."""
        if obj.docstring is not None:
            obj.docstring.value = _sections(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Let the public names be what they are at run time."""
        for room in ROOMS:
            for name, value in public(room).items():
                if inspect.isclass(value) and value.__module__.startswith("metagrad."):
                    _follow(pkg, f"{room}.{name}", value)


def _follow(package: griffe.Module, path: str, value: type) -> None:
    home = f"{value.__module__}.{value.__qualname__}".removeprefix("metagrad.")
    known = package[home]
    if package[path].is_attribute:  # another name of the class, as rules.lion is of LionRule
        package[path.rpartition(".")[0]].set_member(
            known_as := path.rpartition(".")[2], griffe.Alias(known_as, known)
        )
    if known.docstring is not None:
        known.docstring.value = _sections(inspect.getdoc(value) or "")
    if not _is_protocol(value) and list(_parameters(value)) != [
        p.name for p in known.parameters if p.name != "self"
    ]:
        known.set_member("__init__", griffe.Function("__init__", parameters=_written(value)))


def _is_protocol(value: type) -> bool:
    return getattr(value, "_is_protocol", False)


def _sections(docstring: str) -> str:
    return re.sub(r"^Example:$", "Examples:", docstring, flags=re.MULTILINE)


def _parameters(value: type) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(value).parameters)
    except ValueError:  # a protocol, or an enumeration
        return {}


def _written(value: type) -> griffe.Parameters:
    parameters = [
        griffe.Parameter(
            p.name,
            kind=griffe.ParameterKind(p.kind.description),
            annotation=None if p.annotation is p.empty else _annotation(p.annotation),
            default=None if p.default is p.empty else re.sub(r"^<factory>$", "...", repr(p.default)),
        )
        for p in _parameters(value).values()
    ]
    return griffe.Parameters(
        griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword), *parameters
    )


def _annotation(value: Any) -> str:
    return getattr(value, "__forward_arg__", str(value))
