"""Search cells by gradients: `python -m experiments.studies.search [seeds=[0]] [methods=[cg]] [KEY=VALUE ...]`.

Differentiable architecture search (DARTS) with several hypergradients, and random search, find cells of a small
convolutional network for characters. Each cell is trained from scratch, and compared with a hand-made cell that has a
3 x 3 convolution on every edge.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import metagrad as mg
from experiments.run.files import markdown
from experiments.run.measure import cpu_seconds, peak_bytes
from experiments.run.plots.style import CYCLE, INK, MUTED, figure, legend_below
from experiments.run.progress import Progress
from experiments.run.schema import key
from experiments.studies import characters
from experiments.studies.characters import Examples
from experiments.studies.study import Cell, Result, Study, StudyConfig, Work, by_cell, spread
from metagrad import hypergrad
from metagrad.hypergrad import HypergradientMethod

Params = dict[str, Tensor]
Architecture: TypeAlias = "tuple[tuple[int, int, str], ...]"
"""Edges of a discrete cell: from, to, operation."""

SIZE, DRAWINGS = 14, 20  # pixels along a side of an image, and images of a character
TRAIN, VALIDATION = (
    8,
    6,
)  # images of each character for training and validation. The rest is for the test
OPERATIONS = ("none", "skip", "max_pool", "avg_pool", "conv_1x1", "conv_3x3")
NODES, KEPT = (
    3,
    2,
)  # nodes of a cell without its input, and the maximum of edges into a node of a discrete cell
EDGES = tuple((i, j) for j in range(1, NODES + 1) for i in range(j))
CHANNELS, GROUPS, PLACES = 8, 4, 2
BY_HAND: Architecture = tuple((i, j, "conv_3x3") for i, j in ((0, 1), (0, 2), (1, 2), (0, 3), (1, 3)))
LR, MOMENTUM, DECAY = 0.1, 0.9, 1e-3  # of the weights in a search
ALPHA_LR = 0.1  # 3e-4 in DARTS, which takes hundreds of times as many steps
START = 1e-3  # standard deviation of the first logits of the architecture, as in DARTS
DAMPING = 40  # well above the most negative eigenvalue of the training loss
SCALE = 0.02  # below 2 over its largest eigenvalue plus the damping
TRAINING_LR = 0.01  # the highest learning rate of training from scratch
TIMED = 3  # timed calls. The fastest counts
METHODS: dict[str, Callable[[int], HypergradientMethod]] = {
    "first_order": lambda products: hypergrad.FirstOrder(),
    "finite_difference": lambda products: hypergrad.FiniteDifference(lr=LR),
    "unroll": lambda products: hypergrad.Unroll(mg.optim.rules.sgd(lr=LR), steps=products),
    "cg": lambda products: hypergrad.CG(steps=products, damping=DAMPING),
    "neumann": lambda products: hypergrad.Neumann(steps=products, scale=SCALE, damping=DAMPING),
}
TITLES = {
    "random": "random search: best on validation",
    "by_hand": "by hand: 3 x 3 convolutions",
    "first_order": "FirstOrder (DARTS, first order)",
    "finite_difference": "FiniteDifference (DARTS, second order)",
    "unroll": "Unroll",
    "cg": "CG",
    "neumann": "Neumann",
}


@dataclass
class ArchitectureConfig(StudyConfig):
    """Each seed has its own characters."""

    methods: list[str] = key(f"Hypergradients to search with: {', '.join(METHODS)}.")
    drawn: int = key("Architectures of the random search.")
    repeats: int = key("Trainings of the cell that a search has found; their mean is its accuracy.")
    characters: int = key("Classes, drawn with the seed.", least=2)
    steps: int = key("Steps on the architecture.")
    inner_steps: int = key("Steps on the weights for each.")
    batch: int = key("Images of a step of the search, at both levels.")
    products: int = key("Steps of CG, Neumann and Unroll.")
    epochs: int = key("Passes over the images in training from scratch.")


class Data(NamedTuple):
    """Images of each part, `[n, 1, size, size]`."""

    train: Examples
    validation: Examples
    both: Examples
    test: Examples


def load(count: int, seed: int) -> Data:
    """Sample the characters of a seed, and split their images."""
    source = torch.Generator().manual_seed(seed)
    images = characters.load("small1", count, generator=source, key="search: characters", size=SIZE)
    order = torch.rand(count, DRAWINGS, generator=source).argsort(1)
    images, kept = images[torch.arange(count)[:, None], order].unsqueeze(2), TRAIN + VALIDATION
    train, validation = characters.by_drawers(images, TRAIN, VALIDATION)
    both, test = characters.by_drawers(images, kept, DRAWINGS - kept)
    return Data(train, validation, both, test)


class Graph(nn.Module):
    """A graph of nodes, whose output joins all nodes, `[batch, NODES * channels, height, width]`.

    Args:
        channels: Channels of a node.
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
        """Compute all nodes. Weights `[operations]` of each edge mix its operations, if there are weights."""
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
        classes: Number of classes.
        channels: Channels of a node.
        architecture: The architecture of both cells. None for the mixed network.
    """

    def __init__(self, classes: int, channels: int, architecture: Architecture | None = None) -> None:
        super().__init__()
        mixed = dict.fromkeys(EDGES, OPERATIONS)
        edges = mixed if architecture is None else {(i, j): (o,) for i, j, o in architecture}
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.first, self.second = Graph(channels, edges), Graph(channels, edges)
        self.between = nn.Conv2d(NODES * channels, channels, 1)
        self.last = nn.Linear(NODES * channels * PLACES**2, classes)

    def forward(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        """Return logits of images `[batch, 1, height, width]`, given alpha `[edges, operations]` if it is mixed."""
        weights = None if alpha is None else dict(zip(EDGES, alpha.softmax(1), strict=True))
        h = self.first(self.stem(x), weights)
        h = F.avg_pool2d(self.between(h), 2, ceil_mode=True)
        return self.last(F.adaptive_avg_pool2d(self.second(h, weights), PLACES).flatten(1))


def discrete(alpha: Tensor) -> Architecture:
    """Return the strongest operation other than "none" on the strongest edges into each node."""
    weights = alpha.softmax(1)[:, 1:]
    found: list[tuple[int, int, str]] = []
    for j in range(1, NODES + 1):
        strongest = {edge: row.max(0) for edge, row in zip(EDGES, weights, strict=True) if edge[1] == j}
        kept = sorted(strongest, key=lambda edge: -strongest[edge].values.item())[:KEPT]
        found += [(*edge, OPERATIONS[1 + int(strongest[edge].indices)]) for edge in sorted(kept)]
    return tuple(found)


def draw(generator: torch.Generator) -> Architecture:
    """Draw an architecture: edges and operations are uniform."""
    return discrete(torch.randn(len(EDGES), len(OPERATIONS), generator=generator))


def _name(edge: tuple[int, int], operation: str) -> str:
    return f"{edge[0]}_{edge[1]}_{operation}"


def accuracy(architecture: Architecture, on: Examples, test: Examples, epochs: int, seed: int) -> float:
    """Train a network from scratch with a one-cycle learning rate, and return its accuracy in percent."""
    torch.manual_seed(seed)
    network = Network(int(on.y.max()) + 1, CHANNELS, architecture)
    batches = on.batches(48, seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=TRAINING_LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, TRAINING_LR, total_steps=epochs * len(batches))
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return 100 * (network(test.x).argmax(1) == test.y).double().mean().item()


def repeated(architecture: Architecture, data: Data, config: ArchitectureConfig, seed: int) -> float:
    """Return the mean test accuracy of networks trained on all other images."""
    seeds = Progress(range(1000 * seed, 1000 * seed + config.repeats), unit="network", leave=False)
    return statistics.mean(
        accuracy(architecture, data.both, data.test, config.epochs, seed) for seed in seeds
    )


class Search:
    """A mixed network, and the two losses of its weights and architecture."""

    def __init__(self, network: Network, data: Data, config: ArchitectureConfig, seed: int) -> None:
        self.network, self.data, self.config, self.seed = network, data, config, seed
        self.params: Params = {name: p.detach() for name, p in network.named_parameters()}
        source = torch.Generator().manual_seed(seed)
        self.hyper = {"alpha": START * torch.randn(len(EDGES), len(OPERATIONS), generator=source)}

    def validation_loss(self, params: Params, hyper: Params, batch: Any) -> Tensor:
        """Return the cross-entropy of a batch."""
        x, y = batch
        return F.cross_entropy(functional_call(self.network, params, (x, hyper["alpha"])), y)

    def training_loss(self, params: Params, hyper: Params, batch: Any) -> Tensor:
        """Return the cross-entropy of a batch, with the penalty."""
        penalty = torch.stack([p.square().sum() for p in params.values()]).sum()
        return self.validation_loss(params, hyper, batch) + DECAY / 2 * penalty

    def run(
        self, method: HypergradientMethod, log: Callable[[int, dict[str, float]], None]
    ) -> dict[str, Any]:
        """Search with a hypergradient, and return the architecture, the history and the cost."""
        config = self.config

        def observe(step: int, params: Any, hyper: Any, loss: float) -> None:
            bar.update()
            log(step, {"loss/validation": loss})

        began = time.process_time()
        steps = Progress(total=config.steps, unit="step", leave=False)
        with warnings.catch_warnings(), steps as bar:
            # A few products do not solve the system. The study compares their distances to a solution.
            warnings.filterwarnings("ignore", message=".*left a residual")
            found = mg.bilevel(
                self.validation_loss,
                self.training_loss,
                self.params,
                self.hyper,
                inner=mg.optim.rules.sgd(lr=LR, momentum=MOMENTUM),
                outer=mg.optim.rules.adam(lr=ALPHA_LR, betas=(0.5, 0.999)),
                steps=config.steps,
                inner_steps=config.inner_steps,
                method=method,
                inner_batches=self.data.train.batches(self.config.batch, self.seed),
                outer_batches=self.data.validation.batches(self.config.batch, self.seed + 1),
                callback=observe,
            )
            seconds = time.process_time() - began
            cost = self.cost(method, found.params, found.hyper)
        return {
            "architecture": discrete(found.hyper["alpha"]),
            "seconds": seconds,
            **cost,
        }

    def cost(self, method: HypergradientMethod, params: Any, hyper: Any) -> dict[str, float]:
        """Measure one hypergradient and one gradient of the training loss with respect to the weights."""
        batches = (
            part.batches(self.config.batch, self.seed) for part in (self.data.validation, self.data.train)
        )
        outer, inner = (
            partial(loss, batch=next(iter(own)))
            for loss, own in zip((self.validation_loss, self.training_loss), batches, strict=True)
        )

        def one() -> object:
            return mg.hypergradient(outer, inner, params, hyper, method=method)

        def unit() -> object:
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            return mg.grad(inner(leaves, hyper), leaves)

        return {
            "gradients": cpu_seconds(one, TIMED) / cpu_seconds(unit, TIMED),
            "peak(MiB)": peak_bytes(one) / 2**20,
            "gradient peak(MiB)": peak_bytes(unit) / 2**20,
        }


def random_search(config: ArchitectureConfig, work: Work) -> Result:
    """Sample architectures, choose the best on validation images, and test all of them."""
    data, seed = load(config.characters, work.seed), work.seed
    networks = partial(Progress[Architecture], unit="network", leave=False)
    source = torch.Generator().manual_seed(seed)
    found, began = [draw(source) for _ in range(config.drawn)], time.process_time()
    validation = [accuracy(one, data.train, data.validation, config.epochs, seed) for one in networks(found)]
    seconds = time.process_time() - began
    best = found[max(range(len(found)), key=lambda i: validation[i])]
    return {
        "architecture": best,
        "accuracy": repeated(best, data, config, seed),
        "seconds": seconds,
        "accuracies": [
            accuracy(one, data.both, data.test, config.epochs, 1000 * seed) for one in networks(found)
        ],
    }


def by_hand(config: ArchitectureConfig, work: Work) -> Result:
    """Train a cell of convolutions."""
    return {"accuracy": repeated(BY_HAND, load(config.characters, work.seed), config, work.seed)}


def searched(config: ArchitectureConfig, work: Work, *, method: str) -> Result:
    """Search with a hypergradient, and train the architecture."""
    data = load(config.characters, work.seed)
    torch.manual_seed(work.seed)  # every hypergradient starts at the same weights
    search = Search(Network(config.characters, CHANNELS), data, config, work.seed)
    found = search.run(METHODS[method](config.products), work.log)
    return {"accuracy": repeated(found["architecture"], data, config, work.seed), **found}


def report(results: list[Result], config: ArchitectureConfig) -> str:
    """Return the page."""
    groups = by_cell(results)
    medians = {one["seed"]: statistics.median(one["accuracies"]) for one in groups.get("random", [])}
    table = [["cell found by", "test accuracy (%)", "above the median drawn", "seconds", "gradients", "MiB"]]
    if medians:
        table.append(["random search: median", spread(list(medians.values())), "", "", "", ""])
    for name, own in groups.items():
        above = [one["accuracy"] > medians[one["seed"]] for one in own if one["seed"] in medians]
        columns = [
            [one[column] for one in own if column in one] for column in ("seconds", "gradients", "peak(MiB)")
        ]
        values = [spread(column) if column else "" for column in columns]
        accuracy = spread([one["accuracy"] for one in own])
        table.append([TITLES[name], accuracy, f"{sum(above)} of {len(above)}", *values])
    return f"""# Architecture search

