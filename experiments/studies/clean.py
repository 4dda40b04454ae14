r"""Find wrong labels: `python -m experiments.studies.clean [seeds=[0]] [methods=[CG,T1-T2]] [KEY=VALUE ...]`.

40 % of the labels of Omniglot's images are wrong. Hypergradients and learning to reweight learn a weight of each
image from validation images with correct labels. A network is then trained with these weights, on all images
without weights, and on the images with correct labels.

.. math:: \min_w \; L_{\text{val}}(\theta^*(w)), \qquad
          \theta^*(w) = \arg\min_\theta \frac{1}{n} \sum_i \sigma(w_i) \, \ell_i(\theta) + \frac{\rho}{2} |\theta|^2

Data hyper-cleaning (Franceschi, Donini, Frasconi, Pontil, "Forward and reverse gradient-based hyperparameter
optimization", ICML 2017, section 5.1). The network is linear in its features, so that the inner level is convex.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import metagrad as mg
from experiments.run.files import markdown
from experiments.run.measure import peak_bytes
from experiments.run.plots.style import CYCLE, INK, MUTED, figure, legend_below
from experiments.run.schema import key
from experiments.studies import characters as omniglot
from experiments.studies.characters import Examples
from experiments.studies.study import Cell, Result, Study, StudyConfig, Work, by_cell, spread
from metagrad.hypergrad import CG, FiniteDifference, FirstOrder, HypergradientMethod, Neumann, Nystrom, Unroll
from metagrad.hypergrad.bilevel import BilevelResult
from metagrad.tasks.omniglot.splits import SPLITS

Params = Mapping[str, Any]
SPLIT = "background"
DRAWERS = (8, 8, 4)  # Omniglot's 20 writers: for training, validation, test
BINS, CELLS = 6, 3  # directions of strokes, and cells along each side, of the features
METHODS = ("CG", "Neumann", "Nystrom", "T1-T2", "Unroll", "FiniteDifference", "reweight")
REFERENCES = ("everything", "clean part", "validation alone", "agreeing")
OUTER_LR, LR, MOMENTUM = 0.3, 1.0, 0.9  # the Hessian of the loss is at most the identity
TITLES = {
    "everything": "all labels, without weights",
    "clean part": "only correct labels",
    "validation alone": "only validation images",
    "agreeing": "labels that a network of the validation images predicts",
    "T1-T2": "T1-T2 (FirstOrder)",
    "FiniteDifference": "DARTS (FiniteDifference)",
    "reweight": "learning to reweight",
}
COLUMNS = {
    "accuracy": ("accuracy (%)", 1),
    "with_validation": ("and on validation (%)", 1),
    "at_the_end": ("end of loop (%)", 1),
    "auc": ("AUC", 3),
    "precision": ("precision (%)", 1),
    "seconds": ("CPU seconds", 1),
    "mib": ("MiB", 1),
}
LEVELS = {"clean part": (INK, "-"), "validation alone": (MUTED, "--"), "everything": (MUTED, ":")}


@dataclass
class CleanConfig(StudyConfig):
    """A whole run."""

    methods: list[str] = key("Ways of learning weights; the references are always there.")
    penalties: list[float] = key("Candidates for the penalty of the final training; validation chooses.")
    points: int = key("How often the accuracy is measured on the way.")
    alphabets: int = key("Alphabets of Omniglot's background set, the classes.", least=2)
    characters: int = key("Characters of each.")
    wrong: float = key("The fraction of the training images that get another class.")
    whiten: bool = key("Whiten the features, which makes the Hessian closer to a multiple of the identity.")
    steps: int = key("Outer steps.")
    inner_steps: int = key("Inner steps for each, from where the last ones ended.")
    penalty: float = key("On the squares of the parameters, at the inner level.")
    terms: int = key("Steps of CG, terms of the series, products of Nystrom, unrolled steps.")
    reweight_steps: int = key("Steps of learning to reweight.")
    batch: int = key("Training examples of each of these.")
    reweight_lr: float = key("Their learning rate.")


@dataclass(frozen=True)
class Data:
    """Training examples, a mask `[n]` of their incorrect labels, and examples with correct labels."""

    train: Examples
    wrong: Tensor
    validation: Examples
    test: Examples
    classes: int


@lru_cache(maxsize=8)
def load(alphabets: int, characters: int, wrong: float, is_white: bool, seed: int) -> Data:
    """Sample alphabets and split their images by writer, so that no writer is in two parts."""
    generator = torch.Generator().manual_seed(seed)
    members = _members(alphabets, characters, generator)
    images = omniglot.load(SPLIT)[members.flatten()]
    images = images[:, torch.randperm(sum(DRAWERS), generator=generator)]
    x = features(images.flatten(0, 1)).unflatten(0, images.shape[:2])
    x = scaled(x, x[:, : DRAWERS[0]].flatten(0, 1), is_white)
    classes = torch.arange(alphabets).repeat_interleave(characters)
    train, validation, test = omniglot.by_drawers(x, *DRAWERS, classes=classes)
    mislabelled = mislabel(train, wrong, alphabets, generator)
    return Data(mislabelled, mislabelled.y != train.y, validation, test, alphabets)


def _members(alphabets: int, characters: int, generator: torch.Generator) -> Tensor:
    """Draw alphabets with enough characters, and draw characters of each alphabet: `[alphabets, characters]`."""
    places: dict[str, list[int]] = {}
    for place, character in enumerate(SPLITS[SPLIT].characters):
        places.setdefault(character.alphabet, []).append(place)
    large = [torch.tensor(own) for own in places.values() if len(own) >= characters]
    if len(large) < alphabets:
        raise ValueError(
            f"clean: {alphabets} alphabets of {characters} characters were asked for, and {len(large)} have as many; "
            "take fewer of either."
        )
    chosen = torch.randperm(len(large), generator=generator)[:alphabets].tolist()
    drawn = [large[i][torch.randperm(len(large[i]), generator=generator)[:characters]] for i in chosen]
    return torch.stack(drawn)


def scaled(x: Tensor, train: Tensor, is_white: bool) -> Tensor:
    r"""Center features, and scale them so that the Hessian of a mean cross-entropy is at most the identity.

    Whitened features are :math:`(C + \bar\lambda I)^{-1/2} x`, of the covariance C and its mean eigenvalue.
    """
    mean = train.mean(0)
    values, vectors = torch.linalg.eigh((train - mean).double().T.cov(correction=0))
    roots = (values + values.mean()).rsqrt() if is_white else torch.ones_like(values)
    # The Hessian of the softmax has no eigenvalue above a half.
    roots = roots * (2 / (values * roots**2).max()).sqrt()
    return (x - mean) @ ((vectors * roots) @ vectors.T).to(x.dtype)


def mislabel(examples: Examples, part: float, classes: int, generator: torch.Generator) -> Examples:
    """Give random examples another class. All other classes are equally likely."""
    number = len(examples.y)
    chosen = torch.randperm(number, generator=generator)[: round(part * number)]
    shift = torch.zeros_like(examples.y)
    shift[chosen] = torch.randint(1, classes, chosen.shape, generator=generator)
    return examples._replace(y=(examples.y + shift) % classes)


def features(images: Tensor) -> Tensor:
    """Return histograms of the directions of strokes, and of their changes, in coarse cells: `[n, d]` of length 1.

    Dalal and Triggs, "Histograms of oriented gradients for human detection", CVPR 2005. As in the two
    layers of a scattering transform, the histograms use the image and each of its direction maps. Bruna and Mallat,
    TPAMI 35(8), 2013.
    """
    first = _directions(F.avg_pool2d(images.unsqueeze(1), 3, stride=1, padding=1), sharpness=4)
    second = _directions(F.avg_pool2d(first, 2), sharpness=2)
    layers = [F.adaptive_avg_pool2d(maps, CELLS).flatten(1).sqrt() for maps in (first, second)]
    return F.normalize(torch.cat([F.normalize(layer) for layer in layers], 1))


def _directions(maps: Tensor, sharpness: int) -> Tensor:
    """Return how strongly each map rises in each of the directions: `[n, maps * BINS, height, width]`."""
    across = F.pad(maps[..., 2:] - maps[..., :-2], (1, 1))
    down = F.pad(maps[..., 2:, :] - maps[..., :-2, :], (0, 0, 1, 1))
    angles = torch.arange(BINS) * (2 * torch.pi / BINS)
    toward = torch.atan2(down, across).unsqueeze(2) - angles[:, None, None]
    strength = torch.hypot(across, down).unsqueeze(2)
    return (strength * toward.cos().clamp_min(0) ** sharpness).flatten(1, 2)


def losses(examples: Examples, params: Params) -> Tensor:
    """Return the cross-entropy of each example, `[n]`."""
    return F.cross_entropy(examples.x @ params["weight"], examples.y, reduction="none")


def accuracy(examples: Examples, params: Params) -> float:
    """Return the percentage of examples that are classified correctly."""
    return 100 * (examples.x @ params["weight"]).argmax(1).eq(examples.y).float().mean().item()


def zeros(data: Data) -> Params:
    """Return the parameters that every training begins with."""
    return {"weight": torch.zeros(data.train.x.shape[1], data.classes, dtype=data.train.x.dtype)}


def weighted(data: Data, penalty: float) -> Callable[[Params, Any], Tensor]:
    """Return the inner loss, given the logits of the weights, `hyper["logits"]`."""

    def loss(params: Params, hyper: Mapping[str, Tensor]) -> Tensor:
        terms = hyper["logits"].sigmoid() * losses(data.train, params)
        return terms.mean() + penalty / 2 * params["weight"].square().sum()

    return loss


def hypergradients(terms: int) -> dict[str, HypergradientMethod]:
    """Return the hypergradient methods. All methods take the same number of products or steps."""
    return {
        "CG": CG(steps=terms),
        "Neumann": Neumann(steps=terms, scale=LR),
        "Nystrom": Nystrom(rank=terms, damping=0.1, generator=torch.Generator().manual_seed(0)),
        "T1-T2": FirstOrder(scale=LR),
        "Unroll": Unroll(mg.optim.rules.sgd(lr=LR, momentum=MOMENTUM), steps=terms),
        "FiniteDifference": FiniteDifference(lr=LR),
    }


@dataclass
class Watch:
    """The accuracy on test examples over CPU seconds, without the time that measuring takes."""

    test: Examples
    every: int
    log: Callable[[int, Mapping[str, float]], None]
    seconds: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    spent: float = 0.0
    since: float = field(default_factory=time.process_time)

    def __call__(self, step: int, params: Params, *_: object) -> None:
        """Measure if the next measurement is due."""
        self.spent += time.process_time() - self.since
        if step % self.every == 0:
            self.seconds.append(self.spent)
            self.accuracies.append(accuracy(self.test, params))
            self.log(step, {"accuracy(%)": self.accuracies[-1], "seconds": self.spent})
        self.since = time.process_time()


class Found(NamedTuple):
    """Weights of the training examples, `[n]` in [0, 1], the final network, and the peak bytes of a step."""

    weights: Tensor
    params: Params
    peak: int


def learn_weights(data: Data, config: CleanConfig, method: HypergradientMethod, watch: Watch) -> Found:
    """Learn a weight for each training example."""

    def run(params: Params, logits: Tensor, steps: int, callback: Any) -> BilevelResult:
        return mg.bilevel(
            lambda params, hyper: losses(data.validation, params).mean(),
            weighted(data, config.penalty),
            params,
            {"logits": logits},
            inner=mg.optim.rules.sgd(lr=LR, momentum=MOMENTUM),
            outer=mg.optim.rules.adam(lr=OUTER_LR),
            steps=steps,
            inner_steps=config.inner_steps,
            method=method,
            callback=callback,
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*left a residual")  # methods are compared at equal steps
        found = run(zeros(data), torch.zeros_like(data.train.x[:, 0]), config.steps, watch)
        watch(config.steps, found.params)
        peak = peak_bytes(lambda: run(found.params, found.hyper["logits"], 1, None))
    return Found(found.hyper["logits"].sigmoid(), found.params, peak)


def reweight(data: Data, config: CleanConfig, watch: Watch) -> Found:
    r"""Train on weighted batches. A weight is the decrease of the validation loss by a step on the example.

    .. math:: w_i = \frac{[-\partial_{\epsilon_i} L_{\text{val}}(\theta - \alpha \nabla_\theta \sum_i
              \epsilon_i \ell_i)]_+}{\sum_j [\cdot]_+} \quad\text{at } \epsilon = 0

    Ren, Zeng, Yang, Urtasun, "Learning to reweight examples for robust deep learning", ICML 2018, algorithm 1. The
    weights that are returned are means over the steps, relative to the largest of a batch.
    """
    rule, params = mg.optim.rules.sgd(lr=config.reweight_lr), dict(zeros(data))
    state, counts = rule.init(params), torch.zeros_like(data.train.y)
    sums = torch.zeros_like(data.train.x[:, 0])
    for step in range(config.reweight_steps):
        watch(step, params)
        chosen = torch.randperm(len(counts))[: config.batch]
        batch = data.train.at(chosen)
        weights = batch_weights(batch, data.validation, params, rule)
        counts[chosen] += 1
        sums[chosen] += weights / weights.max().clamp_min(torch.finfo(weights.dtype).tiny)
        leaves = {name: p.requires_grad_() for name, p in params.items()}
        squares = leaves["weight"].square().sum()
        loss = (weights * losses(batch, leaves)).sum() + config.penalty / 2 * squares
        moved, state = rule.update(mg.grad(loss, leaves), state, params)
        params = {name: p.detach() for name, p in moved.items()}
    watch(config.reweight_steps, params)
    peak = peak_bytes(partial(batch_weights, batch, data.validation, params, rule))
    return Found(sums / counts.clamp_min(1), params, peak)


def batch_weights(batch: Examples, validation: Examples, params: Params, rule: Any) -> Tensor:
    """Return the weights of a batch, which sum to one if any is above zero."""
    gradient = mg.hypergradient(
        lambda params, hyper: losses(validation, params).mean(),
        lambda params, hyper: (hyper["weights"] * losses(batch, params)).sum(),
        params,
        {"weights": torch.zeros_like(batch.x[:, 0])},
        method=Unroll(rule, steps=1),
    )["weights"]
    gains = (-gradient).clamp_min(0)
    return gains / gains.sum().clamp_min(torch.finfo(gains.dtype).tiny)


def trained(
    data: Data, examples: Examples, weights: Tensor, penalty: float, start: Params | None = None
) -> Params:
    """Train to the minimum of the weighted loss."""
    params = {name: p.clone().requires_grad_() for name, p in (start or zeros(data)).items()}
    optimizer = mg.optim.LBFGS(params.values(), max_iter=100, tolerance_grad=1e-6)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weights * losses(examples, params)).mean() + penalty / 2 * params["weight"].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return {name: p.detach() for name, p in params.items()}


def evaluated(data: Data, weights: Tensor, penalties: list[float]) -> dict[str, Any]:
    """Train on weighted examples with the penalty that is best on validation examples, then on both sets together."""
    found: dict[float, Params] = {}
    for penalty in sorted(penalties, reverse=True):
        start = list(found.values())[-1] if found else None
        found[penalty] = trained(data, data.train, weights, penalty, start)
    best = max(found, key=lambda penalty: accuracy(data.validation, found[penalty]))
    everything = torch.cat([weights, torch.ones_like(data.validation.x[:, 0])])
    both = trained(data, data.train.and_also(data.validation), everything, best, found[best])
    return {
        "accuracy": accuracy(data.test, found[best]),
        "with_validation": accuracy(data.test, both),
        "penalty": best,
    }


def detection(weights: Tensor, wrong: Tensor) -> dict[str, float]:
    """Return how well small weights find wrong labels.

    `auc` is the probability that an incorrect label has a smaller weight than a correct label. `precision` is the
    percentage of incorrect labels among the smallest weights, as many as there are incorrect labels.
    """
    below = (weights[wrong][:, None] < weights[~wrong]).double()
    alike = (weights[wrong][:, None] == weights[~wrong]).double()
    lowest = weights.argsort()[: int(wrong.sum())]
    precision = 100 * wrong[lowest].double().mean().item()
    return {"auc": (below + alike / 2).mean().item(), "precision": precision}


def reference(work: Work, config: CleanConfig, name: str) -> Result:
    """Train on examples that need no learned weights."""
    data = data_of(config, work.seed)
    ones = torch.ones_like(data.train.x[:, 0])
    if name == "everything":
        return evaluated(data, ones, config.penalties)
    if name == "clean part":
        return evaluated(data, ones * ~data.wrong, config.penalties)
    own = torch.ones_like(data.validation.x[:, 0])
    candidates = [trained(data, data.validation, own, penalty) for penalty in config.penalties]
    params = max(candidates, key=lambda params: accuracy(data.train, params))
    if name == "validation alone":
        return {"accuracy": accuracy(data.test, params)}
    agrees = (data.train.x @ params["weight"]).argmax(1) == data.train.y
    found = evaluated(data, ones * agrees, config.penalties)
    return found | detection(-losses(data.train, params), data.wrong)


def learned(work: Work, config: CleanConfig, name: str) -> Result:
    """Learn weights, and train with them."""
    data, is_reweighting = data_of(config, work.seed), name == "reweight"
    total = config.reweight_steps if is_reweighting else config.steps
    watch = Watch(data.test, max(total // config.points, 1), work.log)
    if is_reweighting:
        found = reweight(data, config, watch)
    else:
        found = learn_weights(data, config, hypergradients(config.terms)[name], watch)
    return {
        **evaluated(data, found.weights, config.penalties),
        **detection(found.weights, data.wrong),
        "at_the_end": accuracy(data.test, found.params),
        "seconds": watch.spent,
        "mib": found.peak / 2**20,
        "curve": {"seconds": watch.seconds, "accuracy": watch.accuracies},
    }


def data_of(config: CleanConfig, seed: int) -> Data:
    """Load the images of a seed."""
    return load(config.alphabets, config.characters, config.wrong, config.whiten, seed)


def report(results: list[Result], config: CleanConfig) -> str:
    """Return the page."""

    def text(own: list[Result], name: str) -> str:
        values = [one[name] for one in own if one.get(name) is not None]
        return spread(values, COLUMNS[name][1]) if values else ""

    table = [["trained on, or weights by", *(title for title, _ in COLUMNS.values())]]
    for name, own in by_cell(results).items():
        table.append([TITLES.get(name, name), *(text(own, column) for column in COLUMNS)])
    train, validation, test = (config.alphabets * config.characters * number for number in DRAWERS)
    return f"""# Cleaning of labels

