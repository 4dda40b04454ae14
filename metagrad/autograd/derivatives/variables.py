"""What a loss is differentiated with respect to: whole parameters, or the rows of tables that are looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from metagrad.autograd.checks.missing_derivatives import named_if_missing
from metagrad.autograd.derivatives.grad import check_loss, check_params
from metagrad.autograd.derivatives.graph_vjp import graph_vjp
from metagrad.autograd.derivatives.lookups import Lookups, find_lookups, lookup_nodes
from metagrad.core.modules import refuse_freed, refuse_sharded
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import Tree, leaf_names, tree_leaves
from metagrad.sparse.tables.row_sparse import RowSparse


class Variable(NamedTuple):
    """A parameter, and its coordinates."""

    name: str
    leaf: Tensor
    lookups: Lookups | None  # None: all of its numbers are coordinates

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the coordinates: that of the parameter, or ``[R, D...]``."""
        return tuple(self.leaf.shape) if self.lookups is None else self.lookups.shape

    @property
    def inputs(self) -> list[Tensor | GradientEdge]:
        """Where derivatives are taken."""
        return [self.leaf] if self.lookups is None else [at.edge for at in self.lookups.lookups]

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return what coordinates ``[k, *shape]`` are at each of the inputs."""
        return [values] if self.lookups is None else self.lookups.gather(values)

    def scatter(self, parts: Sequence[Tensor | None], count: int) -> Tensor:
        """Sum the derivatives at the inputs to coordinates ``[count, *shape]``; None is zero."""
        if self.lookups is not None:
            return self.lookups.scatter(parts, self.leaf.new_zeros(count, *self.shape))
        (part,) = parts
        return self.leaf.new_zeros(count, *self.shape) if part is None else part

    def read(self, vector: object, what: str) -> Tensor:
        """Return the coordinates ``[*shape]`` of a vector in the form of the parameter, or ``[k, *shape]`` of k."""
        if not isinstance(vector, Tensor) or (self.lookups is None and isinstance(vector, RowSparse)):
            raise TypeError(f"{what} must be a strided tensor, got {type(vector).__name__}.")
        values = vector if self.lookups is None else self.lookups.table.read(vector, what)
        leading = values.ndim - len(self.shape)
        if (
            leading not in (0, 1)
            or tuple(values.shape[leading:]) != self.shape
            or values.dtype != self.leaf.dtype
        ):
            expected, got = (tuple(self.leaf.shape), self.leaf.dtype), (tuple(vector.shape), vector.dtype)
            raise ValueError(
                f"{what} must be as its parameter is, {expected}, or a stack of such, got {got}."
            )
        return values

    def wrap(self, values: Tensor) -> Tensor:
        """Return coordinates, or a stack of them, in the form of the parameter."""
        return values if self.lookups is None else self.lookups.table.wrap(values)


def find_variables(call: str, loss: Tensor, params: Tree, sparse: Sequence[str]) -> list[Variable]:
    """Find the parameters in the graph of a loss, and of sparse tables the rows that are looked up.

    Args:
        call: How errors name the caller.
        loss: One number, and its graph.
        params: A tree of tensors that require grad.
        sparse: Tables that must be taken by rows, by their keys in ``params``.
    """
    leaves, names = tree_leaves(params), leaf_names(params, "params")
    check_loss(call, loss)
    check_params(call, params, leaves)
    if not leaves:
        raise ValueError(f"{call}: there are no parameters.")
    refuse_sharded(call, dict(zip(names, leaves, strict=True)))
    _refuse_tied(call, leaves, names)
    chosen = _chosen(call, sparse, names)
    tables = [(name, leaf, name in chosen) for name, leaf in zip(names, leaves, strict=True)]
    found = find_lookups(call, list(graph_nodes([loss])), tables)
    return [Variable(*parts) for parts in zip(names, leaves, found, strict=True)]


def _refuse_tied(call: str, leaves: Sequence[Tensor], names: Sequence[str]) -> None:
    """Refuse a tensor under two names: a derivative in either would be that in both, and counted twice."""
    first: dict[int, str] = {}
    for leaf, name in zip(leaves, names, strict=True):
        other = first.setdefault(id(leaf), name)
        if other != name:
            raise ValueError(
                f"{call}: {other} and {name} are one tensor, whose coordinates would count twice. Leave one out, as "
                "model.named_parameters() does."
            )


def _chosen(call: str, sparse: Sequence[str], names: list[str]) -> set[str]:
    if isinstance(sparse, str):
        raise TypeError(
            f"{call}: sparse must be a list of names, got the string {sparse!r}; write [{sparse!r}]."
        )
    chosen = {f"params[{name!r}]" for name in sparse}
    unknown = chosen - set(names)
    if unknown:
        raise ValueError(
            f"{call}: sparse names {', '.join(sorted(unknown))}, but there are {', '.join(names)}."
        )
    return chosen


def end_nodes(variables: Sequence[Variable]) -> list[Node]:
    """Return the nodes where the graph of a loss ends: the parameters', and those of lookups in tables."""
    leaves = [get_gradient_edge(variable.leaf).node for variable in variables]
    return leaves + lookup_nodes(variable.lookups for variable in variables)


