"""Who is attacked: a graph convolutional network, and two defences of its training, both on the graph it is given.

Kipf, Welling, "Semi-supervised classification with graph convolutional networks", ICLR 2017: two layers, ReLU and
dropout between them, Adam with weight decay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import metagrad as mg
from experiments.studies.citations import Citations, normalized
from metagrad.sparse import SparseTensor

Params = dict[str, Tensor]


@dataclass(frozen=True)
class GCN:
    """A graph convolutional network, and how it is trained."""

    hidden: int
    epochs: int
    lr: float
    dropout: float
    weight_decay: float

    def start(self, graph: Citations) -> Params:
        """Draw the parameters."""
        sizes = {"first": (graph.words.shape[1], self.hidden), "second": (self.hidden, graph.classes)}
        return {
            name: torch.nn.init.xavier_uniform_(torch.empty(size)).requires_grad_()
            for name, size in sizes.items()
        }

    def logits(
        self, params: Params, matrix: SparseTensor, words: SparseTensor, *, dropout: float = 0.0
    ) -> Tensor:
        """Return those of all nodes, ``[nodes, classes]``."""
        words = words.with_values(F.dropout(words.values, dropout))
        hidden = F.dropout(torch.relu(matrix @ (words @ params["first"])), dropout)
        return matrix @ (hidden @ params["second"])

    def accuracy(self, graph: Citations, pairs: Tensor, weights: Tensor | None, seed: int) -> float:
        """Train on a graph, and return the share of test nodes that are classified right, in percent."""
        torch.manual_seed(seed)
        with torch.no_grad():
            matrix = normalized(pairs, torch.ones(len(pairs)) if weights is None else weights, graph.nodes)
        params = self.start(graph)
        optimizer = torch.optim.Adam(params.values(), lr=self.lr, weight_decay=self.weight_decay)
        for _ in range(self.epochs):
            optimizer.zero_grad()
            logits = self.logits(params, matrix, graph.words, dropout=self.dropout)[graph.train]
            F.cross_entropy(logits, graph.labels[graph.train]).backward()
            optimizer.step()
        with torch.no_grad():
            found = self.logits(params, matrix, graph.words)[graph.test].argmax(1)
        return 100 * (found == graph.labels[graph.test]).double().mean().item()


@dataclass(frozen=True)
class LearnedEdges:
    """A weight for each edge, learned on the validation nodes through the training of the network.

    The hypergradient is that of ``inner_steps`` steps of gradient descent, unrolled; the weights are sigmoids, that
    begin near one.
    """

    steps: int
    lr: float
    inner_steps: int
    inner_lr: float

    def weights(self, network: GCN, graph: Citations, pairs: Tensor, seed: int) -> Tensor:
        """Return the weight of each pair, ``[pairs]``."""
        torch.manual_seed(seed)
        outer, inner = (
            partial(self._loss, network, graph, pairs, nodes) for nodes in (graph.val, graph.train)
        )
        rule = mg.optim.rules.adam(lr=self.inner_lr, weight_decay=network.weight_decay)
        found = mg.bilevel(
            outer,
            inner,
            network.start(graph),
            {"logits": torch.full((len(pairs),), 3.0)},
            inner=rule,
            outer=mg.optim.rules.adam(lr=self.lr),
            steps=self.steps,
            inner_steps=0,
            method=mg.hypergrad.Unroll(rule, steps=self.inner_steps, memory="sqrt"),
        )
        return found.hyper["logits"].sigmoid()

    def _loss(
        self, network: GCN, graph: Citations, pairs: Tensor, nodes: Tensor, params: Params, hyper: Params
    ) -> Tensor:
        matrix = normalized(pairs, hyper["logits"].sigmoid(), graph.nodes)
        return F.cross_entropy(network.logits(params, matrix, graph.words)[nodes], graph.labels[nodes])


def similar(graph: Citations, pairs: Tensor, least: float) -> Tensor:
    """Return the pairs whose nodes share words: with a Jaccard index of at least so much.

    Wu et al., "Adversarial examples for graph data: deep insights into attack and defense", IJCAI 2019, section 4.
    """
    left, right = (graph.words.to_dense()[nodes] for nodes in pairs.unbind(1))
    return pairs[(left * right).sum(1) >= least * torch.maximum(left, right).sum(1)]
