"""Train a graph network on Cora, and learn the weights of its edges through training: hypergradients on a pattern.

    python -m experiments.examples.gnn_cora

A two-layer graph convolutional network (Kipf, Welling, arXiv:1609.02907) is trained on the Planetoid split. Then
every edge gets a weight, and the network is trained by unrolled gradient descent. The validation loss after this
training is differentiated with respect to the edge weights. Franceschi et al., arXiv:1903.11960, do this with a
dense matrix of edge probabilities. The gradient and a Hessian-vector product are checked against dense matrices in
float64. The validation labels are used to learn the edges, so the second accuracy uses more labels than the first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import metagrad as mg
from experiments.examples.common import compare, find_file
from experiments.run.progress import Progress, tell
from experiments.studies import citations
from metagrad.sparse import Pattern, SparseTensor

Matrix = SparseTensor | Tensor
Params = dict[str, Tensor]
TOLERANCE = 1e-9  # relative, float64


class Graph(NamedTuple):
    """A citation graph with self-loops."""

    edges: Pattern
    features: SparseTensor  # [nodes, words], rows sum to one
    labels: Tensor
    train: Tensor
    val: Tensor
    test: Tensor


def load() -> Graph:
    """Read Cora."""
    find_file(citations.FILE)
    found = citations.load()
    edges = citations.normalized(found.pairs, torch.ones(len(found.pairs)), found.nodes).pattern
    features = found.words.with_values(1 / found.words.sum(1)[found.words.pattern.row])
    return Graph(edges, features, found.labels, found.train, found.val, found.test)


def adjacency(edges: Pattern, log_weights: Tensor) -> SparseTensor:
    """Return D^(-1/2) W D^(-1/2) for weights W, where D holds the sums of the rows of W."""
    weights = log_weights.exp()
    scale = (SparseTensor(edges, weights) @ weights.new_ones(edges.shape[1])).rsqrt()
    return SparseTensor(edges, weights * scale[edges.row] * scale[edges.col])


def dense_adjacency(edges: Pattern, log_weights: Tensor) -> Tensor:
    """Return the same matrix as a dense matrix."""
    weights = log_weights.new_zeros(edges.shape).index_put((edges.row, edges.col), log_weights.exp())
    scale = weights.sum(1).rsqrt()
    return scale[:, None] * weights * scale


def init(words: int, hidden: int, classes: int, *, seed: int = 0) -> Params:
    """Draw the parameters."""
    torch.manual_seed(seed)
    layers = {"first": torch.empty(words, hidden), "second": torch.empty(hidden, classes)}
    return {name: torch.nn.init.xavier_uniform_(weight).requires_grad_() for name, weight in layers.items()}


def forward(params: Params, matrix: Matrix, features: Matrix, *, dropout: float = 0.0) -> Tensor:
    """Return the logits of all nodes."""
    hidden = F.dropout(torch.relu(matrix @ (features @ params["first"])), dropout)
    return matrix @ (hidden @ params["second"])


def accuracy(params: Params, matrix: Matrix, graph: Graph) -> float:
    """Return the test accuracy in percent."""
    with torch.no_grad():
        hits = forward(params, matrix, graph.features).argmax(1) == graph.labels
    return 100 * hits[graph.test].double().mean().item()


def train(graph: Graph, *, hidden: int, epochs: int) -> float:
    """Train as Kipf and Welling do, and return the test accuracy."""
    matrix = adjacency(graph.edges, torch.zeros(graph.edges.nnz))
    params = init(graph.features.shape[1], hidden, int(graph.labels.max()) + 1)
    optimizer = torch.optim.Adam(
        [{"params": [params["first"]], "weight_decay": 5e-4}, {"params": [params["second"]]}], lr=0.01
    )
    for _ in Progress(range(epochs), unit="epoch", leave=False):
        optimizer.zero_grad()
        words = graph.features.with_values(F.dropout(graph.features.values, 0.5))
        logits = forward(params, matrix, words, dropout=0.5)
        F.cross_entropy(logits[graph.train], graph.labels[graph.train]).backward()
        optimizer.step()
    return accuracy(params, matrix, graph)


def trained(matrix: Matrix, features: Matrix, params: Params, graph: Graph, *, steps: int) -> Params:
    """Run gradient descent on the training nodes, differentiable with respect to the matrix."""
    rule = mg.optim.rules.sgd(lr=20.0, momentum=0.9, weight_decay=5e-4)

    def step(state, t, matrix):
        params, inner = state
        loss = F.cross_entropy(forward(params, matrix, features)[graph.train], graph.labels[graph.train])
        return rule.update(mg.grad(loss, params, create_graph=True), inner, params), loss

    (params, _), _ = mg.unroll(step, (params, rule.init(params)), matrix, steps=steps, memory="step")
    return params


def outer_loss(
    log_weights: Tensor,
    graph: Graph,
    params: Params,
    *,
    steps: int,
    build: Callable[[Pattern, Tensor], Matrix] = adjacency,
) -> Tensor:
    """Return the validation loss of the network trained on the graph with these edge weights."""
    matrix = build(graph.edges, log_weights)
    features = graph.features if build is adjacency else graph.features.to_dense()
    fast = trained(matrix, features, params, graph, steps=steps)
    return F.cross_entropy(forward(fast, matrix, features)[graph.val], graph.labels[graph.val])


def derivatives(loss_fn: Callable[[Tensor], Tensor], log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of a loss, and the product of its Hessian with that gradient."""
    point = log_weights.detach().requires_grad_()
    gradient = mg.grad(loss_fn(point), point, create_graph=True)
    return gradient.detach(), mg.grad((gradient * gradient.detach()).sum(), point)