{config.alphabets} alphabets of Omniglot, {config.characters} characters of each: {train} images to train on, of
which {config.wrong:.0%} have a wrong label, {validation} for validation and {test} for the test, of other
drawers. Means over {len(config.seeds)} seeds with their standard deviation. Precision is the part of wrong labels
among as many of the smallest weights as there are wrong labels. MiB is the peak of an outer step.

{markdown(table)}
"""


def figures(results: list[Result], config: CleanConfig, folder: Path) -> list[Path]:
    """Draw accuracy over CPU seconds."""
    found = by_cell(results)
    with figure(folder / "clean.png", size=(7, 4.2)) as axes:
        axis, whole = axes[0, 0], None
        for i, (name, own) in enumerate((name, own) for name, own in found.items() if "curve" in own[0]):
            points = [zip(*(one["curve"][of] for one in own), strict=False) for of in ("seconds", "accuracy")]
            seconds, accuracies = ([statistics.mean(point) for point in column] for column in points)
            style = {"color": CYCLE[i % len(CYCLE)], "linestyle": ("-", "--")[i // len(CYCLE)]}
            whole = whole or (name, seconds[-1])
            label = TITLES.get(name, name)
            axis.plot([second / whole[1] for second in seconds], accuracies, label=label, **style)
        for name, (color, dash) in LEVELS.items():
            if name in found:
                level = statistics.mean(one["accuracy"] for one in found[name])
                axis.axhline(level, color=color, linestyle=dash, linewidth=1.1, label=TITLES.get(name, name))
        time = f"CPU time, relative to {whole[0]}" if whole else "CPU time"
        axis.set(
            xlabel=time, ylabel="Test accuracy (%)", title=f"{config.wrong:.0%} of the labels are incorrect"
        )
        axis.set_ylim(bottom=max(axis.get_ylim()[0], 50 if max(axis.get_ylim()) > 60 else 0))
        axis.grid(axis="y")
        legend_below(axis, columns=5)
    return [folder / "clean.png"]


def check(config: CleanConfig) -> None:
    """Raise `ValueError` for numbers and names that are out of range."""
    if not 0 < config.wrong < 1:
        raise ValueError(f"clean: wrong must be between 0 and 1, got {config.wrong}.")
    if unknown := [name for name in config.methods if name not in METHODS]:
        raise ValueError(f"clean: methods has {unknown[0]!r}; expected some of {', '.join(METHODS)}.")
    if not config.penalties:
        raise ValueError("clean: penalties is empty; give at least one.")


def cells(config: CleanConfig) -> list[Cell]:
    """Return the references and the chosen methods that learn weights, each with every seed."""
    runs = {name: partial(reference, config=config, name=name) for name in REFERENCES}
    runs |= {name: partial(learned, config=config, name=name) for name in config.methods}
    return [Cell(name, seed, run) for name, run in runs.items() for seed in config.seeds]


study = Study(
    "clean", CleanConfig, cells=cells, report=report, figures=figures, check=check, free=["methods"]
)

if __name__ == "__main__":
    study.main()
