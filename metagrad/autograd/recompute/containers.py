"""The lists and dicts among the arguments of a call, which may change them.

A recorded call is handed copies, so that a recomputation begins with what the call began with. What the call does to
a copy, as where it appends a penalty to a list, is done to the list of the caller too, once.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from metagrad.core.tree import Tree

_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, deque)


class Containers:
    """The lists and dicts of a tree, beside those of a copy of it.

    Args:
        tree: The tree of the caller.
        copy: One of the same structure, which a function is handed.
    """

    def __init__(self, tree: Tree, copy: Tree) -> None:
        self._pairs = [(own, handed, _content(handed)) for own, handed in _pairs(tree, copy)]

    def write_back(self, originals: Mapping[int, Tensor]) -> None:
        """Do to the tree what was done to the copy since.

        Args:
            originals: The tensors of the caller, by the ids of those in their places in the copy.
        """
        changed = [(own, now) for own, handed, old in self._pairs if not _same(old, now := _content(handed))]
        if not changed:
            return
        owns: dict[int, Any] = {id(handed): own for own, handed, _ in self._pairs}
        owns.update(originals)
        for own, (keys, values) in changed:
            values = [owns.get(id(value), value) for value in values]
            own.clear()
            if keys is None:
                own.extend(values)
            else:
                own.update(zip(keys, values, strict=True))


def _pairs(tree: Tree, copy: Tree) -> Iterator[tuple[Any, Any]]:
    kind = type(tree)
    if kind in _MAPPINGS:
        yield tree, copy
        for key, value in tree.items():
            yield from _pairs(value, copy[key])
    elif kind in _SEQUENCES or isinstance(tree, tuple):
        if not isinstance(tree, tuple):
            yield tree, copy
        for value, other in zip(tree, copy, strict=True):
            yield from _pairs(value, other)


def _content(container: Any) -> tuple[list[Any] | None, list[Any]]:
    if isinstance(container, dict):
        return list(container), list(container.values())
    return None, list(container)


def _same(old: tuple[list[Any] | None, list[Any]], new: tuple[list[Any] | None, list[Any]]) -> bool:
    values = zip(old[1], new[1], strict=False)
    return old[0] == new[0] and len(old[1]) == len(new[1]) and all(a is b for a, b in values)