def inputs_of(variables: Sequence[Variable]) -> list[Tensor | GradientEdge]:
    """Return where derivatives are taken with respect to variables."""
    return [at for variable in variables for at in variable.inputs]


def grouped(variables: Sequence[Variable], found: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
    """Group derivatives at :func:`inputs_of` by variable; an empty list is None for all."""
    rest = iter(found)
    return [[next(rest, None) for _ in variable.inputs] for variable in variables]


def batched_grad(
    outputs: Sequence[Tensor | None],
    inputs: Sequence[Tensor | GradientEdge],
    cotangents: Sequence[Tensor],
    *,
    together: bool,
    create_graph: bool,
) -> list[Tensor | None]:
    """Multiply stacks of cotangents ``[m, ...]``, in one batched backward pass if ``together``, else m is 1."""
    rows = cotangents if together else [c.squeeze(0) for c in cotangents]
    found = graph_vjp(outputs, inputs, rows, batched=together, create_graph=create_graph, retain_graph=True)
    return found if together else stacked(found)


def pull_back(
    outputs: Sequence[Tensor | None],
    variables: Sequence[Variable],
    cotangents: Sequence[Tensor],
    *,
    count: int,
    together: bool,
    create_graph: bool,
) -> list[Tensor]:
    """Multiply ``count`` stacked cotangents with the transposed Jacobian: coordinates ``[count, *shape]`` of each."""
    found = batched_grad(
        outputs, inputs_of(variables), cotangents, together=together, create_graph=create_graph
    )
    with torch.set_grad_enabled(create_graph):
        return [v.scatter(came, count) for v, came in zip(variables, grouped(variables, found), strict=True)]


def differentiated(
    call: str, loss: Tensor, variables: list[Variable], *, allow_unused: bool, create_graph: bool
) -> list[list[Tensor | None]]:
    """Differentiate a loss; return for each variable the derivatives at its inputs, None where there is none."""
    inputs = inputs_of(variables)
    found: Sequence[Tensor | None] = ()
    if inputs:
        with named_if_missing(call):
            found = torch.autograd.grad(
                loss,
                inputs,  # type: ignore[reportArgumentType, reportCallIssue]
                torch.ones_like(loss),
                create_graph=create_graph,
                allow_unused=True,
            )
    refuse_freed(call, {variable.name: variable.leaf for variable in variables})
    parts = grouped(variables, found)
    _refuse_sparse(call, variables, parts)
    unused = [v.name for v, came in zip(variables, parts, strict=True) if all(part is None for part in came)]
    if unused and not allow_unused:
        raise ValueError(
            f"{call}: the loss does not depend on {', '.join(unused)}. Leave it out of params, or pass "
            "allow_unused=True to get zeros."
        )
    return parts


def _refuse_sparse(call: str, variables: list[Variable], parts: list[list[Tensor | None]]) -> None:
    for variable, came in zip(variables, parts, strict=True):
        for part in came:
            if part is not None and (isinstance(part, RowSparse) or part.layout != torch.strided):
                raise ValueError(
                    f"{call}: the gradient of {variable.name} is sparse, but rows are looked up in a tensor computed "
                    "from the parameter, not in the parameter. Look rows up in the parameter itself, or pass the "
                    "tensor in which they are looked up."
                )


def stacked(parts: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return stacks of one, ``[1, *shape]``."""
    return [None if part is None else part.unsqueeze(0) for part in parts]


def coordinates(variables: Sequence[Variable], parts: Sequence[Sequence[Tensor | None]]) -> list[Tensor]:
    """Return what :func:`differentiated` found as coordinates ``[*shape]`` of each variable."""
    return [v.scatter(stacked(came), 1).squeeze(0) for v, came in zip(variables, parts, strict=True)]
