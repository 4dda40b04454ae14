r"""Metattack on the values of a sparse matrix: edges are chosen by the gradient of training through the graph.

.. math:: \max_{A'} \; \mathcal{L}_{\text{atk}}(\theta_T(A'), A'), \qquad
          \theta_{t+1} = \theta_t - \alpha \nabla_\theta \mathcal{L}_{\text{train}}(\theta_t, A')

The surrogate is the linear graph network :math:`\hat A^2 X W`. Its labels of the nodes that are not trained on, from
the graph as it was, are what the attack drives it away from (Meta-Self). One edge is flipped for each meta-gradient:
the one whose removal or insertion raises the loss most to first order. Zügner, Günnemann, "Adversarial attacks on
graph neural networks via meta learning", ICLR 2019, algorithm 2, without its test of the degrees' distribution.

The candidates are the edges there are and a block of pairs that are none. After each flip the better half of the
block stays and the rest is drawn again (Geisler et al., "Robustness of graph neural networks at scale", NeurIPS 2021,
section 3), so that memory goes by candidates, not by pairs of nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import metagrad as mg
from experiments.studies.citations import Citations, normalized
from metagrad.sparse import Pattern, SparseTensor

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Surrogate:
    """The training that is differentiated through.

    Args:
        steps: Of gradient descent.
        lr: Its rate.
        momentum: Its momentum.
        memory: What the unroll keeps, as of :func:`metagrad.unroll`.
    """

    steps: int
    lr: float
    momentum: float
    memory: str | int

    def start(self, graph: Citations, generator: torch.Generator) -> Params:
        """Draw the parameters."""
        weight = torch.empty(graph.words.shape[1], graph.classes)
        torch.nn.init.xavier_uniform_(weight, generator=generator)
        return {"weight": weight.requires_grad_()}

    def logits(self, params: Params, last: Any, matrix: Any, words: Any) -> Tensor:
        """Return those of the nodes of ``last``, the rows of the matrix that are asked for: ``[nodes, classes]``."""
        return last @ (matrix @ (words @ params["weight"]))

    def trained(self, params: Params, matrix: Any, words: Any, graph: Citations) -> Params:
        """Train on the labels of the training nodes, differentiably in the matrix where gradients are enabled."""
        rule = mg.optim.rules.sgd(lr=self.lr, momentum=self.momentum)
        labels = graph.labels[graph.train]

        def step(state: tuple[Params, Any], t: int, last: Any, matrix: Any) -> tuple[Any, None]:
            params, inner = state
            loss = F.cross_entropy(self.logits(params, last, matrix, words), labels)
            return rule.update(mg.grad(loss, params, create_graph=True), inner, params), None

        start = (params, rule.init(params))
        (params, _), _ = mg.unroll(
            step, start, rows(matrix, graph.train), matrix, steps=self.steps, memory=self.memory
        )
        return params

    def meta_gradient(
        self,
        graph: Citations,
        params: Params,
        target: Tensor,
        build: Callable[[Tensor], Any],
        weights: Tensor,
    ) -> Tensor:
        """Return the gradient in the weights of pairs of the loss on ``target``, after training on the graph.

        Sparse or dense is the choice of ``build``, and nothing else differs.
        """
        weights = weights.detach().requires_grad_()
        matrix = build(weights)
        words = graph.words if isinstance(matrix, SparseTensor) else graph.words.to_dense()
        nodes = graph.unlabelled
        logits = self.logits(self.trained(params, matrix, words, graph), matrix, matrix, words)
        return mg.grad(F.cross_entropy(logits[nodes], target[nodes]), weights)


class Metattack:
    """A graph, edges of which are flipped one by one.

    Args:
        graph: As it is before the attack.
        surrogate: What is trained on it.
        block: Pairs that are no edges, and are candidates.
        seed: Of all that is drawn.
    """

    def __init__(self, graph: Citations, surrogate: Surrogate, *, block: int, seed: int) -> None:
        self.graph, self.surrogate, self.block = graph, surrogate, block
        self.generator = torch.Generator().manual_seed(seed)
        self.edges, self.absent = keys_of(graph.pairs, graph.nodes), torch.empty(0, dtype=torch.int64)
        with torch.no_grad():
            matrix = normalized(graph.pairs, torch.ones(len(graph.pairs)), graph.nodes)
        trained = surrogate.trained(surrogate.start(graph, self.generator), matrix, graph.words, graph)
        self.target = surrogate.logits(trained, matrix, matrix, graph.words).argmax(1)
        self.target[graph.train] = graph.labels[graph.train]

    @property
    def pairs(self) -> Tensor:
        """The edges there are now, ``[edges, 2]``."""
        return pairs_of(self.edges, self.graph.nodes)

    def candidates(self) -> tuple[Tensor, Tensor]:
        """Return pairs, first the edges there are, and their weights, which are 1 and 0."""
        self.absent = refilled(self.absent, self.edges, self.block, self.graph.nodes, self.generator)
        keys = torch.cat([self.edges, self.absent])
        return pairs_of(keys, self.graph.nodes), (torch.arange(len(keys)) < len(self.edges)).float()

    def gradient(
        self, build: Callable[..., Any], pairs: Tensor, weights: Tensor, surrogate: Surrogate | None = None
    ) -> Tensor:
        """Return the gradient of the attack's loss in the weights of pairs.

        ``build`` makes the matrix of pairs, weights and the number of nodes: sparse or dense, nothing else differs.
        """
        graph, surrogate = self.graph, surrogate or self.surrogate
        start = surrogate.start(graph, self.generator)
        return surrogate.meta_gradient(
            graph, start, self.target, lambda weights: build(pairs, weights, graph.nodes), weights
        )

    def flip(self) -> Tensor:
        """Flip the candidate that raises the loss most, and return it, ``[2]``."""
        pairs, weights = self.candidates()
        number = len(self.edges)
        scores = self.gradient(normalized, pairs, weights) * (1 - 2 * weights)
        scores[:number].masked_fill_(is_last(pairs[:number], self.graph.nodes), -torch.inf)
        best = int(scores.argmax())
        self.absent = self.absent[scores[number:].topk(self.block // 2).indices]
        chosen = keys_of(pairs[best : best + 1], self.graph.nodes)
        kept = (keys[~torch.isin(keys, chosen)] for keys in (self.edges, self.absent))
        self.edges, self.absent = kept
        if best >= number:
            self.edges = torch.cat([self.edges, chosen])
        return pairs[best]

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a run that goes on must know."""
        return {"edges": self.edges, "absent": self.absent, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from there."""
        self.edges, self.absent = state["edges"], state["absent"]
        self.generator.set_state(state["generator"])


def random_pairs(graph: Citations, number: int, generator: torch.Generator) -> Tensor:
    """Return the pairs of the graph and a number of others drawn at random."""
    edges = keys_of(graph.pairs, graph.nodes)
    drawn = refilled(torch.empty(0, dtype=torch.int64), edges, number, graph.nodes, generator)
    return pairs_of(torch.cat([edges, drawn]), graph.nodes)


def refilled(absent: Tensor, edges: Tensor, size: int, nodes: int, generator: torch.Generator) -> Tensor:
    """Return ``size`` keys of pairs that are no edges: those that are given, and more at random."""
    while len(absent) < size:
        drawn = torch.randint(nodes, (2 * (size - len(absent)) + 16, 2), generator=generator)
        keys = keys_of(drawn[drawn[:, 0] != drawn[:, 1]].sort(1).values, nodes)
        new = keys[~torch.isin(keys, torch.cat([edges, absent]))].unique()
        new = new[torch.randperm(len(new), generator=generator)]
        absent = torch.cat([absent, new[: size - len(absent)]])
    return absent


def rows(matrix: Any, nodes: Tensor) -> Any:
    """Return the rows of some nodes, in ascending order, of a sparse or a strided matrix."""
    if not isinstance(matrix, SparseTensor):
        return matrix[nodes]
    number = torch.full((matrix.shape[0],), -1).index_put((nodes,), torch.arange(len(nodes)))[
        matrix.pattern.row
    ]
    inside = number >= 0
    pattern = Pattern(number[inside], matrix.pattern.col[inside], (len(nodes), matrix.shape[1]))
    return SparseTensor(pattern, matrix.values[inside])


def is_last(pairs: Tensor, nodes: int) -> Tensor:
    """Say of each pair whether it is the only one of one of its nodes."""
    degrees = pairs.flatten().bincount(minlength=nodes)
    return (degrees[pairs] == 1).any(1)


def keys_of(pairs: Tensor, nodes: int) -> Tensor:
    """Number the pairs of nodes."""
    return pairs[:, 0] * nodes + pairs[:, 1]


def pairs_of(keys: Tensor, nodes: int) -> Tensor:
    """Return the pairs of nodes of their numbers, ``[pairs, 2]``."""
    return torch.stack([keys // nodes, keys % nodes], 1)


def dense_normalized(pairs: Tensor, weights: Tensor, nodes: int) -> Tensor:
    """Return what :func:`experiments.studies.citations.normalized` does, as a strided matrix."""
    half = weights.new_zeros(nodes, nodes).index_put(tuple(pairs.unbind(1)), weights)
    matrix = half + half.mT + torch.eye(nodes, dtype=weights.dtype)
    scale = matrix.sum(1).rsqrt()
    return scale[:, None] * matrix * scale
