r"""Poison a citation graph: `python -m experiments.studies.attack [seeds=[0]] [fraction=0.05] [KEY=VALUE ...]`.

Metattack flips edges of Cora by the gradient of training through a sparse adjacency matrix. For comparison, the same
number of random edges are added. A graph convolutional network (Kipf, Welling, ICLR 2017) is trained on each graph,
with and without defenses.

.. math:: \max_{A'} \; \mathcal{L}_{\text{atk}}(\theta_T(A'), A'), \qquad
          \theta_{t+1} = \theta_t - \alpha \nabla_\theta \mathcal{L}_{\text{train}}(\theta_t, A')

The surrogate is the linear graph network :math:`\hat A^2 X W`. The attack maximizes the loss of the surrogate on its
own predictions for the unlabeled nodes of the clean graph (Meta-Self). Each meta-gradient flips the edge that raises
the loss most to first order. Zügner, Günnemann, "Adversarial attacks on graph neural networks via meta learning",
ICLR 2019, algorithm 2, without its test of the degree distribution. The candidates are the edges and a block of
other pairs. After each flip the better half of the block stays and the rest is drawn again (Geisler et al., NeurIPS
2021, section 3). So memory grows with the candidates, not with all pairs of nodes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import metagrad as mg
from experiments.run.files import markdown
from experiments.run.measure import peak_bytes
from experiments.run.plots.style import BLUE, MUTED, VERMILION, figure, label_lines
from experiments.run.progress import Progress
from experiments.run.schema import key
from experiments.studies.citations import Citations, largest_component, load, normalized
from experiments.studies.study import Cell, Result, Study, StudyConfig, Work, spread
from metagrad.sparse import Pattern, SparseTensor

Params = dict[str, Tensor]
HIDDEN, DROPOUT = 16, 0.5  # as Kipf and Welling's
WEIGHT_DECAY, LR = 5e-4, 0.01
LEAST_JACCARD = 0.01  # a lower similarity means that two papers have no word in common
TITLES = {
    "clean": "as it is",
    "no edges": "no edges: words only",
    "clean, similar": "as it is, edges of dissimilar papers left out",
    "clean, learned": "as it is, edge weights learned on validation nodes",
    "metattack, similar": "Metattack, edges of dissimilar papers left out",
    "metattack, learned": "Metattack, edge weights learned on validation nodes",
}


@dataclass
class Surrogate:
    """The training that the attack differentiates through."""

    steps: int = key("Steps of gradient descent.")
    lr: float = key("Its learning rate.")
    momentum: float = key("Its momentum.")
    memory: Any = key("Memory mode of the unroll: full, sqrt, step, or a budget such as 64MiB.")

    def logits(self, params: Params, last: Any, matrix: Any, words: Any) -> Tensor:
        """Return the logits ``[nodes, classes]`` of the nodes that are rows of the matrix ``last``."""
        return last @ (matrix @ (words @ params["weight"]))

    def trained(self, params: Params, matrix: Any, words: Any, graph: Citations) -> Params:
        """Train on the training nodes. The result is differentiable with respect to the matrix."""
        rule = mg.optim.rules.sgd(lr=self.lr, momentum=self.momentum)
        labels = graph.labels[graph.train]

        def step(state: tuple[Params, Any], t: int, last: Any, matrix: Any) -> tuple[Any, None]:
            params, inner = state
            loss = F.cross_entropy(self.logits(params, last, matrix, words), labels)
            return rule.update(mg.grad(loss, params, create_graph=True), inner, params), None

        start, last = (params, rule.init(params)), rows(matrix, graph.train)
        (params, _), _ = mg.unroll(step, start, last, matrix, steps=self.steps, memory=self.memory)
        return params

    def meta_gradient(
        self,
        graph: Citations,
        params: Params,
        target: Tensor,
        build: Callable[[Tensor], Any],
        weights: Tensor,
    ) -> Tensor:
        """Return the gradient of the loss on ``target`` after training, with respect to the weights of pairs."""
        weights = weights.detach().requires_grad_()
        matrix = build(weights)
        words = graph.words if isinstance(matrix, SparseTensor) else graph.words.to_dense()
        nodes = graph.unlabelled
        logits = self.logits(self.trained(params, matrix, words, graph), matrix, matrix, words)
        return mg.grad(F.cross_entropy(logits[nodes], target[nodes]), weights)


@dataclass
class AttackConfig(StudyConfig):
    """Each seed has its own split of the nodes and its own attack."""

    victims: int = key("Networks that are trained on each graph.")
    epochs: int = key("Steps of Adam that train each network.")
    fraction: float = key("Fraction of the edges that are flipped.")
    points: int = key("How often the accuracy is measured on the way.")
    block: int = key("Pairs that are no edges, and are candidates of a flip.")
    surrogate: Surrogate = field(default_factory=Surrogate)
    defense_steps: int = key("Steps that learn the weights of edges.")
    defense_inner: int = key("Training steps that each of them differentiates through.")


class Metattack:
    """A graph whose edges are flipped, one edge at a time.

    ``block`` is the number of candidate pairs without an edge.
    """

    def __init__(self, graph: Citations, surrogate: Surrogate, *, block: int, seed: int) -> None:
        self.graph, self.surrogate, self.block = graph, surrogate, block
        self.generator = torch.Generator().manual_seed(seed)
        self.edges, self.absent = keys_of(graph.pairs, graph.nodes), torch.empty(0, dtype=torch.int64)
        with torch.no_grad():
            matrix = normalized(graph.pairs, torch.ones(len(graph.pairs)), graph.nodes)
        trained = surrogate.trained(self.start(), matrix, graph.words, graph)
        self.target = surrogate.logits(trained, matrix, matrix, graph.words).argmax(1)
        self.target[graph.train] = graph.labels[graph.train]

    @property
    def pairs(self) -> Tensor:
        """The current edges, ``[edges, 2]``."""
        return pairs_of(self.edges, self.graph.nodes)

    def start(self) -> Params:
        """Draw parameters of the surrogate."""
        weight = torch.empty(self.graph.words.shape[1], self.graph.classes)
        torch.nn.init.xavier_uniform_(weight, generator=self.generator)
        return {"weight": weight.requires_grad_()}

    def candidates(self) -> tuple[Tensor, Tensor]:
        """Return the candidate pairs, edges first, and their weights: 1 for an edge, 0 for another pair."""
        self.absent = refilled(self.absent, self.edges, self.block, self.graph.nodes, self.generator)
        keys = torch.cat([self.edges, self.absent])
        return pairs_of(keys, self.graph.nodes), (torch.arange(len(keys)) < len(self.edges)).float()

    def gradient(self, build: Any, pairs: Tensor, weights: Tensor, memory: Any = None) -> Tensor:
        """Return the gradient of the attack's loss. ``build`` makes a sparse or dense matrix of weighted pairs."""
        graph, surrogate = self.graph, replace(self.surrogate, memory=memory or self.surrogate.memory)
        build = partial(build, pairs, nodes=graph.nodes)
        return surrogate.meta_gradient(graph, self.start(), self.target, build, weights)

    def flip(self) -> Tensor:
        """Flip the candidate that raises the loss most, and return it, ``[2]``."""
        pairs, weights = self.candidates()
        number = len(self.edges)
        scores = self.gradient(normalized, pairs, weights) * (1 - 2 * weights)
        scores[:number].masked_fill_(is_last(pairs[:number], self.graph.nodes), -torch.inf)
        best = int(scores.argmax())
        self.absent = self.absent[scores[number:].topk(self.block // 2).indices]
        chosen = keys_of(pairs[best : best + 1], self.graph.nodes)
        self.edges, self.absent = (keys[~torch.isin(keys, chosen)] for keys in (self.edges, self.absent))
        if best >= number:
            self.edges = torch.cat([self.edges, chosen])
        return pairs[best]


def refilled(absent: Tensor, edges: Tensor, size: int, nodes: int, generator: torch.Generator) -> Tensor:
    """Return ``size`` keys of pairs without an edge: the given keys, and further random keys."""
    while len(absent) < size:
        drawn = torch.randint(nodes, (2 * (size - len(absent)) + 16, 2), generator=generator)
        keys = keys_of(drawn[drawn[:, 0] != drawn[:, 1]].sort(1).values, nodes)
        new = keys[~torch.isin(keys, torch.cat([edges, absent]))].unique()
        new = new[torch.randperm(len(new), generator=generator)]
        absent = torch.cat([absent, new[: size - len(absent)]])
    return absent


def rows(matrix: Any, nodes: Tensor) -> Any:
    """Return the rows of some nodes, in ascending order, of a sparse or a dense matrix."""
    if not isinstance(matrix, SparseTensor):
        return matrix[nodes]
    places = torch.full((matrix.shape[0],), -1).index_put((nodes,), torch.arange(len(nodes)))
    number = places[matrix.pattern.row]
    inside = number >= 0
    pattern = Pattern(number[inside], matrix.pattern.col[inside], (len(nodes), matrix.shape[1]))
    return SparseTensor(pattern, matrix.values[inside])


def is_last(pairs: Tensor, nodes: int) -> Tensor:
    """Return for each edge whether it is the last edge of a node."""
    degrees = pairs.flatten().bincount(minlength=nodes)
    return (degrees[pairs] == 1).any(1)


def keys_of(pairs: Tensor, nodes: int) -> Tensor:
    """Return a key for each pair of nodes."""
    return pairs[:, 0] * nodes + pairs[:, 1]


def pairs_of(keys: Tensor, nodes: int) -> Tensor:
    """Return the pairs of nodes with these keys, ``[pairs, 2]``."""
    return torch.stack([keys // nodes, keys % nodes], 1)


def dense_normalized(pairs: Tensor, weights: Tensor, nodes: int) -> Tensor:
    """Return the matrix of :func:`experiments.studies.citations.normalized` as a dense tensor."""
    half = weights.new_zeros(nodes, nodes).index_put(tuple(pairs.unbind(1)), weights)
    matrix = half + half.mT + torch.eye(nodes, dtype=weights.dtype)
    scale = matrix.sum(1).rsqrt()
    return scale[:, None] * matrix * scale


def network(graph: Citations) -> Params:
    """Draw the parameters of a graph convolutional network."""
    sizes = {"first": (graph.words.shape[1], HIDDEN), "second": (HIDDEN, graph.classes)}
    draw = torch.nn.init.xavier_uniform_
    return {name: draw(torch.empty(size)).requires_grad_() for name, size in sizes.items()}


def logits(params: Params, matrix: SparseTensor, words: SparseTensor, dropout: float = 0.0) -> Tensor:
    """Return the logits of all nodes, ``[nodes, classes]``."""
    words = words.with_values(F.dropout(words.values, dropout))
    hidden = F.dropout(torch.relu(matrix @ (words @ params["first"])), dropout)
    return matrix @ (hidden @ params["second"])


def accuracy(graph: Citations, pairs: Tensor, weights: Tensor | None, epochs: int, seed: int) -> float:
    """Train a network on a graph, and return the percentage of test nodes that it classifies right."""
    torch.manual_seed(seed)
    with torch.no_grad():
        matrix = normalized(pairs, torch.ones(len(pairs)) if weights is None else weights, graph.nodes)
    params = network(graph)
    optimizer = torch.optim.Adam(params.values(), lr=LR, weight_decay=WEIGHT_DECAY)
    for _ in range(epochs):
        optimizer.zero_grad()
        F.cross_entropy(
            logits(params, matrix, graph.words, DROPOUT)[graph.train], graph.labels[graph.train]
        ).backward()
        optimizer.step()
    with torch.no_grad():
        found = logits(params, matrix, graph.words)[graph.test].argmax(1)
    return 100 * (found == graph.labels[graph.test]).double().mean().item()


def learned(graph: Citations, pairs: Tensor, seed: int, *, steps: int, inner_steps: int) -> Tensor:
    """Return a weight for each edge, learned on the validation nodes through the training of the network."""

    def loss_on(nodes: Tensor, params: Params, hyper: Params) -> Tensor:
        matrix = normalized(pairs, hyper["logits"].sigmoid(), graph.nodes)
        return F.cross_entropy(logits(params, matrix, graph.words)[nodes], graph.labels[nodes])

    torch.manual_seed(seed)
    rule = mg.optim.rules.adam(lr=0.1, weight_decay=WEIGHT_DECAY)
    found = mg.bilevel(
        partial(loss_on, graph.val),
        partial(loss_on, graph.train),
        network(graph),
        {"logits": torch.full((len(pairs),), 3.0)},  # weights begin near one
        inner=rule,
        outer=mg.optim.rules.adam(lr=0.5),
        steps=steps,
        inner_steps=0,
        method=mg.hypergrad.Unroll(rule, steps=inner_steps, memory="sqrt"),
    )
    return found.hyper["logits"].sigmoid()


def similar(graph: Citations, pairs: Tensor, least: float = LEAST_JACCARD) -> Tensor:
    """Return the pairs whose words have a Jaccard index of at least ``least`` (Wu et al., IJCAI 2019, section 4)."""
    left, right = (graph.words.to_dense()[nodes] for nodes in pairs.unbind(1))
    return pairs[(left * right).sum(1) >= least * torch.maximum(left, right).sum(1)]


def attack(config: AttackConfig, work: Work) -> Result:
    """Attack, train networks on the graphs that result, and return their accuracy."""
    graph = largest_component(load(), torch.Generator().manual_seed(work.seed))
    attack = Metattack(graph, config.surrogate, block=config.block, seed=work.seed)
    flips = round(config.fraction * len(graph.pairs))
    marks = [round(flips * point / config.points) for point in range(1, config.points + 1)]
    poisoned, began = {}, time.perf_counter()
    for number in Progress(range(1, flips + 1), unit="flip", leave=False):
        attack.flip()
        if number in marks:
            poisoned[number] = attack.pairs
    return {
        "nodes": graph.nodes,
        "edges": len(graph.pairs),
        "flips": flips,
        "seconds_per_flip": (time.perf_counter() - began) / flips,
        "memory": memory(attack),
        "graphs": evaluate(graph, poisoned, config, work.seed),
    }


def memory(attack: Metattack) -> dict[str, int]:
    """Return the peak bytes of a meta-gradient: sparse, and dense in the better mode."""
    pairs, weights = attack.candidates()
    own = attack.surrogate.memory

    def peak(build: Callable[..., Any], mode: Any) -> int:
        return peak_bytes(lambda: attack.gradient(build, pairs, weights, mode))

    dense = min(peak(dense_normalized, mode) for mode in {"full", own})
    return {"sparse": peak(normalized, own), "dense": dense}


def evaluate(
    graph: Citations, poisoned: dict[int, Tensor], config: AttackConfig, seed: int
) -> dict[str, dict[str, Any]]:
    """Train networks on every graph, and return by name the flipped edges and the accuracy of each network."""
    generator = torch.Generator().manual_seed(seed)
    edges = keys_of(graph.pairs, graph.nodes)
    graphs: dict[str, tuple[int, Tensor, Tensor | None]] = {"clean": (0, graph.pairs, None)}
    for number, pairs in poisoned.items():
        drawn = refilled(edges[:0], edges, number, graph.nodes, generator)
        added = pairs_of(torch.cat([edges, drawn]), graph.nodes)
        graphs |= {f"random {number}": (number, added, None), f"metattack {number}": (number, pairs, None)}
    graphs["no edges"] = (0, graph.pairs[:0], None)
    last = max(poisoned)
    for name, number, pairs in (("clean", 0, graph.pairs), ("metattack", last, poisoned[last])):
        weights = learned(graph, pairs, seed, steps=config.defense_steps, inner_steps=config.defense_inner)
        graphs[f"{name}, similar"] = (number, similar(graph, pairs), None)
        graphs[f"{name}, learned"] = (number, pairs, weights)
    return {
        name: {
            "flips": number,
            "accuracies": [
                accuracy(graph, pairs, weights, config.epochs, seed) for seed in range(config.victims)
            ],
        }
        for name, (number, pairs, weights) in Progress(graphs.items(), unit="graph", leave=False)
    }


def means(results: list[Result], name: str) -> list[float]:
    """Return the mean accuracy of each seed on a graph."""
    return [statistics.mean(one["graphs"][name]["accuracies"]) for one in results]


def report(results: list[Result], config: AttackConfig) -> str:
    """Return the page."""
    first = results[0]
    flips, graphs = first["flips"], first["graphs"]
    table = [["graph", "edges flipped", "accuracy (%)"]]
    for name in sorted(graphs, key=lambda name: ("," in name, graphs[name]["flips"])):
        number = graphs[name]["flips"]
        title = TITLES.get(name) or ("Metattack" if name[0] == "m" else "edges added at random")
        flipped = f"{number} ({100 * number / first['edges']:.1f} %)"
        table.append([title, flipped, spread(means(results, name))])
    clean, attacked, by_chance = (
        statistics.mean(means(results, name)) for name in ("clean", f"metattack {flips}", f"random {flips}")
    )
    sparse, dense = (max(one["memory"][kind] for one in results) / 2**20 for kind in ("sparse", "dense"))
    seconds = statistics.mean(one["seconds_per_flip"] for one in results)
    return f"""# A citation graph under attack

Cora's largest component: {first["nodes"]} papers, {first["edges"]} citations; a tenth of the papers are labelled. The
accuracy of a graph network on the test papers is the mean over seeds ({len(results)}) and the networks of each
({config.victims}), with the standard deviation over seeds.

{markdown(table)}

With {flips} edges the accuracy drops by {clean - attacked:.1f} points under Metattack, by {clean - by_chance:.1f}
with edges drawn at random. A flip took {seconds:.2f} s. The peak of a meta-gradient through
{config.surrogate.steps} steps was {sparse:.1f} MiB. A dense matrix took {dense:.0f} MiB in the better memory
mode, {dense / sparse:.0f} times as much.
"""


def figures(results: list[Result], config: AttackConfig, folder: Path) -> list[Path]:
    """Draw the accuracy over the flipped edges, with the range over seeds."""
    path, first = folder / "attack.png", results[0]
    with figure(path, size=(7, 4)) as axes:
        axis = axes[0, 0]
        kinds = {"random": (BLUE, "Random edges"), "metattack": (VERMILION, "Metattack")}
        for kind, (color, label) in kinds.items():
            names = ["clean", *(name for name in first["graphs"] if name.startswith(f"{kind} "))]
            x = [100 * first["graphs"][name]["flips"] / first["edges"] for name in names]
            y = [means(results, name) for name in names]
            axis.fill_between(x, list(map(min, y)), list(map(max, y)), color=color, alpha=0.15, linewidth=0)
            axis.plot(x, list(map(statistics.mean, y)), color=color, marker="o", markersize=4, label=label)
        words = statistics.mean(means(results, "no edges"))
        axis.axhline(words, color=MUTED, linestyle="--", linewidth=1.2, label="Only words, no graph")
        axis.set(xlabel="Edges flipped (%)", ylabel="Test accuracy of a graph network (%)")
        drop = statistics.mean(y[0]) - statistics.mean(y[-1])
        axis.set_title(f"Metattack on {x[-1]:.0f} % of the edges costs {drop:.1f} points of accuracy")
        axis.grid(axis="y")
        label_lines(axis)
    return [path]


def check(config: AttackConfig) -> None:
    """Raise `ValueError` unless `fraction` is between 0 and 1."""
    if not 0 < config.fraction < 1:
        raise ValueError(f"attack: fraction must be between 0 and 1, got {config.fraction}.")


def cells(config: AttackConfig) -> list[Cell]:
    """Return an attack for each seed."""
    return [Cell("cora", seed, partial(attack, config)) for seed in config.seeds]


study = Study("attack", AttackConfig, cells=cells, report=report, figures=figures, check=check)

if __name__ == "__main__":
    study.main()
