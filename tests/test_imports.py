"""The import graph of the library: layers, no cycles, no imports inside functions, small folders."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "metagrad"
FLOORS = {
    "core": 0,
    "memory": 1,
    "sparse": 1,
    "autograd": 2,
    "distributed": 2,
    "curvature": 3,
    "optim": 4,
    "hypergrad": 5,
    "training": 5,
    "attribution": 6,
    "meta": 6,
    "info": 10,  # reads the version of the package
}
APART = {"tasks", "models"}  # no other package imports them, and they import only core
NOT_IN_THE_CORE = {"hydra", "omegaconf", "wandb", "matplotlib", "pytest"}
# Imported inside functions: SciPy, Pillow and tqdm are optional, only Unix has `resource`, torch's compiler is slow.
OPTIONAL = {"PIL", "scipy", "tqdm", "resource", "torch"}
MOST_FILES = 13  # of a folder, its `__init__` included


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(LIBRARY.rglob("*.py"))}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a module imports and their lines, including imports for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def as_module(name: str) -> str | None:
    """Return the module of the library for an imported name, or None."""
    return name if name in MODULES else parent if (parent := name.rpartition(".")[0]) in MODULES else None


def arrows(path: Path) -> dict[str, int]:
    """Return the modules of the library that a file imports, with their lines."""
    named = ((as_module(name), line) for name, line in imports(parsed(path)))
    return {module: line for module, line in named if module is not None}


@pytest.fixture(scope="module")
def graph() -> dict[str, dict[str, int]]:
    return {name: arrows(path) for name, path in MODULES.items()}


def circle(graph: dict[str, dict[str, int]]) -> list[str]:
    """Return a cycle of modules, with the first one repeated at the end, or an empty list."""
    finished: set[str] = set()
    trail: list[str] = []

    def visit(name: str) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in finished:
            return []
        trail.append(name)
        found = next(filter(None, map(visit, graph[name])), [])
        trail.pop()
        finished.add(name)
        return found

    return next(filter(None, map(visit, graph)), [])


def test_a_circle_is_found():
    assert circle({"a": {"b": 1}, "b": {"c": 1}, "c": {"b": 1}}) == ["b", "c", "b"]
    assert circle({"a": {"b": 1, "c": 1}, "b": {"c": 1}, "c": {}}) == []


def test_no_circles(graph):
    found = circle(graph)
    described = [f"{MODULES[a]}:{graph[a][b]} imports {b}" for a, b in itertools.pairwise(found)]
    assert not found, "\n".join(described)


def test_modules_import_from_floors_below_their_own(graph):
    for name, imported in graph.items():
        floor = [*name.split("."), ""][1]
        for other in imported:
            below = [*other.split("."), ""][1]
            if floor and below != floor:
                assert FLOORS.get(below, 9) < FLOORS.get(floor, 1), f"{MODULES[name]} imports {other}"
                assert floor not in APART or below == "core", f"{MODULES[name]} imports {other}"


def test_nothing_imports_what_belongs_to_experiments():
    for path in MODULES.values():
        for name, line in imports(parsed(path)):
            assert name.split(".")[0] not in NOT_IN_THE_CORE, f"{path}:{line} imports {name}"


def test_functions_import_optional_packages_alone():
    for path in MODULES.values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for name, line in imports(node):
                    assert name.split(".")[0] in OPTIONAL, f"{path}:{line} imports {name} inside a function"


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=lambda f: f.name)
def test_a_folder_can_be_read(folder):
    assert len(list(folder.glob("*.py"))) <= MOST_FILES
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
