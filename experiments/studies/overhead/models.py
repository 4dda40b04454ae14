"""What is differentiated: five models, each over depth, width and batch, with the data that they see."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmarks.maml.models import Transformer
from experiments.examples import gnn_cora
from experiments.studies.overhead.work import Size, Work
from metagrad.sparse import Pattern, SparseTensor, embedding

CLASSES, FEATURES, LENGTH, SIDE, ROWS = 10, 64, 32, 14, 20_000
NODES, LINKS, WORDS, TOPICS = 2708, 5278, 1433, 7  # of Cora


class GraphLayer(nn.Module):
    """Neighbours' features, weighted by a learned number for each edge, times a matrix.

    `is_dense` writes the weights into a matrix [nodes, nodes], as most code for learned graphs does.
    """

    def __init__(self, edges: Pattern, before: int, after: int) -> None:
        super().__init__()
        degree = torch.zeros(edges.shape[0]).index_add(0, edges.row, torch.ones(edges.nnz))
        self.edges, self.is_dense = edges, False
        self.weights = nn.Parameter((degree[edges.row] * degree[edges.col]).rsqrt())
        self.linear = nn.Linear(before, after, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [nodes, before] to [nodes, after]."""
        x = self.linear(x)
        if not self.is_dense:
            return SparseTensor(self.edges, self.weights) @ x
        at = (self.edges.row, self.edges.col)
        return self.weights.new_zeros(self.edges.shape).index_put(at, self.weights) @ x


class Lookup(nn.Embedding):
    """An embedding table whose gradient is a table, where it `is_dense`, or the rows that are looked up."""

    is_dense = False

    def forward(self, input: Tensor) -> Tensor:
        """Look rows up."""
        return F.embedding(input, self.weight) if self.is_dense else embedding(input, self.weight)


def squares(prediction: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error; torch's own has no forward derivative."""
    return (prediction.squeeze(-1) - y).square().mean()


def mlp(size: Size) -> Work:
    """Layers with tanh."""
    widths = [FEATURES, *[size.width] * size.depth]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    model = nn.Sequential(*layers, nn.Linear(size.width, CLASSES))
    return _classified(model, lambda: torch.randn(size.batch, FEATURES))


def convnet(size: Size) -> Work:
    """3x3 convolutions with GELU on small images, and the mean over space."""
    widths = [1, *[size.width] * size.depth]
    pairs = pairwise(widths)
    layers = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GELU()) for a, b in pairs]
    head = nn.Sequential(nn.AvgPool2d(SIDE), nn.Flatten(), nn.Linear(size.width, CLASSES))
    return _classified(nn.Sequential(*layers, head), lambda: torch.rand(size.batch, 1, SIDE, SIDE))


def transformer(size: Size) -> Work:
    """Pre-norm blocks with four heads."""
    return _classified(
        Transformer(size.depth, size.width), lambda: torch.randn(size.batch, LENGTH, size.width)
    )


def _classified(model: nn.Module, draw: Callable[[], Tensor]) -> Work:
    x, query_x = draw(), draw()
    y, query_y = (torch.randint(CLASSES, (len(part),)) for part in (x, query_x))
    return Work(model, F.cross_entropy, x, y, query_x, query_y)


def graph(size: Size) -> Work:
    """A graph network with learned edges on Cora, or on a random graph of its size; half of the nodes are queries."""
    edges, x, y = citations(size.batch)
    widths = [x.shape[1], *[size.width] * (size.depth - 1)]
    pairs = pairwise(widths)
    layers = [nn.Sequential(GraphLayer(edges, a, b), nn.Tanh()) for a, b in pairs]
    model = nn.Sequential(*layers, GraphLayer(edges, widths[-1], TOPICS))
    is_query = torch.rand(len(y)) < 0.5
    support, query = (
        y.masked_fill(hidden, -100) for hidden in (is_query, ~is_query)
    )  # cross_entropy skips -100
    return Work(model, F.cross_entropy, x, support, x, query)


def citations(nodes: int) -> tuple[Pattern, Tensor, Tensor]:
    """Return edges, features [nodes, words] and labels of the first nodes of Cora, or of a random graph."""
    try:
        cora = gnn_cora.load()
    except SystemExit:  # the file is not there
        return _random_graph(nodes)
    cora = cora if nodes >= len(cora.labels) else gnn_cora.subgraph(cora, nodes)
    return cora.edges, cora.features.to_dense(), cora.labels[:nodes]


def _random_graph(nodes: int) -> tuple[Pattern, Tensor, Tensor]:
    ends, loops = torch.randint(nodes, (2, LINKS * nodes // NODES)), torch.arange(nodes)
    row, col = torch.cat([ends[0], ends[1], loops]), torch.cat([ends[1], ends[0], loops])
    edges, _ = Pattern.coalesce(row, col, (nodes, nodes))
    words = (torch.rand(nodes, WORDS) < 18 / WORDS).float()
    return edges, words / words.sum(1, keepdim=True).clamp(min=1), torch.randint(TOPICS, (nodes,))


def table(size: Size) -> Work:
    """An embedding table, and layers with tanh on the rows that are looked up."""
    layers = [nn.Sequential(nn.Linear(size.width, size.width), nn.Tanh()) for _ in range(size.depth)]
    model = nn.Sequential(Lookup(ROWS, size.width), *layers, nn.Linear(size.width, 1))
    ids, query_ids = torch.randint(ROWS, (2, size.batch))
    y, query_y = torch.randn(2, size.batch)
    return Work(model, squares, ids, y, query_ids, query_y, tables=("0.weight",))


MODELS: dict[str, Callable[[Size], Work]] = {
    "mlp": mlp,
    "convnet": convnet,
    "transformer": transformer,
    "graph": graph,
    "table": table,
}


def load(name: str, size: Size, seed: int, device: torch.device) -> Work:
    """Make a model and its data: the same in every process."""
    torch.manual_seed(seed)
    return MODELS[name](size).to(device)