{config.characters} characters of Omniglot at {SIZE} x {SIZE} pixels: {TRAIN} images of each to train on,
{VALIDATION} to choose by, the rest for the test. Means and standard deviations over {len(config.seeds)} seeds.
Random search trains {config.drawn} architectures. A hypergradient is measured in gradients of the training loss
with respect to the weights.

{markdown(table)}
"""


def figures(results: list[Result], config: ArchitectureConfig, folder: Path) -> list[Path]:
    """Draw the accuracies of all architectures."""
    with figure(folder / "search.png", size=(7, 4.3)) as axes:
        _accuracies(axes[0, 0], by_cell(results), config.seeds)
        legend_below(axes[0, 0], columns=3)
    return [folder / "search.png"]


def _accuracies(axis: Any, groups: dict[str, list[Result]], seeds: list[int]) -> None:
    drawn = {seeds.index(one["seed"]): one["accuracies"] for one in groups.get("random", [])}
    points = [(x, value) for x, values in drawn.items() for value in values]
    style = {"color": MUTED, "alpha": 0.45, "markersize": 4}
    axis.plot(*_columns(points), "o", label="random cells", **style)
    x = torch.tensor(list(drawn), dtype=torch.float64)
    medians = [statistics.median(values) for values in drawn.values()]
    axis.hlines(medians, x - 0.35, x + 0.35, color=INK, linewidth=1.4, label="median random cell")
    names = [name for name in groups if name not in ("random", "by_hand")]
    colors: dict[str, str] = dict(zip(names, CYCLE, strict=False))
    for i, (name, color) in enumerate(colors.items()):
        shift = 0.12 * (i - (len(colors) - 1) / 2)
        points = [(seeds.index(one["seed"]) + shift, one["accuracy"]) for one in groups[name]]
        axis.plot(*_columns(points), "D", color=color, markersize=5.5, label=TITLES[name])
    axis.set_xticks(range(len(seeds)), [str(seed) for seed in seeds])
    axis.set_xlabel("Seed")
    axis.set_ylabel("Test accuracy (%)")
    axis.set_title("Random and found cells, trained from scratch")
    axis.grid(axis="y")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def check(config: ArchitectureConfig) -> None:
    """Raise `ValueError` for unknown methods."""
    if unknown := [name for name in config.methods if name not in METHODS]:
        raise ValueError(f"search: methods must be among {', '.join(METHODS)}, got {', '.join(unknown)}.")


def cells(config: ArchitectureConfig) -> list[Cell]:
    """Return for each seed the random search, the architecture by hand, and a search by each hypergradient."""
    runs: dict[str, Callable[..., Result]] = {"random": random_search, "by_hand": by_hand}
    runs |= {name: partial(searched, method=name) for name in config.methods}
    return [Cell(name, seed, partial(run, config)) for seed in config.seeds for name, run in runs.items()]


study = Study(
    "search", ArchitectureConfig, cells=cells, report=report, figures=figures, check=check, free=["methods"]
)

if __name__ == "__main__":
    study.main()
