"""Checks of the pair that a step returns, and the stacking of ``aux``."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from metagrad.core.tree import ATOMS, Tree, dissect, leaf_names, tree_flatten, tree_structure, tree_unflatten

Pair: TypeAlias = "tuple[Tree, Tree]"
"""A state and the aux of a step, or of some steps."""


class Arguments(NamedTuple):
    """The arguments of consecutive steps after the state and the number of the step.

    Attributes:
        shared: The arguments that all steps receive.
        rows: The row of the inputs of each step. Empty if the steps have no inputs.
    """

    shared: tuple[Any, ...]
    rows: tuple[Tree, ...] = ()

    def at(self, index: int) -> tuple[Any, ...]:
        """Return the arguments of one of the steps."""
        return *self.rows[index : index + 1], *self.shared

    def part(self, first: int, last: int) -> Arguments:
        """Return the arguments of some of the steps."""
        return Arguments(self.shared, self.rows[first:last])


def rows_of(inputs: Tree, steps: int) -> tuple[Tree, ...]:
    """Return the rows of ``inputs``, one for each step.

    Raise ``ValueError`` if a tensor has a different number of rows.

    The cotangents of all rows are stacked once. Otherwise autograd would sum T tensors of the size of
    ``inputs``.
    """
    tensors, structure = dissect(inputs)
    for name, leaf in zip(leaf_names(inputs, "inputs"), tree_flatten(inputs)[0], strict=True):
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.shape[:1] != (steps,):
            found = f"{tuple(leaf.shape)}, {leaf.layout}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(
                f"unroll(..., inputs): expected dense tensors with a first axis of length steps={steps}, a row for "
                f"each step, such as torch.stack(list of {steps} tensors), got {name}: {found}. Pass what all steps "
                "share in *args."
            )
    return tuple(structure.fill(rows) for rows in zip(*(t.unbind() for t in tensors), strict=True))


def checked_pair(result: object, t: int) -> Pair:
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
        tensors, self.structure = dissect(state)  # without the state itself, which would outlive its step
        self.kinds = [(t.shape, t.dtype) for t in tensors]
        self.form = _form(state)

    def __call__(self, state: Tree, t: int) -> None:
        """Raise ``ValueError`` if the state after step ``t`` differs in one of them."""
        if _form(state) == self.form:
            return
        first = self.structure.fill([torch.empty(s, dtype=dtype, device="meta") for s, dtype in self.kinds])
        if (spec := tree_structure(state)) != tree_structure(first):
            raise ValueError(
                f"unroll(step, ...): step must return a state of the structure it takes, {tree_structure(first)}, "
                f"got {spec} at t={t}."
            )
        names = leaf_names(first, "state")
        for name, before, leaf in zip(names, tree_flatten(first)[0], tree_flatten(state)[0], strict=True):
            if _kind(leaf) != _kind(before):
                raise ValueError(
                    f"unroll(step, ...): step must keep shapes and dtypes; {name} was {_kind(before)}, "
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
