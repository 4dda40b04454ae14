"""Checks of the pair that a step returns, and the stacking of ``aux``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metagrad.core.tree import ATOMS, Tree, leaf_names, tree_flatten, tree_map, tree_structure, tree_unflatten


def checked_pair(result: object, t: int) -> tuple[Tree, Tree]:
    """Return the result of step ``t``. Raise ``ValueError`` unless it is a pair."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"unroll(step, ...): step must return (state, aux), got {type(result).__name__} at t={t}. "
            "Return (state, None) if there is nothing to report."
        )
    return result


class StateCheck:
    """Checks that every state has the structure, shapes and dtypes of the first state."""

    def __init__(self, state: Tree) -> None:
        self.places = tree_map(lambda leaf: 0, state)  # not the state itself, which would outlive its step
        self.spec = tree_structure(state)
        self.kinds = [_kind(leaf) for leaf in tree_flatten(state)[0]]
        self.form = _form(state)

    def __call__(self, state: Tree, t: int) -> None:
        """Raise ``ValueError`` if the state after step ``t`` differs in one of them."""
        if _form(state) == self.form:
            return
        leaves, spec = tree_flatten(state)
        if spec != self.spec:
            raise ValueError(
                f"unroll(step, ...): step must return a state of the structure it takes, {self.spec}, "
                f"got {spec} at t={t}."
            )
        for index, leaf in enumerate(leaves):
            if _kind(leaf) != self.kinds[index]:
                name = leaf_names(self.places, "state")[index]
                raise ValueError(
                    f"unroll(step, ...): step must keep shapes and dtypes; {name} was {self.kinds[index]}, "
                    f"and is {_kind(leaf)} after t={t}."
                )


def _kind(leaf: object) -> tuple[Any, ...]:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else ("a constant",)


def _form(tree: Tree) -> object:
    """Return a value that is equal only for trees of the same structure, shapes and dtypes. It is fast."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype
    kind = type(tree)
    if kind is dict:
        return kind, *tree, *map(_form, tree.values())
    if isinstance(tree, (tuple, list)):
        return kind, *map(_form, tree)
    return "a constant" if kind in ATOMS else object()


def stack(collected: list[Tree]) -> Tree:
    """Stack the aux of all steps along a new first axis."""
    flat = [tree_flatten(aux) for aux in collected]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("unroll(step, ...): aux must have the same structure at every step.")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_stack_column(column) for column in columns], flat[0][1])


def _stack_column(column: tuple[Any, ...]) -> Tensor | None:
    if all(isinstance(value, Tensor) for value in column):
        return torch.stack(column)
    if all(value is None for value in column):
        return None
    kind = next(type(value).__name__ for value in column if not isinstance(value, Tensor))
    raise TypeError(f"unroll(step, ...): aux must hold tensors or None, got {kind}.")
