"""Pytrees: nested dicts, lists, tuples and named tuples of tensors.

metagrad uses the pytrees of torch, so it accepts every structure that torch.func accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, overload

import torch
from torch import Tensor

from metagrad.core import _torch
from metagrad.core._torch import pytree

Tree: TypeAlias = Any
"""A pytree: a tensor, or a dict, list, tuple or named tuple of pytrees."""

Params: TypeAlias = dict[str, Tensor]
"""Parameters by name, as in ``dict(model.named_parameters())``. With vectorized tasks, dimension 0 is the task."""

LossFn: TypeAlias = Callable[[Tree, Tree], Tensor]
"""``loss_fn(output, y)``, which maps the model output and the targets to a tensor with one element."""

ATOMS: frozenset[type] = frozenset(
    {int, float, bool, complex, str, bytes, type(None), type(...)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types of plain Python and torch constants, which can be compared by value."""

TreeSpec = pytree.TreeSpec
IsLeaf: TypeAlias = Callable[[Any], bool]


class _TreeMap(Protocol):
    """The type of ``tree_map``, which maps over the leaves of pytrees with the same structure."""

    @overload
    def __call__(self, func: Callable[[Any], object], tree: Tree, /) -> Tree: ...
    @overload
    def __call__(self, func: Callable[[Any, Any], object], tree: Tree, other: Tree, /) -> Tree: ...
    @overload
    def __call__(self, func: Callable[..., object], *trees: Tree, is_leaf: IsLeaf | None = None) -> Tree: ...


tree_flatten = pytree.tree_flatten
tree_leaves = pytree.tree_leaves
tree_map: _TreeMap = pytree.tree_map
tree_map_only = pytree.tree_map_only
tree_structure = pytree.tree_structure
tree_unflatten = pytree.tree_unflatten


def leaf_names(tree: Tree, root: str = "", is_leaf: IsLeaf | None = None) -> list[str]:
    """Return the path of every leaf as a Python expression, such as ``params['layer.weight']``."""
    return [root + pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree, is_leaf)[0]]


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, such as the arguments of a torch function."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: object, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for item in items:
        # This runs for the arguments of every recorded function, so there is no recursive call for a leaf.
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple, dict)):
            _collect(item, found)


def plain_dicts(tree: Tree) -> Tree:
    """Replace mappings that are no dicts, such as the ``BatchEncoding`` of a tokenizer, by dicts."""
    return tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else leaf, tree)


def plain_values(namespace: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a namespace whose types are in ``ATOMS``."""
    return {key: value for key, value in namespace.items() if type(value) in ATOMS}


_PLACEHOLDER = object()
"""Placeholder for a tensor in a structure."""


class _Branch(NamedTuple):
    """A container without its tensors.

    Attributes:
        make: Function that builds the container from a list of its parts.
        parts: Branches, constants and placeholders.
    """

    make: Callable[[list[Any]], Any]
    parts: list[Any]


class Structure(NamedTuple):
    """A pytree without its tensors."""

    form: Any

    def fill(self, tensors: Sequence[Tensor]) -> Tree:
        """Build the pytree from other tensors, in the order of the original tensors."""
        return _fill(self.form, iter(tensors))


def dissect(tree: Tree) -> tuple[list[Tensor], Structure]:
    """Split a pytree into its tensors and its :class:`Structure`."""
    tensors: list[Tensor] = []
    return tensors, Structure(_dissect(tree, tensors))


def _dissect(tree: Tree, tensors: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return _PLACEHOLDER
    kind = type(tree)
    if kind in ATOMS:
        return tree
    if kind is dict:
        keys = list(tree)
        return _Branch(lambda parts: dict(zip(keys, parts, strict=True)), _parts_of(tree.values(), tensors))
    if kind is tuple or kind is list:
        return _Branch(kind, _parts_of(tree, tensors))
    if isinstance(tree, tuple) and hasattr(tree, "_make"):
        return _Branch(tree._make, _parts_of(tree, tensors))  # type: ignore[reportAttributeAccessIssue]
    leaves, spec = tree_flatten(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        return tree
    return _Branch(lambda parts: tree_unflatten(parts, spec), _parts_of(leaves, tensors))


def _parts_of(trees: Iterable[Tree], tensors: list[Tensor]) -> list[Any]:
    return [_dissect(tree, tensors) for tree in trees]


def _fill(form: Any, supply: Iterator[Tensor]) -> Tree:
    if form is _PLACEHOLDER:
        return next(supply)
    if type(form) is _Branch:
        return form.make([_fill(part, supply) for part in form.parts])
    return form


def constants(tree: Tree) -> Tree:
    """Detach every tensor. The results do not require grad."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def detached(tree: Tree) -> Tree:
    """Detach every tensor. The results keep the ``requires_grad`` flags of the originals."""
    return tree_map(fresh_leaf, tree)


def with_fresh_views(new: Params, old: Params) -> Params:
    """Return new parameters, in which each tensor that is also in ``old`` is replaced by a view.

    Other new parameters can depend on that tensor. A gradient with respect to the view is a partial derivative,
    which excludes that dependence. Compiled code has partial derivatives anyway.
    """
    if torch.compiler.is_compiling():
        return new
    before = {id(p) for p in old.values()}
    return {name: p.view_as(p) if id(p) in before else p for name, p in new.items()}


def fresh_leaf(value: Any) -> Any:
    """Return a detached tensor with the same memory and ``requires_grad``. Other values are returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    return as_variable(value, value) if value.requires_grad else value.detach()


def as_variable(value: Tensor, like: Tensor) -> Tensor:
    """Return a detached tensor that can be differentiated with respect to.

    A torch.func transform does not accept new graph leaves. Inside a transform, the result therefore depends on
    ``like``, with a derivative of zero. ``like`` must be a variable of the active transform.
    """
    value = value.detach()
    if not _torch.functorch_is_active():
        return value.requires_grad_()
    with torch.enable_grad():
        return torch.where(value.new_ones((), dtype=torch.bool), value, like.expand_as(value))


HALF = (torch.float16, torch.bfloat16)


def widened(x: Tensor) -> Tensor:
    """Return a half-precision tensor in float32, and other tensors unchanged."""
    return x.float() if x.dtype in HALF else x


def zeros_for_none(gradients: Iterable[Tensor | None], like: Iterable[Tensor]) -> list[Tensor]:
    """Return gradients, with None replaced by zeros."""
    return [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, like, strict=True)]


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Add two gradients. None counts as zero."""
    return b if a is None else a if b is None else a + b


def is_differentiable(tensor: Tensor) -> bool:
    """Return whether tensors of this dtype can have a gradient."""
    return torch.is_floating_point(tensor) or torch.is_complex(tensor)
