"""Distil a data set: `python -m experiments.studies.distill [seeds=[0]] [lengths=[100]] [KEY=VALUE ...]`.

Ten images per class are learned by differentiating through training. Each step has a new random initialization.
Networks are then trained on these images, on as many real images, and on all images. The meta-gradients of two
networks are measured with every checkpointing policy.
"""

from __future__ import annotations

import functools
import io
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import metagrad as mg
from experiments.run.files import markdown, write_bytes
from experiments.run.measure import cpu_seconds, peak_bytes
from experiments.run.plots.style import BLUE, MUTED, VERMILION, figure
from experiments.run.progress import Progress
from experiments.run.schema import key
from experiments.studies import characters
from experiments.studies.characters import Examples
from experiments.studies.study import Cell, Result, Study, StudyConfig, Work, by_cell, spread
from metagrad.tasks._groups import published_splits

Params = dict[str, Tensor]
DRAWERS = (14, 2, 4)  # the 20 writers of each character: for training, validation and test
MOMENTUM = 0.9  # of gradient descent on a small set
INNER_TIME = 2.0  # the initial learning rate, times the inner steps
RATES = (0.03, 0.1)  # learning rates on a small set, chosen on the validation images
WATCH_EVERY = 20  # outer steps between evaluations on validation images
MEMORIES = ("full", "step", "sqrt", "32MiB")
BACKGROUND: dict[str, int] = published_splits()["Omniglot"]["background"]
IMAGES, MIB = "images.pt", 2**20
LIMIT, GAP = 1.5, 2  # limit of the color scale, and pixels between images
SETS = {"random": "random images", "herding": "herding", "all": "all images"}
TITLES = {"mlp": "64 hidden units", "convnet": "ConvNet"}


@dataclass
class DistillConfig(StudyConfig):
    """A seed determines the initial real images and all networks."""

    classes: int = key("Alphabets, those with most characters.", least=2)
    per_class: int = key("Images of each in a small set.")
    lengths: list[int] = key("Inner steps that images are learned through; each has a set of its own.")
    steps: int = key("Outer steps, each with a meta-gradient.")
    lr: float = key("Learning rate of Adam on images and log inner rate; it falls to zero by a cosine.")
    batch: int = key("Real images that the outer loss is measured on.")
    memory: Any = key("Memory mode of the unroll: full, sqrt, step, or a budget such as 64MiB.")
    train_steps: int = key(
        "Steps of training on a small set; on learned images also as many as their length."
    )
    epochs: int = key("Passes over all images, by Adam on batches of 128.")
    trials: int = key("Networks that are tested for each set and seed.")
    cost: dict[str, list[int]] = key("The inner steps of the meta-gradients that are measured, by network.")


class Alphabets(NamedTuple):
    """Images ``[n, 1, 28, 28]`` of three groups of writers, and the names of the alphabets, which are the classes."""

    train: Examples
    val: Examples
    test: Examples
    names: list[str]


@functools.cache
def load(classes: int) -> Alphabets:
    """Return the alphabets of the background set with the most characters. Images are split by writer."""
    if classes > len(BACKGROUND):
        raise ValueError(f"distill: classes must be at most {len(BACKGROUND)}, got {classes}.")
    images = characters.load("background").unsqueeze(2)
    by_name = dict(zip(BACKGROUND, images.split(list(BACKGROUND.values())), strict=True))
    names = sorted(BACKGROUND, key=lambda name: -BACKGROUND[name])[:classes]
    labels = torch.arange(classes).repeat_interleave(torch.tensor([BACKGROUND[name] for name in names]))
    drawn = torch.cat([by_name[name] for name in names])
    return Alphabets(*characters.by_drawers(drawn, *DRAWERS, classes=labels), names=names)


def mlp(classes: int) -> nn.Module:
    """Return the network that images are learned for."""
    return nn.Sequential(nn.Flatten(), *mg.models.MLP([784, 64, classes]))


def convnet(classes: int) -> nn.Module:
    """Return a network of two convolutions with strides."""
    first, second = nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.Conv2d(8, 16, 5, stride=2, padding=2)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 49, classes))


NETWORKS: dict[str, Callable[[int], nn.Module]] = {"mlp": mlp, "convnet": convnet}


def train(model: nn.Module, examples: Examples, *, lr: float, steps: int) -> nn.Module:
    """Train by gradient descent on all examples at once, in the same way as the inner loop of distillation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(examples.x), examples.y).backward()
        optimizer.step()
    return model


def train_on_all(model: nn.Module, examples: Examples, epochs: int) -> nn.Module:
    """Train by Adam on batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(examples.x)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(examples.x[chosen]), examples.y[chosen]).backward()
            optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples) -> float:
    """Return the percentage of examples that are classified correctly, or zero if outputs are not finite."""
    logits = model(examples.x)
    return 100 * ((logits.argmax(1) == examples.y) & logits.isfinite().all(1)).double().mean().item()


