"""The private names of torch that the library depends on: all in one place, and all there.

These tests do not import metagrad. They name what an installed torch lacks if ``import metagrad`` fails.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
PLACES = [ROOT / "metagrad" / "core" / "_torch.py"]
MOST_NAMES, MOST_ATTRIBUTES = 29, 22
SOURCES = sorted(set((ROOT / "metagrad").rglob("*.py")) - set(PLACES))

# Reasons for reading private attributes of torch's objects, by type. Other tests cover ``_saved_...`` attributes of
# nodes.
ATTRIBUTES = {
    torch.Tensor: {
        "_version": "counts writes in place",
        "_base": "the tensor of a view",
        "_is_zerotensor": "whether forward mode made it instead of zeros",
        "_indices": "of a COO tensor that was not coalesced",
        "_values": "of a COO tensor that was not coalesced",
    },
    torch.autograd.Function._backward_cls: {
        "_forward_cls": "the Function that a node of the graph belongs to"
    },
    torch.UntypedStorage: {"_cdata": "the identity of a storage"},
    nn.Module(): {
        "_parameters": "where substitution of parameters writes",
        "_buffers": "what a call may rebind",
        "_forward_hooks": "a module with hooks is not its forward alone",
        "_forward_pre_hooks": "likewise",
        "_backward_hooks": "likewise",
        "_backward_pre_hooks": "likewise",
        "_apply": "sparse parameters follow .to()",
        "_load_from_state_dict": "sparse parameters are loaded by their values",
    },
    nn.modules.module: {
        "_global_forward_hooks": "hooks of all modules",
        "_global_forward_pre_hooks": "likewise",
        "_global_backward_hooks": "likewise",
        "_global_backward_pre_hooks": "likewise",
    },
    torch.ops.aten: {
        "_has_same_storage_numel": "torch.compile's question to a wrapper subclass",
        "_to_copy": "`.to()` of rows",
        "_values": "`.values()` of rows",
    },
}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` as it is written, or an empty string."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_of_torch(source: str) -> set[str]:
    """Return what a module imports of torch, and which attributes of it, by their dotted names."""
    tree, found, known = ast.parse(source), set(), {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found.add(alias.name)
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}")
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.AnnAssign) and isinstance(node.value, (ast.Name, ast.Attribute)):
            # As in ``_C: Any = torch._C``.
            known[dotted(node.target)] = dotted(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = dotted(node).partition(".")
            if root in known:
                found.add(f"{known[root]}.{rest}")
    return found


def exists(name: str) -> bool:
    """Return whether torch has a dotted name, and import its modules."""
    value, path = torch, "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if not hasattr(value, part):
            try:
                importlib.import_module(path)
            except ImportError:
                return False
        value = getattr(value, part)
    return True


def private_attributes(source: str) -> tuple[set[str], set[str]]:
    """Return the private attributes that a module reads of any object, and the private names that it defines."""
    read, made = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = isinstance(node.ctx, ast.Store) and dotted(node.value) in ("self", "cls", "made", "new")
            (made if is_own else read).add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            made.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            made |= names
            if "__slots__" in names:
                made |= {item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)}
    return read, made


def test_private_names_of_torch_are_used_in_one_place_alone():
    # Attributes of operators, tensors and modules are in another list.
    elsewhere = ("torch.ops.aten.", "torch.Tensor.", "torch.nn.modules.module.")
    used = {(path.name, name) for path in SOURCES for name in names_of_torch(path.read_text())}
    assert not {(path, name) for path, name in used if is_private(name) and not name.startswith(elsewhere)}


def test_torch_has_every_private_name_that_is_used():
    used = {name for path in PLACES for name in names_of_torch(path.read_text())}
    assert any(is_private(name) for name in used)
    assert not sorted(name for name in used if not exists(name))


def test_private_attributes_of_torch_objects_are_listed_and_there():
    names = {name for attributes in ATTRIBUTES.values() for name in attributes}
    read, made = zip(*(private_attributes(path.read_text()) for path in SOURCES), strict=True)
    of_others = {name for name in set().union(*read) - set().union(*made) if not name.startswith("_saved_")}
    of_python = {"_asdict", "_fields", "_getframe", "_make", "_replace"}
    assert not of_others - of_python - names, "not listed in ATTRIBUTES"
    assert not names - set().union(*read), "listed, and not used any more"
    assert not [
        (owner, name) for owner, found in ATTRIBUTES.items() for name in found if not hasattr(owner, name)
    ]


def test_private_names_become_fewer():
    """The bound only goes down: a private name needs a reason that a user would accept."""
    used = {name for path in PLACES for name in names_of_torch(path.read_text()) if is_private(name)}
    leaves = {name for name in used if not any(other.startswith(f"{name}.") for other in used)}
    assert len(leaves) <= MOST_NAMES
    assert sum(map(len, ATTRIBUTES.values())) <= MOST_ATTRIBUTES


def test_a_name_that_torch_lacks_is_found():
    source = "import torch\nfrom torch._C import _gone\n_C: Any = torch._C\nx = _C._also_gone"
    assert {"torch._C._gone", "torch._C._also_gone"} == {n for n in names_of_torch(source) if not exists(n)}
