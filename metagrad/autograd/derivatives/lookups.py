"""Embedding tables in a recorded graph: found by their lookups, and differentiated in the rows looked up.

A lookup is a node of the graph, and torch can differentiate with respect to the output of a node
(``torch.autograd.graph.GradientEdge``). So the rows of a table can be made the variables after the loss was computed,
without a change of the model: the derivative with respect to the table is the one with respect to the output of the
lookup, summed by rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from metagrad.core.tree import widened
from metagrad.sparse.tables.row_sparse import HOLE, RowSparse, scatter_rows


@dataclass(frozen=True, eq=False)
class TableRows:
    """Some rows of a table, as the coordinates of vectors that are zero elsewhere.

    Attributes:
        rows: Which, ``[R]``, int64, ascending.
        shape: Of the table, ``[V, D...]``.
    """

    rows: Tensor
    shape: tuple[int, ...]

    def read(self, vector: object, what: str) -> Tensor:
        """Return the coordinates ``[R, D...]`` of a RowSparse, or ``[k, R, D...]`` of a stack ``[k, V, D...]``."""
        if not isinstance(vector, RowSparse):
            raise TypeError(
                f"{what} must be a RowSparse, because the coordinates of a sparse table are the rows that the loss "
                f"looks up, got {type(vector).__name__}."
            )
        leading = tuple(vector.shape[: vector.ndim - len(self.shape)])
        if len(leading) > 1 or tuple(vector.shape[len(leading) :]) != self.shape:
            raise ValueError(f"{what} must have shape {self.shape}, got {tuple(vector.shape)}.")
        tables, row = vector.rows // self.shape[0], vector.rows % self.shape[0]
        place = torch.searchsorted(self.rows, row)
        if not bool(torch.isin(row, self.rows).all()):
            raise ValueError(
                f"{what} has rows that the loss does not look up, where the Hessian is zero. Use only the rows of "
                "the gradient."
            )
        size = (leading[0] if leading else 1) * len(self.rows)
        flat = vector.values.new_zeros(size, *self.shape[1:])
        return flat.index_add(0, tables * len(self.rows) + place, vector.values).view(
            *leading, len(self.rows), *self.shape[1:]
        )

    def wrap(self, values: Tensor) -> RowSparse:
        """Return the RowSparse with these coordinates, ``[V, D...]``, or a stack of such, ``[k, V, D...]``."""
        if values.ndim == len(self.shape):
            return scatter_rows(values, self.rows, self.shape, unique=True)
        first = torch.arange(len(values), device=values.device).unsqueeze(1) * self.shape[0]
        rows = (first + self.rows).flatten()
        return scatter_rows(values.flatten(0, 1), rows, (len(values), *self.shape), unique=True)


class Lookup(NamedTuple):
    """One lookup in a table."""

    edge: GradientEdge  # of what it returned, [*ids, D...]
    ids: Tensor
    place: Tensor  # [N] where among the rows; their number, for lookups of padding, which have no derivative


@dataclass(frozen=True, eq=False)
class Lookups:
    """All uses that a loss makes of a table: lookups, and nothing else."""

    table: TableRows
    lookups: tuple[Lookup, ...]
    padding: Tensor  # rows that are looked up as padding alone

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the coordinates, ``[R, D...]``."""
        return (len(self.table.rows), *self.table.shape[1:])

    def gather(self, values: Tensor) -> list[Tensor]:
        """Look coordinates up, as the loss does: ``[k, R, D...]`` to ``[k, *ids, D...]`` for each lookup."""
        padded = torch.cat([values, values.new_zeros(len(values), 1, *self.shape[1:])], 1)
        return [
            padded.index_select(1, at.place).view(len(values), *at.ids.shape, *self.shape[1:])
            for at in self.lookups
        ]

    def scatter(self, cotangents: Sequence[Tensor | None], zeros: Tensor) -> Tensor:
        """Sum the cotangents of all lookups by rows, to ``[k, R, D...]``: the transpose of :meth:`gather`."""
        total = widened(torch.cat([zeros, zeros.new_zeros(len(zeros), 1, *self.shape[1:])], 1))
        for at, cotangent in zip(self.lookups, cotangents, strict=True):
            if cotangent is not None:
                rows = widened(cotangent).reshape(len(zeros), -1, *self.shape[1:])
                total = total.index_add(1, at.place, rows)
        return total[:, :-1].to(zeros.dtype)