def random(features: Tensor, count: int) -> list[int]:
    """Draw examples at random."""
    return torch.randperm(len(features))[:count].tolist()


def herding(features: Tensor, count: int) -> list[int]:
    """Choose examples greedily so that their mean stays close to the mean of all examples.

    Welling, "Herding dynamical weights to learn", ICML 2009. For classes of images: Rebuffi et al., "iCaRL", CVPR
    2017, algorithm 4.
    """
    mean, total, found = features.mean(0), torch.zeros_like(features[0]), []
    for number in range(1, count + 1):
        distances = (mean - (total + features) / number).norm(dim=1)
        distances[found] = torch.inf
        found.append(int(distances.argmin()))
        total = total + features[found[-1]]
    return found


CORESETS: dict[str, Callable[[Tensor, int], list[int]]] = {"random": random, "herding": herding}


def coreset(name: str, examples: Examples, features: Tensor, per_class: int) -> Examples:
    """Choose the same number of examples from each class, by their features ``[examples, features]``."""
    chosen = []
    for label in examples.y.unique():
        own = (examples.y == label).nonzero()[:, 0]
        chosen.append(own[CORESETS[name](features[own], per_class)])
    return examples.at(torch.cat(chosen))


class Distillation:
    """Images to be learned through the training of a network by gradient descent.

    Args:
        make: Makes a network.
        start: The initial images, and their classes.
        steps: The number of steps of gradient descent.
        lr: The initial learning rate.
        memory: Checkpointing policy, as in :func:`metagrad.unroll`.
    """

    def __init__(
        self, make: Callable[[], nn.Module], start: Examples, *, steps: int, lr: float, memory: str | int
    ) -> None:
        self.make, self.labels = make, start.y
        self.hyper = {"images": start.x, "log_lr": torch.tensor(math.log(lr), dtype=start.x.dtype)}
        self._network = make()

        def rule(hyper: Any) -> mg.optim.rules.Rule:
            return mg.optim.rules.sgd(lr=hyper["log_lr"].exp(), momentum=MOMENTUM)

        self.method = mg.hypergrad.Unroll(rule, steps=steps, memory=memory)

    def fresh(self, step: int = 0) -> Params:
        """Draw the parameters of a network."""
        return {name: p.detach() for name, p in self.make().named_parameters()}

    def inner(self, params: Params, hyper: Any) -> Tensor:
        """Return the loss on the images."""
        return self.outer(params, hyper, Examples(hyper["images"], self.labels))

    def outer(self, params: Params, hyper: Any, batch: Examples) -> Tensor:
        """Return the loss on a batch."""
        return F.cross_entropy(functional_call(self._network, params, (batch.x,)), batch.y)

    def meta_gradient(self, params: Params, batch: Examples) -> dict[str, Tensor]:
        """Differentiate the loss after training from ``params`` with respect to images and log learning rate."""
        outer = partial(self.outer, batch=batch)
        return mg.hypergradient(outer, self.inner, params, self.hyper, method=self.method)

    def learn(
        self,
        real: Examples,
        *,
        steps: int,
        lr: float,
        batch: int,
        watch: Callable[[int, Examples, float], None] = lambda step, images, lr: None,
    ) -> tuple[Examples, float]:
        """Learn images and learning rate from real images, by Adam. ``watch`` receives them before each step."""
        drawn = torch.randint(len(real.x), (steps, batch))
        cosine = [lr * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]
        found = mg.bilevel(
            self.outer,
            self.inner,
            self.fresh,
            self.hyper,
            inner=mg.optim.rules.sgd(lr=0.0),  # Unroll has steps of its own
            outer=mg.optim.rules.adam(lr=cosine),
            steps=steps,
            inner_steps=0,
            method=self.method,
            warm_start=False,
            outer_batches=map(real.at, Progress(drawn, unit="step", leave=False)),
            callback=lambda step, params, hyper, loss: watch(step, *self._images(hyper)),
        )
        return self._images(found.hyper)

    def _images(self, hyper: Any) -> tuple[Examples, float]:
        return Examples(hyper["images"], self.labels), hyper["log_lr"].exp().item()


def everything(config: DistillConfig, work: Work) -> Result:
    """Train networks on all images."""
    data, networks = load(config.classes), {}
    for name, make in NETWORKS.items():
        trained = [
            train_on_all(make(config.classes), data.train, config.epochs) for _ in range(config.trials)
        ]
        networks[name] = {"accuracies": [accuracy(model, data.test) for model in trained]}
    return {"size": len(data.train.x), "networks": networks}