def subgraph(graph: Graph, nodes: int) -> Graph:
    """Return the first nodes, which hold the training and validation nodes, and the edges between them."""
    parts = []
    for pattern, shape in (
        (graph.edges, (nodes, nodes)),
        (graph.features.pattern, (nodes, graph.features.shape[1])),
    ):
        inside = (pattern.row < shape[0]) & (pattern.col < shape[1])
        parts.append((Pattern(pattern.row[inside], pattern.col[inside], shape), inside))
    (edges, _), (words, kept) = parts
    return graph._replace(edges=edges, features=SparseTensor(words, graph.features.values[kept]))


def check(graph: Graph, *, hidden: int, steps: int) -> None:
    """Compare the derivatives of the outer loss with dense matrices in float64."""
    double = graph._replace(features=graph.features.double())
    params = init(graph.features.shape[1], hidden, int(graph.labels.max()) + 1)
    params = {name: p.detach().double().requires_grad_() for name, p in params.items()}
    point = 0.1 * torch.randn(
        graph.edges.nnz, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    results, seconds = [], []
    for build in (adjacency, dense_adjacency):
        begin = time.perf_counter()
        results.append(
            derivatives(partial(outer_loss, graph=double, params=params, steps=steps, build=build), point)
        )
        seconds.append(time.perf_counter() - begin)
    for name, got, expected in zip(("gradient", "Hessian-vector product"), *results, strict=True):
        compare(name, got, expected, tolerance=TOLERANCE)
    print(f"  time: sparse {seconds[0]:.2f} s, dense {seconds[1]:.2f} s, ratio {seconds[1] / seconds[0]:.1f}")


def learn_edges(graph: Graph, *, hidden: int, steps: int, outer_steps: int) -> None:
    """Descend the validation loss in the edge weights."""
    params = init(graph.features.shape[1], hidden, int(graph.labels.max()) + 1)
    log_weights = torch.zeros(graph.edges.nnz, requires_grad=True)
    optimizer = torch.optim.Adam([log_weights], lr=0.1)
    for step in Progress(range(outer_steps + 1), unit="outer step", leave=False):
        loss = outer_loss(log_weights, graph, params, steps=steps)
        matrix = adjacency(graph.edges, log_weights.detach())
        test = accuracy(trained(matrix, graph.features, params, graph, steps=steps), matrix, graph)
        tell(f"  outer step {step}: validation loss {loss.item():.4f}, test accuracy {test:.1f} %")
        if step == outer_steps:
            break
        log_weights.grad = mg.grad(loss, log_weights)
        optimizer.step()


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=200, help="of plain training")
    parser.add_argument("--hidden", type=int, default=16, help="hidden units")
    parser.add_argument("--steps", type=int, default=30, help="inner steps that are differentiated through")
    parser.add_argument("--outer-steps", type=int, default=10, help="steps on the edge weights")
    parser.add_argument("--check-steps", type=int, default=2, help="inner steps of the comparison with dense")
    parser.add_argument("--check-nodes", type=int, default=2708, help="nodes of the comparison, 640 or more")
    options = parser.parse_args(arguments)
    graph = load()
    print(f"Cora: {graph.edges}, features {graph.features.pattern}")
    print(f"Plain training: test accuracy {train(graph, hidden=options.hidden, epochs=options.epochs):.1f} %")
    print(f"Derivatives through {options.check_steps} inner steps against dense, float64:")
    check(subgraph(graph, options.check_nodes), hidden=options.hidden, steps=options.check_steps)
    print(f"Learning {graph.edges.nnz} edge weights through {options.steps} inner steps:")
    learn_edges(graph, hidden=options.hidden, steps=options.steps, outer_steps=options.outer_steps)


if __name__ == "__main__":
    main()
