"""The files of the programs: no circle of imports, few of them in a folder, and studies that fit on a few pages."""

import ast
from pathlib import Path

from tests.code_lines import code_lines

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "experiments").rglob("*.py")
}


def imported(path):
    """Return the modules of the programs that a file imports, including imports for types and inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & FILES.keys()) or ({node.module} & FILES.keys())
    return found


def test_there_is_no_circle_of_imports():
    left = {name: imported(path) for name, path in FILES.items()}
    while leaves := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in leaves}
    assert not left


def test_the_top_has_the_programs():
    top = {path.name for path in (ROOT / "experiments").glob("*.py")}
    assert top == {f"{name}.py" for name in ("__init__", "train", "compare", "table", "watch", "gallery")}


def test_the_programs_stay_small():
    assert max(code_lines(path) for name, path in FILES.items() if ".studies." in name) <= 345
