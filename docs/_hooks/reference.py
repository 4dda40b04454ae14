"""The pages of the API reference, with docstrings and signatures from the imported library."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from typing import Any

import griffe

import metagrad
from docs._hooks.families import own_pages

PACKAGES = [package for package in metagrad.__all__ if inspect.ismodule(getattr(metagrad, package))]
PACKAGES += ["optim.rules", "info"]


@functools.cache
def public(package: str) -> dict[str, object]:
    """Return the public names of a package of the library and their values."""
    module = importlib.import_module(f"metagrad.{package}")
    names = getattr(module, "__all__", [name for name in vars(module) if _is_own(module, name)])
    return {name: value for name in names if not inspect.ismodule(value := getattr(module, name))}


def _is_own(module: Any, name: str) -> bool:
    return name[0] != "_" and getattr(vars(module)[name], "__module__", None) == module.__name__


def package_page(package: str) -> str:
    """Return the page of a package: its docstring and the docstrings of its public names."""
    about = inspect.getdoc(importlib.import_module(f"metagrad.{package}"))
    pages = own_pages(package)
    names = [
        _pointer(name, pages[name], value) if name in pages else f"::: metagrad.{package}.{name}"
        for name, value in sorted(public(package).items(), key=lambda item: item[0].lower())
    ]
    return "\n\n".join([f"# metagrad.{package}", str(about), *names]) + "\n"


def _pointer(name: str, page: str, value: object) -> str:
    """Return a heading that links to the page of a class."""
    about = (inspect.getdoc(value) or "").partition("\n")[0]
    return f"## [`{name}`](../{page})\n\n{about}"


def names_page() -> str:
    """Return the index of all public names with their first sentences, by package."""
    top = set(metagrad.__all__)
    parts = ["# API index", "Names in bold are also in `metagrad` itself, as in `mg.MAML`."]
    for package in PACKAGES:
        rows = [
            f"| {_linked(package, name, name in top)} | {_first_sentence(value)} |"
            for name, value in sorted(public(package).items(), key=lambda item: item[0].lower())
        ]
        parts += [
            f"## [metagrad.{package}]({package}.md)",
            "\n".join(["| name | description |", "| --- | --- |", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


def _linked(package: str, name: str, is_in_package: bool) -> str:
    link = f"[`{name}`][metagrad.{package}.{name}]"
    return f"**{link}**" if is_in_package else link


def _first_sentence(value: object) -> str:
    if not callable(value):
        return f"`{value!r}`"
    first = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", first).replace("|", "\\|") if "|" in first else first


class Runtime(griffe.Extension):
    """Replaces docstrings and signatures by the values at run time, as optimizers generate them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the sections of examples to the title that griffe parses."""
        if obj.docstring is not None:
            obj.docstring.value = _sections(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Replace public classes by their run-time docstrings and signatures."""
        for package in PACKAGES:
            for name, value in public(package).items():
                if inspect.isclass(value) and value.__module__.startswith("metagrad."):
                    _follow(pkg, f"{package}.{name}", value)


def _follow(package: griffe.Module, path: str, value: type) -> None:
    home = f"{value.__module__}.{value.__qualname__}".removeprefix("metagrad.")
    known = package[home]
    if package[path].is_attribute:  # an alias of a class, such as rules.lion of LionRule
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
