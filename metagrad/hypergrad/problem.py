"""A bilevel problem: two losses, the parameters that minimise the inner one, and the hyper-parameters of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from metagrad.core.checks import check_function, is_a
from metagrad.core.tree import (
    Params,
    Tree,
    is_differentiable,
    leaf_names,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from metagrad.curvature.operators.space import check_params, values_of, with_values
from metagrad.curvature.solvers.solution import Solution
from metagrad.sparse.matrix.tensor import SparseTensor
from metagrad.sparse.tables.row_sparse import RowSparse

CREATE = "hypergradient(..., create_graph=True)"
CALL = "hypergradient(outer_loss, inner_loss, params, hyper)"

Parameters: TypeAlias = "Mapping[str, Tensor | SparseTensor]"

BilevelLoss: TypeAlias = Callable[[Any, Any], Tensor]
"""``loss(params, hyper)``, a tensor with one element."""


class Derivative(NamedTuple):
    """The result of a method.

    Attributes:
        gradient: With respect to the leaves of ``hyper``; None where no loss depends on one.
        solution: How the linear solve ended, and what it cost; None where there was none.
        residual: That of the solve, relative to its right-hand side.
    """

    gradient: Sequence[Tensor | None]
    solution: Solution | None = None
    residual: float = 0.0


class Method(Protocol):
    """A hypergradient: a frozen dataclass of its hyper-parameters."""

    def estimate(self, problem: Problem) -> Derivative:
        """Estimate the derivative; failure is a value."""
        ...


@dataclass(frozen=True, eq=False)
class Problem:
    """A bilevel problem at given parameters and hyper-parameters; :func:`hypergradient` makes it.

    Attributes:
        outer_loss: ``outer_loss(params, hyper)``, one number.
        inner_loss: ``inner_loss(params, hyper)``, one number, deterministic.
        params: Parameters by name, constants: where the inner loss is least, or where steps begin.
        hyper: A tree of the hyper-parameters.
        create_graph: Put the derivative on the tape.

    Raises:
        TypeError: A leaf of ``hyper`` is no floating point tensor.
        ValueError: ``hyper`` holds no tensor.
    """

    outer_loss: BilevelLoss
    inner_loss: BilevelLoss
    params: Parameters
    hyper: Tree
    create_graph: bool = False

    def __post_init__(self) -> None:
        if torch.is_inference_mode_enabled():
            raise ValueError(f"{CALL}: inside torch.inference_mode() there is no tape. Call it outside.")
        check_function(CALL, "outer_loss", self.outer_loss)
        check_function(CALL, "inner_loss", self.inner_loss)
        check_params(CALL, self.params)
        leaves = tree_leaves(self.hyper)
        for name, leaf in zip(leaf_names(self.hyper, "hyper"), leaves, strict=True):
            if not isinstance(leaf, Tensor) or not is_differentiable(leaf):
                got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
                raise TypeError(f"{CALL}: {name} must be a floating point tensor, got {got}.")
        if not leaves:
            raise ValueError(f"{CALL}: hyper holds no tensor.")

    def variables(self) -> Params:
        """Return new leaves with the numbers of the parameters: of a SparseTensor its values."""
        return {name: values_of(p).detach().requires_grad_() for name, p in self.params.items()}

    def hyper_leaves(self) -> list[Tensor]:
        """Return variables with the numbers of ``hyper``, on its tape where the derivative goes there.

        They are others than the leaves themselves: a partial derivative does not go through a second place where a
        tensor stands, or through one that was computed from another.
        """
        leaves = tree_leaves(self.hyper)
        return [
            leaf.view_as(leaf) if self.create_graph and leaf.requires_grad else leaf.detach().requires_grad_()
            for leaf in leaves
        ]

    def outer(self, values: Params, hyper: Sequence[Tensor]) -> Tensor:
        """Evaluate the outer loss on leaves."""
        return self._one_number("outer_loss", self.outer_loss, values, hyper)

    def inner(self, values: Params, hyper: Sequence[Tensor]) -> Tensor:
        """Evaluate the inner loss on leaves."""
        return self._one_number("inner_loss", self.inner_loss, values, hyper)

    def wrapped(self, values: Params) -> dict[str, Tensor | SparseTensor]:
        """Return leaves in the form of the parameters."""
        return with_values(self.params, values)

    def hyper_of(self, leaves: Sequence[Tensor]) -> Tree:
        """Return leaves in the tree of ``hyper``."""
        return tree_unflatten(list(leaves), tree_flatten(self.hyper)[1])

    def _one_number(
        self, what: str, function: BilevelLoss, values: Params, hyper: Sequence[Tensor]
    ) -> Tensor:
        loss = function(self.wrapped(values), self.hyper_of(hyper))
        if not is_a(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            got = f"{tuple(loss.shape)} of {loss.dtype}" if is_a(loss, Tensor) else type(loss).__name__
            raise ValueError(f"{CALL}: {what}(params, hyper) must return one real number, got {got}.")
        return loss.reshape(())


def gradients(loss: Tensor, inputs: Sequence[Tensor], *, create_graph: bool = False) -> list[Tensor | None]:
    """Differentiate a loss; None where it does not depend on an input, or on any."""
    if not loss.requires_grad:
        return [None] * len(inputs)
    return list(torch.autograd.grad(loss, inputs, create_graph=create_graph, allow_unused=True))


def refuse_sparse(slopes: Params) -> None:
    """Raise ``ValueError`` for row-sparse gradients."""
    for name, slope in slopes.items():
        if isinstance(slope, RowSparse) or slope.layout != torch.strided:
            raise ValueError(
                f"{CALL}: the gradient of the table {name!r} is sparse, and hypergradients need dense ones. Take an "
                "embedding without sparse gradients."
            )


def minus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Subtract, where None is zero."""
    if b is None:
        return a
    return -b if a is None else a - b