def find_lookups(
    call: str, nodes: Sequence[Node], tables: Sequence[tuple[str, Tensor, bool]]
) -> list[Lookups | None]:
    """Find the lookups in some parameters of a graph.

    Args:
        call: How errors name the caller.
        nodes: All nodes of the graph.
        tables: Name, parameter, and whether it must be taken by rows; else it is if its gradient would be sparse.

    Returns:
        For each parameter its lookups, or None if all of its elements are variables.

    Raises:
        ValueError: A parameter that must be taken by rows is used otherwise, or with ``scale_grad_by_freq``.
    """
    edges = [get_gradient_edge(param) for _, param, _ in tables]
    uses: dict[tuple[Node, int], list[Node]] = {(edge.node, edge.output_nr): [] for edge in edges}
    for node in nodes:
        for source in node.next_functions:
            if source in uses:
                uses[source].append(node)  # type: ignore[reportArgumentType]
    return [
        _lookups(call, name, param, uses[edge.node, edge.output_nr], must)
        for (name, param, must), edge in zip(tables, edges, strict=True)
    ]


def _lookups(call: str, name: str, param: Tensor, nodes: list[Node], must: bool) -> Lookups | None:
    others = [node for node in nodes if not _is_lookup(node)]
    if must and others:
        raise ValueError(
            f"{call}: the loss uses {name}, declared sparse, by {others[0].name()}, where only lookups by "
            "F.embedding or metagrad.sparse.embedding keep to rows. Leave it out of sparse."
        )
    if others or not (must or (nodes and all(map(_has_sparse_gradient, nodes)))):
        return None
    if any(getattr(node, "_saved_scale_grad_by_freq", False) for node in nodes):
        raise ValueError(
            f"{call}: F.embedding(scale_grad_by_freq=True) of {name} scales the gradient by a factor that is missing "
            "from the second derivative. Construct the embedding without it."
        )
    found = [_looked_up(node, len(param)) for node in nodes]
    empty = torch.zeros(0, dtype=torch.int64, device=param.device)
    rows = torch.cat([empty, *(ids[~padded] for ids, padded in found)]).unique()
    padding = torch.cat([empty, *(ids[padded] for ids, padded in found)]).unique()
    places = [
        torch.where(padded, len(rows), torch.searchsorted(rows, ids)).flatten() for ids, padded in found
    ]
    lookups = [
        Lookup(GradientEdge(node, 0), ids, place)
        for node, (ids, _), place in zip(nodes, found, places, strict=True)
    ]
    padding = padding[~torch.isin(padding, torch.cat([rows, rows.new_full((1,), HOLE)]))]
    return Lookups(TableRows(rows, tuple(param.shape)), tuple(lookups), padding)


def _is_lookup(node: Node) -> bool:
    if node.name() == "_GatherRowsBackward":
        return node.row_ndim == 1  # type: ignore[attr-defined]
    return node.name().startswith("EmbeddingBackward")


def _has_sparse_gradient(node: Node) -> bool:
    return node.name() == "_GatherRowsBackward" or bool(node._saved_sparse)  # type: ignore[attr-defined]


def _looked_up(node: Node, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the ids that were looked up, and which of these have no derivative."""
    if node.name() == "_GatherRowsBackward":
        (ids,) = node.saved_tensors  # type: ignore[attr-defined]
        return ids, ids == HOLE
    ids, padding = node._saved_indices.long(), node._saved_padding_idx  # type: ignore[attr-defined]
    # Where there is no padding, this is -1, unsigned.
    return ids, ids == padding if padding < num_rows else torch.zeros_like(ids, dtype=torch.bool)


def lookup_nodes(found: Iterable[Lookups | None]) -> list[Node]:
    """Return the nodes of some lookups."""
    return [at.edge.node for lookups in found if lookups is not None for at in lookups.lookups]
