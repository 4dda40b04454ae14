"""A bilevel problem: two losses, the parameters that minimize the inner loss, and the hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from metagrad.core.checks import check_function, is_a
from metagrad.core.substitution import checked_reruns
from metagrad.core.tree import Params, Tree, leaf_names, tree_leaves, tree_map, zeros_for_none
from metagrad.curvature.operators.space import Parameters, check_params, values_of, with_values
from metagrad.curvature.solvers.solution import Solution
from metagrad.sparse.matrix.tensor import SparseTensor
from metagrad.sparse.tables.row_sparse import RowSparse

CREATE = "hypergradient(..., create_graph=True)"
CALL = "hypergradient(outer_loss, inner_loss, params, hyper)"

BilevelLoss: TypeAlias = Callable[[Any, Any], Tensor]
"""``loss(params, hyper)``, a tensor with one element."""


class Derivative(NamedTuple):
    """The result of a method.

    Attributes:
        gradient: Derivative with respect to each leaf of ``hyper``. None if no loss depends on the leaf.
        solution: Result and cost of the linear solve. None if there was no solve.
        residual: Residual of the solve, relative to its right-hand side.
    """

    gradient: Sequence[Tensor | None]
    solution: Solution | None = None
    residual: float = 0.0


class HypergradientMethod(Protocol):
    """A hypergradient method: a frozen dataclass of its hyperparameters.

    If the derivative of its result is correct, it has an attribute ``is_exact = True``.
    """

    def estimate(self, problem: Problem) -> Derivative:
        """Estimate the derivative. A failed solve is part of the result."""
        ...


@dataclass(frozen=True, eq=False)
class Problem:
    """A bilevel problem at given parameters and hyperparameters. Made by :func:`hypergradient`.

    Attributes:
        outer_loss: ``outer_loss(params, hyper)``, a scalar.
        inner_loss: ``inner_loss(params, hyper)``, a scalar. Deterministic.
        params: Parameters by name, constants: the minimum of the inner loss, or the start of unrolled steps.
        hyper: A pytree of the hyperparameters.
        create_graph: Make the derivative differentiable.

    Raises:
        TypeError: A leaf of ``hyper`` is not a floating point tensor.
        ValueError: ``hyper`` holds no tensor.
    """

    outer_loss: BilevelLoss
    inner_loss: BilevelLoss
    params: Parameters
    hyper: Tree
    create_graph: bool = False

    def __post_init__(self) -> None:
        if torch.is_inference_mode_enabled():
            raise ValueError(
                f"{CALL}: inside torch.inference_mode() there is no autograd graph. Call it outside."
            )
        check_function(CALL, "outer_loss", self.outer_loss)
        check_function(CALL, "inner_loss", self.inner_loss)
        check_params(CALL, self.params)
        leaves = tree_leaves(self.hyper)
        for name, leaf in zip(leaf_names(self.hyper, "hyper"), leaves, strict=True):
            if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
                raise TypeError(f"{CALL}: {name} must be a floating point tensor, got {got}.")
        if not leaves:
            raise ValueError(f"{CALL}: hyper holds no tensor.")

    def variables(self) -> Params:
        """Return new leaves with the values of the parameters. A SparseTensor is represented by its values."""
        return {name: values_of(p).detach().requires_grad_() for name, p in self.params.items()}

    def hyper_leaves(self) -> list[Tensor]:
        """Return variables with the values of ``hyper``. With ``create_graph``, they are connected to its graph.

        They are new tensors. A partial derivative counts only the uses in the losses, also if one hyperparameter was
        computed from another.
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
        """Return leaves in the pytree of ``hyper``."""
        supply = iter(leaves)
        return tree_map(lambda _: next(supply), self.hyper)

    def _one_number(
        self, what: str, function: BilevelLoss, values: Params, hyper: Sequence[Tensor]
    ) -> Tensor:
        with checked_reruns(CALL):
            loss = function(self.wrapped(values), self.hyper_of(hyper))
        if not is_a(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            got = f"{tuple(loss.shape)} of {loss.dtype}" if is_a(loss, Tensor) else type(loss).__name__
            raise ValueError(f"{CALL}: {what}(params, hyper) must return a real scalar, got {got}.")
        return loss.reshape(())


def partials(
    loss: Tensor, values: Params, hyper: Sequence[Tensor], *, create_graph: bool = False
) -> tuple[Params, list[Tensor | None]]:
    """Differentiate a loss.

    Returns:
        The derivative with respect to each parameter, and with respect to each leaf of ``hyper``. The latter is None
        if the loss does not depend on the leaf.

    Raises:
        ValueError: The gradient of a table is row-sparse.
    """
    found = gradients(loss, [*values.values(), *hyper], create_graph=create_graph)
    slopes = zeros_for_none(found[: len(values)], values.values())
    by_name = dict(zip(values, slopes, strict=True))
    refuse_sparse(by_name)
    return by_name, found[len(values) :]


def gradients(loss: Tensor, inputs: Sequence[Tensor], *, create_graph: bool = False) -> list[Tensor | None]:
    """Differentiate a loss. The gradient is None for an input that the loss does not depend on."""
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