def chosen(config: DistillConfig, name: str, work: Work) -> Result:
    """Choose real images by the features of a network that is trained on all images, and evaluate them."""
    data = load(config.classes)
    model = train_on_all(mlp(config.classes), data.train, config.epochs)
    with torch.no_grad():
        features = model[:-1](data.train.x)  # type: ignore[reportIndexIssue]
    return evaluated(config, coreset(name, data.train, features, config.per_class), work)


def distillation(config: DistillConfig, network: str, steps: int, memory: str | int) -> Distillation:
    """Return images to be learned, which start as random real images."""
    train = load(config.classes).train
    start = coreset("random", train, train.x.flatten(1), config.per_class)
    make = partial(NETWORKS[network], config.classes)
    return Distillation(make, start, steps=steps, lr=INNER_TIME / steps, memory=memory)


def learned(config: DistillConfig, steps: int, work: Work) -> Result:
    """Learn images through some number of steps, and evaluate them."""
    data = load(config.classes)

    def watch(step: int, images: Examples, lr: float) -> None:
        if step % WATCH_EVERY == 0:
            model = train(mlp(config.classes), images, lr=lr, steps=steps)
            work.log(step, {"accuracy/validation(%)": accuracy(model, data.val), "lr": lr})

    task, began = distillation(config, "mlp", steps, config.memory), time.process_time()
    images, lr = task.learn(data.train, steps=config.steps, lr=config.lr, batch=config.batch, watch=watch)
    seconds = time.process_time() - began
    return {"steps": steps, "lr": lr, "seconds": seconds, **evaluated(config, images, work, own=(lr, steps))}


def evaluated(
    config: DistillConfig, images: Examples, work: Work, own: tuple[float, int] | None = None
) -> Result:
    """Write the images into the folder of the cell, and test networks that are trained on them.

    The validation images choose a learning rate and a number of steps. ``own`` is an additional candidate.
    """
    content, data, networks = io.BytesIO(), load(config.classes), {}
    torch.save(tuple(images), content)
    write_bytes(work.folder / IMAGES, content.getvalue())
    recipes = [(lr, config.train_steps) for lr in RATES] + ([] if own is None else [own])
    for name, make in NETWORKS.items():

        def trained(recipe: tuple[float, int], make: Any = make) -> nn.Module:
            return train(make(config.classes), images, lr=recipe[0], steps=recipe[1])

        best = max(recipes, key=lambda recipe: accuracy(trained(recipe), data.val))
        accuracies = [accuracy(trained(best), data.test) for _ in range(config.trials)]
        networks[name] = {"lr": best[0], "steps": best[1], "accuracies": accuracies}
    return {"size": len(images.x), "networks": networks}


def measure(config: DistillConfig, network: str, work: Work) -> Result:
    """Measure meta-gradients of real images through the training of a network."""
    train = load(config.classes).train
    batch = train.at(torch.randperm(len(train.x))[: config.batch])

    def seconds_of(task: Distillation) -> float:
        return cpu_seconds(partial(task.meta_gradient, task.fresh(), batch))

    seconds_of(distillation(config, network, 1, "full"))  # the first is slower than those that follow
    rows = []
    for steps, memory in product(config.cost[network], MEMORIES):
        costs = {"seconds": seconds_of(distillation(config, network, steps, memory))}
        if work.seed == config.seeds[0]:  # bytes do not depend on it, and the profiler is slow
            task = distillation(config, network, steps, memory)
            costs["peak"] = peak_bytes(lambda task=task: task.meta_gradient(task.fresh(), batch))
        rows.append({"steps": steps, "memory": memory, **costs})
    return {"rows": rows}


def title(name: str) -> str:
    """Return the name of a set of images for tables and figures."""
    return SETS.get(name, f"learned through {name.removeprefix('learned_')} steps")


