"""The C++ kernels of a graph, compiled as few files.

Inductor (torch 2.11 to 2.15) makes a file of every kernel. Of the 0.6 s that g++ takes for one, 0.5 s go to the
headers, precompiled as they are, and a meta-gradient of five steps has 36 kernels.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_FEWEST = 4
"""So many kernels take as long as the headers of a file."""


def sharing_files(cache: Any, most: int, future: Callable[[Callable[[], Any]], Any]) -> Any:
    """Return a class like inductor's cache of kernels, which compiles those of a graph together.

    Inductor names all kernels of a graph before it waits for the first: that is when they are compiled.

    Args:
        cache: Inductor's, whose ``load_async`` starts to compile a file and returns what imports it.
        most: How many files may be compiled at once.
        future: Makes what inductor waits for of what returns a kernel.
    """
    named: dict[str, ModuleType | None] = {}

    def compile_named(*args: Any, **settings: Any) -> None:
        groups = divided([source for source, module in named.items() if module is None], most)
        modules = [cache.load_async(one_file(sources), *args, **settings) for sources in groups]
        for sources, module in zip(groups, modules, strict=True):
            first = module()
            for place, source in enumerate(sources):
                named[source] = (
                    _extension(f"{_package(first)}.{_name(place)}", first.__file__) if place else first
                )

    class Sharing(cache):
        @classmethod
        def load_async(cls, source: str, *args: Any, **settings: Any) -> Callable[[], ModuleType | None]:
            named.setdefault(source, None)

            def module() -> ModuleType | None:
                if named[source] is None:
                    compile_named(*args, **settings)
                return named[source]

            return module

        @classmethod
        def load_pybinding(
            cls, *args: Any, **settings: Any
        ) -> Any:  # asked for where one file is compiled at once
            return future(cls.load_pybinding_async(*args, **settings))

    return Sharing


def divided(sources: Sequence[str], most: int) -> list[Sequence[str]]:
    """Return the sources of each file."""
    files = max(1, min(most, len(sources) // _FEWEST))
    return [sources[first::files] for first in range(files)]


def one_file(sources: Sequence[str]) -> str:
    """Return the source of several extension modules of Python that are all called ``kernel``.

    In the file they are ``kernel``, ``kernel_1``, ``kernel_2`` and so on, each in a namespace of its own, after the
    headers of all.
    """
    lines = [source.splitlines() for source in sources]
    headers = dict.fromkeys(line for own in lines for line in own if _includes(line))
    bodies = ["\n".join(line for line in own if not _includes(line)) for own in lines]
    return "\n".join([*headers, *(_module(_name(place), body) for place, body in enumerate(bodies))])


def _includes(line: str) -> bool:
    return line.lstrip().startswith("#include")


def _name(place: int) -> str:
    return f"kernel_{place}" if place else "kernel"


def _module(name: str, body: str) -> str:
    """Return a module of another name: that of the kernel, and of what Python calls to make the module."""
    names = {"kernel": name, "PyInit_kernel": f"PyInit_{name}"}
    defined = [f"#define {old} {new}" for old, new in names.items()]
    forgotten = [f"#undef {old}" for old in names]
    return "\n".join([*defined, f"namespace {name}_file {{", body, "}", *forgotten])


def _package(first: ModuleType) -> str:
    """Return what inductor makes of a file: a name that no other has."""
    assert first.__spec__ is not None
    return first.__spec__.name.rpartition(".")[0]


def _extension(name: str, file: str) -> ModuleType:
    """Import an extension module of Python, once: Python makes one module of all that are loaded again by a name."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no extension module.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
