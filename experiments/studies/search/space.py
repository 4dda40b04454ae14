r"""A space of cells: which operation is on which edge of a small graph, and the network of such cells.

.. math:: h_j = \mathrm{norm} \Big( \sum_{i < j} \sum_o \mathrm{softmax}(\alpha_{ij})_o \; o(\mathrm{relu}(h_i)) \Big)

The mixed network has every operation on every edge, with these weights; a discrete one has one operation on each of
at most two edges into a node. Liu, Simonyan, Yang, "DARTS: differentiable architecture search", ICLR 2019, sections
2.1, 2.2 and 2.4; there a cell has two inputs and four nodes, and each operation a norm of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OPERATIONS = ("none", "skip", "max_pool", "avg_pool", "conv_1x1", "conv_3x3")
NODES = 3
"""Of a cell, beside its input, which is node 0."""
KEPT = 2
"""Edges into a node of a discrete cell, at most."""
EDGES = tuple((i, j) for j in range(1, NODES + 1) for i in range(j))
GROUPS, PLACES = 4, 2

Architecture: TypeAlias = "tuple[tuple[int, int, str], ...]"
"""Edges of a discrete cell: from, to, operation."""

BY_HAND: Architecture = tuple((i, j, "conv_3x3") for i, j in ((0, 1), (0, 2), (1, 2), (0, 3), (1, 3)))


class Cell(nn.Module):
    """A graph of nodes; its output is theirs, `[batch, NODES * channels, height, width]`.

    Args:
        channels: Of a node.
        edges: The operations on each edge.
    """

    def __init__(self, channels: int, edges: Mapping[tuple[int, int], tuple[str, ...]]) -> None:
        super().__init__()
        self.edges = dict(edges)
        self.kernels = nn.ModuleDict(
            {
                _name(edge, operation): nn.Conv2d(channels, channels, size, padding="same", bias=False)
                for edge, operations in self.edges.items()
                for operation, size in (("conv_1x1", 1), ("conv_3x3", 3))
                if operation in operations
            }
        )
        self.norms = nn.ModuleList(nn.GroupNorm(GROUPS, channels) for _ in range(NODES))

    def forward(self, x: Tensor, weights: Mapping[tuple[int, int], Tensor] | None = None) -> Tensor:
        """Compute all nodes; where there are weights, `[operations]` for each edge, those of its operations."""
        active = [x.relu()]
        for j, norm in enumerate(self.norms, start=1):
            terms = [self._edge(active[i], (i, j), weights) for i in range(j) if (i, j) in self.edges]
            active.append(norm(torch.stack(terms).sum(0)).relu())
        return torch.cat(active[1:], 1)

    def _edge(
        self, x: Tensor, edge: tuple[int, int], weights: Mapping[tuple[int, int], Tensor] | None
    ) -> Tensor:
        if weights is None:
            return self._operation(self.edges[edge][0], edge, x)
        pairs = zip(weights[edge], self.edges[edge], strict=True)
        return sum((w * self._operation(o, edge, x) for w, o in pairs if o != "none"), torch.zeros(()))

    def _operation(self, operation: str, edge: tuple[int, int], x: Tensor) -> Tensor:
        if operation == "max_pool":
            return F.max_pool2d(x, 3, stride=1, padding=1)
        if operation == "avg_pool":
            return F.avg_pool2d(x, 3, stride=1, padding=1)
        return x if operation == "skip" else self.kernels[_name(edge, operation)](x)


class Network(nn.Module):
    """A convolution, two cells of the same architecture with halved height and width between, and a linear layer.

    Args:
        classes: How many.
        channels: Of a node.
        architecture: That of both cells; None is the mixed one.
    """

    def __init__(self, classes: int, channels: int, architecture: Architecture | None = None) -> None:
        super().__init__()
        mixed = dict.fromkeys(EDGES, OPERATIONS)
        edges = mixed if architecture is None else {(i, j): (o,) for i, j, o in architecture}
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.first, self.second = Cell(channels, edges), Cell(channels, edges)
        self.between = nn.Conv2d(NODES * channels, channels, 1)
        self.last = nn.Linear(NODES * channels * PLACES**2, classes)

    def forward(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        """Return logits of images `[batch, 1, height, width]`; a mixed network takes alpha, `[edges, operations]`."""
        weights = None if alpha is None else dict(zip(EDGES, alpha.softmax(1), strict=True))
        h = self.first(self.stem(x), weights)
        h = F.avg_pool2d(self.between(h), 2, ceil_mode=True)
        return self.last(F.adaptive_avg_pool2d(self.second(h, weights), PLACES).flatten(1))


def discrete(alpha: Tensor) -> Architecture:
    """Return the strongest operation but none on each edge, of the strongest edges into each node."""
    weights = alpha.softmax(1)[:, 1:]
    found: list[tuple[int, int, str]] = []
    for j in range(1, NODES + 1):
        strongest = {edge: row.max(0) for edge, row in zip(EDGES, weights, strict=True) if edge[1] == j}
        kept = sorted(strongest, key=lambda edge: -strongest[edge].values.item())[:KEPT]
        found += [(*edge, OPERATIONS[1 + int(strongest[edge].indices)]) for edge in sorted(kept)]
    return tuple(found)


def drawn(generator: torch.Generator) -> Architecture:
    """Draw an architecture: what is kept, and its operations, are uniform."""
    return discrete(torch.randn(len(EDGES), len(OPERATIONS), generator=generator))


def _name(edge: tuple[int, int], operation: str) -> str:
    return f"{edge[0]}_{edge[1]}_{operation}"