def sets_of(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results of each set of images, in the order of accuracy, with all images last."""
    found = by_cell(one for one in results if "networks" in one)
    order = sorted(found, key=lambda name: (name == "all", statistics.mean(means(found[name], "mlp"))))
    return {name: found[name] for name in order}


def means(results: Sequence[Result], network: str) -> list[float]:
    """Return the mean accuracy of a network for each seed."""
    return [statistics.mean(one["networks"][network]["accuracies"]) for one in results]


def costs_of(results: Sequence[Result], value: str) -> dict[str, dict[str, dict[int, float]]]:
    """Return the median cost of meta-gradients over seeds, by network, memory mode and steps."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for one in (one for one in results if "rows" in one):
        network = found.setdefault(one["cell"].removeprefix("cost_"), {})
        for row in one["rows"]:
            if value in row:
                network.setdefault(row["memory"], {}).setdefault(row["steps"], []).append(row[value])
    return {
        name: {mode: {n: statistics.median(own[n]) for n in own} for mode, own in modes.items()}
        for name, modes in found.items()
    }


def report(results: list[Result], config: DistillConfig) -> str:
    """Return the page."""
    table = [["trained on", "images", "CPU seconds to learn them", *TITLES.values()]]
    for name, own in sets_of(results).items():
        seconds = f"{statistics.median(one['seconds'] for one in own):.0f}" if "seconds" in own[0] else ""
        values = [spread(means(own, network)) for network in TITLES]
        table.append([title(name), f"{own[0]['size']:,}", seconds, *values])
    costs, seconds = [["network, inner steps", *MEMORIES]], costs_of(results, "seconds")
    for network, modes in costs_of(results, "peak").items():
        for steps in modes[MEMORIES[0]]:
            pairs = [(modes[mode][steps] / MIB, seconds[network][mode][steps]) for mode in MEMORIES]
            values = [f"{mib:.1f} MiB, {time:.2f} s" for mib, time in pairs]
            costs.append([f"{TITLES[network]}, {steps}", *values])
    return f"""# A data set in a few images

Accuracy (%) on the test images of {config.classes} alphabets: the mean over {config.trials} fresh networks for each
of the seeds {config.seeds}, and the standard deviation over seeds. Images are learned for the first network.

{markdown(table)}

A meta-gradient through the training of a network in each memory mode: peak memory (with the first seed), and CPU
seconds (the median over seeds).

{markdown(costs)}
"""


def figures(results: list[Result], config: DistillConfig, folder: Path) -> list[Path]:
    """Draw real images, learned images and accuracies."""
    sets, path = sets_of(results), folder / "distill.png"
    with figure(path, 1, 4, size=(15, 3.6)) as axes:
        longest = f"learned_{max(config.lengths, default=0)}"
        for axis, name in zip(axes[0], ("random", "herding", longest), strict=False):
            file = folder / name / str(config.seeds[0]) / IMAGES
            _draw_images(axis, file if name in sets else None, config)
            axis.set_title(title(name).capitalize())
        _draw_accuracies(axes[0, 3], sets)
    return [path]


def _draw_images(axis: Any, file: Path | None, config: DistillConfig) -> None:
    """Draw a row of images for each class, with ink blue and negative values red."""
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    if file is not None:
        x, _ = torch.load(file, weights_only=True)
        tiles = F.pad(x[:, 0], [0, GAP, 0, GAP]).unflatten(0, (config.classes, config.per_class))
        picture = tiles.transpose(1, 2).flatten(2).flatten(0, 1)
        axis.imshow(picture.numpy(), cmap="RdBu", vmin=-LIMIT, vmax=LIMIT, interpolation="nearest")


def _draw_accuracies(axis: Any, sets: dict[str, list[Result]]) -> None:
    """Draw bars for the network that images are learned for, and a point for each seed and network."""
    for height, (name, own) in enumerate(sets.items()):
        color = MUTED if name == "all" else VERMILION if name.startswith("learned") else BLUE
        axis.barh(height, statistics.mean(means(own, "mlp")), color=color, height=0.65, alpha=0.85)
        for network, face in zip(TITLES, ("black", "white"), strict=True):
            values, label = means(own, network), None if height else TITLES[network]
            style = {"color": "black", "markerfacecolor": face, "markersize": 3.5, "label": label}
            axis.plot(values, [height] * len(values), "o", **style)
    axis.set_yticks(range(len(sets)), [title(name) for name in sets])
    axis.tick_params(axis="y", length=0)
    axis.set(xlabel="Test accuracy (%)", title="Networks trained on each set")
    axis.grid(axis="x")
    if sets:
        axis.legend(fontsize=8, loc="lower right")


def check(config: DistillConfig) -> None:
    """Raise `ValueError` for networks that do not exist."""
    for name in config.cost:
        if name not in NETWORKS:
            raise ValueError(f"distill: networks are {', '.join(NETWORKS)}, got {name!r}.")


def cells(config: DistillConfig) -> list[Cell]:
    """Return a cell for each set of images, and for each network whose meta-gradients are measured."""
    runs: dict[str, Callable[[Work], Result]] = {"all": partial(everything, config)}
    runs |= {name: partial(chosen, config, name) for name in CORESETS}
    runs |= {f"learned_{steps}": partial(learned, config, steps) for steps in config.lengths}
    runs |= {f"cost_{name}": partial(measure, config, name) for name, steps in config.cost.items() if steps}
    return [Cell(name, seed, run) for name, run in runs.items() for seed in config.seeds]


study = Study(
    "distill", DistillConfig, cells=cells, report=report, figures=figures, check=check, free=["lengths"]
)

if __name__ == "__main__":
    study.main()
