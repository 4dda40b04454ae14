r"""Compare optimizers over seeds: `python -m experiments.studies.optimizers [workloads=[poisson]] [KEY=VALUE ...]`.

Every optimizer has the same number of trials on a workload, with a seed that is used only for trials. The settings
with the lowest training loss then train from every seed, for a fixed number of CPU seconds. Each trial and each run
is a cell. The pages of the site draw `curves.json`.

The workloads `poisson`, `helmholtz`, `burgers` and `allen_cahn` are physics-informed networks, see `equations`.
"""

from __future__ import annotations

import ast
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg
from experiments.run import result
from experiments.run.files import markdown
from experiments.run.plots.panels import Curve, Panel, all_curves, write_panels
from experiments.run.schema import key
from experiments.studies import characters
from experiments.studies.characters import Examples
from experiments.studies.equations import EQUATIONS, Equation
from experiments.studies.study import Cell, Result, Study, StudyConfig, Work

Runs = dict[str, list[Any]]
"""Runs by the name of the optimizer."""
TRIAL_EVALUATIONS = 20
CLASSES, HELD_OUT = 100, 5  # characters, and the number of their 20 images that are held out
EVALUATED = 1500  # training examples that the loss is measured on
REFERENCE, KEPT = "adam", 40  # points of a curve that are kept
MEASURES = {
    **dict.fromkeys(EQUATIONS, ("error/test", "relative L2 error")),
    "logistic": ("gap", "loss above the lowest of all runs"),
}
LOSS = ("loss/train", "training loss")
LEAST = 1e-15  # minimum of a gap, so that its logarithm is finite


@dataclass
class OptimizersConfig(StudyConfig):
    """The workloads, the settings and the training times."""

    workloads: list[str] = key("What is trained, of `WORKLOADS`.")
    optimizers: list[str] | None = key("Some of those in `trials`; null is all.")
    tuning_seed: int = key("The seed of trials, none of `seeds`.", least=0)
    evaluations: int = key("How often a run is measured, evenly in seconds.")
    seconds: dict[str, float] = key("By workload, CPU seconds of a run, without measurements.")
    trial_part: float = key("The fraction of these that a trial takes.")
    shared: dict[str, dict[str, Any]] = key(  # str, but OmegaConf merges no file into a dict of dicts of str
        "By workload and optimizer, the settings that its trials have in common."
    )
    trials: dict[str, dict[str, list[str]]] = key("By workload and optimizer, the settings that are tried.")


@dataclass(frozen=True)
class Problem:
    """A model and its data. The training loss is measured on the examples `measured`."""

    model: nn.Module
    train: Examples
    measured: Examples
    test: Examples
    batch_size: int
    penalty: float = 0.0

    def loss(self, examples: Examples) -> Tensor:
        """Return the mean cross-entropy, with the penalty."""
        loss = F.cross_entropy(self.model(examples.x), examples.y)
        if not self.penalty:
            return loss
        return loss + self.penalty / 2 * sum(p.square().sum() for p in self.model.parameters())

    def loss_for(self, optimizer: Any, examples: Examples) -> Tensor:
        """Return the loss, in the form that an optimizer needs."""
        return self.loss(examples)

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Measure the training loss."""
        return {"loss/train": self.loss(self.measured).item()}


@dataclass(frozen=True)
class Physics(Problem):
    """A network that solves a differential equation. Each step uses all points."""

    equation: Equation = field(kw_only=True)

    def loss(self, examples: Examples) -> Tensor:
        """Return the loss of all points."""
        return self.equation.loss()

    def loss_for(self, optimizer: Any, examples: Examples) -> Tensor:
        """Return the loss. An optimizer with dense systems also receives the residuals."""
        if isinstance(optimizer, mg.optim.GaussNewton) and optimizer.defaults["solver"] != "cg":
            return self.equation.loss_of(optimizer)
        return self.loss(examples)

    def measure(self) -> dict[str, float]:
        """Measure the loss, and the relative error of the solution in the L2 norm."""
        return {"loss/train": self.equation.loss().item(), "error/test": self.equation.error()}


def physics(name: str) -> Problem:
    """Return a physics-informed network."""
    equation = EQUATIONS[name]()
    points = Examples(equation.inside, equation.inside)
    return Physics(equation.network, points, points, equation.test, len(points.x), equation=equation)


def logistic() -> Problem:
    """Return convex logistic regression in float64, with a penalty. A step uses all examples."""
    train, test = drawings(20, is_flat=True)
    train, test = (part._replace(x=part.x.double()) for part in (train, test))
    return Problem(mg.models.MLP([784, 20]).double(), train, train, test, len(train.x), penalty=1e-3)


def conv4() -> Problem:
    """Return a small Conv4 with GroupNorm: a prediction depends only on one image."""
    options = {"hidden": 24, "pool": "stride", "norm": "group", "head": "flatten", "image_size": 28}
    return classifier(mg.models.Conv4(CLASSES, in_channels=1, **options))


def transformer() -> Problem:
    """Return a small transformer on images that are cut into 16 patches."""
    options = {"input_shape": [1, 28, 28], "patch": 7, "width": 64, "depth": 2, "heads": 4}
    return classifier(mg.models.Transformer(CLASSES, **options))


def classifier(model: nn.Module) -> Problem:
    """Return a classifier of images, trained on batches of 100."""
    train, test = drawings(CLASSES)
    order = torch.randperm(len(train.x), generator=torch.Generator().manual_seed(1))
    return Problem(model, train, train.at(order[:EVALUATED]), test, 100)


WORKLOADS: dict[str, Callable[[], Problem]] = {
    **{name: partial(physics, name) for name in EQUATIONS},
    "logistic": logistic,
    "conv4": conv4,
    "transformer": transformer,
}


def drawings(count: int, *, is_flat: bool = False) -> list[Examples]:
    """Load training and test images of the first characters."""
    images = characters.load("background", count, key="optimizers: characters")
    images = images.flatten(2) if is_flat else images.unsqueeze(2)
    return characters.by_drawers(images, images.shape[1] - HELD_OUT, HELD_OUT)


def batches(examples: Examples, batch_size: int, seed: int) -> Iterator[Examples]:
    """Yield batches without end. Each pass over the examples has a new random order."""
    number = len(examples.x)
    if batch_size > number:
        raise ValueError(f"optimizers: batch_size must be at most {number}, the examples, got {batch_size}.")
    source, waiting = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long)
    while True:
        if len(waiting) < batch_size:
            waiting = torch.cat([waiting, torch.randperm(number, generator=source)])
        chosen, waiting = waiting[:batch_size], waiting[batch_size:]
        yield examples.at(chosen)


class MuonAndAdam:
    """Muon for the matrices of hidden layers, and Adam for all other parameters."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        params = list(model.parameters())
        last = next(p for p in reversed(params) if p.ndim > 1)
        matrices = [p for p in params if p.ndim == 2 and p is not last]
        rest = [p for p in params if all(p is not matrix for matrix in matrices)]
        self._optimizers = [mg.optim.Muon(matrices, **options), torch.optim.Adam(rest)]

    def zero_grad(self) -> None:
        """Reset all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        """Compute gradients once, and take a step of each optimizer."""
        loss = closure()
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.detach()


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adam": torch.optim.Adam,
    "adahessian": mg.optim.AdaHessian,
    # Mini-batches change at every step, so solves end earlier than by default.
    "gauss_newton": partial(mg.optim.GaussNewton, damping=1.0, warm_start=0.9, change=1.5, max_steps=30),
    "gauss_newton_cg": partial(mg.optim.GaussNewton, solver="cg", change=5.0),
    "kfac": partial(mg.optim.KFAC, curvature_every=2, inverse_every=4, fisher="sampled"),
    "lbfgs": partial(mg.optim.LBFGS, max_iter=1, history_size=10),
    "lion": mg.optim.Lion,
    "muon": partial(MuonAndAdam, lr=0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    "newton_cg": partial(mg.optim.NewtonCG, damping=1.0, warm_start=0.9, max_steps=30),
    "shampoo": partial(mg.optim.Shampoo, graft=True, decay=0.95, block_size=256, root_every=20),
    "soap": partial(mg.optim.SOAP, weight_decay=0.0, max_size=1000),
    "sophia_g": mg.optim.SophiaG,
    "sophia_h": mg.optim.SophiaH,
    "sparse_adam": mg.optim.SparseAdam,
}
OF_MODELS = ("kfac", "muon")
TITLES = {"kfac": "K-FAC", "lbfgs": "L-BFGS", "newton_cg": "Newton-CG", "soap": "SOAP"}
TITLES |= {"adahessian": "AdaHessian", "gauss_newton": "Gauss-Newton", "gauss_newton_cg": "Gauss-Newton, CG"}


def settings_of(changes: str) -> dict[str, Any]:
    """Return the settings of a trial, such as `lr=1e-2 warm_start=0`."""
    pairs = (change.split("=", 1) for change in changes.split())
    return {name: ast.literal_eval(value) for name, value in pairs}


def raced(
    workload: str, optimizer: str, changes: str, *, seed: int, seconds: float, evaluations: int
) -> tuple[dict[str, list[float]], bool]:
    """Train for a number of seconds. Return the measurements by name and whether every loss was finite."""
    torch.manual_seed(seed)
    problem, settings = WORKLOADS[workload](), settings_of(changes)
    source = batches(problem.train, settings.pop("batch_size", problem.batch_size), seed)
    model = problem.model
    made = OPTIMIZERS[optimizer](model if optimizer in OF_MODELS else model.named_parameters(), **settings)
    curve: dict[str, list[float]] = {}
    spent, steps = 0.0, 0

    def record() -> None:
        for name, value in {"step": steps, "seconds": spent, **problem.measure()}.items():
            curve.setdefault(name, []).append(value)

    record()
    while spent < seconds:
        examples, began = next(source), time.process_time()
        is_finite = stepped(problem, made, examples)
        spent, steps = spent + time.process_time() - began, steps + 1
        if not is_finite:
            return curve, False
        if spent >= min(seconds, seconds / evaluations * len(curve["step"])):
            record()
    return curve, math.isfinite(curve["loss/train"][-1])


def stepped(problem: Problem, optimizer: Any, examples: Examples) -> bool:
    """Take a step, and return whether the loss before it was finite."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss_for(optimizer, examples)
        loss.backward()
        return loss

    try:
        return math.isfinite(optimizer.step(closure).item())
    except torch.linalg.LinAlgError:  # type: ignore[reportPrivateImportUsage]  # numbers that are not finite
        return False


def tried(config: OptimizersConfig, workload: str, optimizer: str, trial: str, work: Work) -> Result:
    """Return the median training loss over the second half of a trial, since the last loss is noisy."""
    seconds = config.trial_part * config.seconds[workload]
    changes = f"{config.shared.get(workload, {}).get(optimizer, '')} {trial}"
    curve, is_finite = raced(
        workload, optimizer, changes, seed=work.seed, seconds=seconds, evaluations=TRIAL_EVALUATIONS
    )
    losses = curve["loss/train"]
    loss = statistics.median(losses[len(losses) // 2 :]) if is_finite else math.inf
    return {"workload": workload, "optimizer": optimizer, "trial": trial, "loss": loss}


def chosen(config: OptimizersConfig, workload: str, optimizer: str, work: Work) -> Result:
    """Return the curve of a run with the settings of the trial with the lowest loss."""
    files = work.folder.parents[1].glob(f"trial*/{config.tuning_seed}/{result.FILE}")
    best = min((json.loads(file.read_text()) for file in sorted(files)), key=lambda one: one["loss"])
    changes = f"{config.shared.get(workload, {}).get(optimizer, '')} {best['trial']}"
    options = {"seconds": config.seconds[workload], "evaluations": config.evaluations}
    curve, is_finite = raced(workload, optimizer, changes, seed=work.seed, **options)
    work.log(int(curve["step"][-1]), {name: values[-1] for name, values in curve.items()})
    return {
        "workload": workload,
        "optimizer": optimizer,
        "trial": best["trial"],
        "trials": len(config.trials[workload][optimizer]),
        "is_finite": is_finite,
        "curve": curve,
    }


def by_workload(results: list[Result]) -> dict[str, Runs]:
    """Return the runs of each workload by optimizer, without trials."""
    found: dict[str, Runs] = {}
    for one in results:
        if "curve" in one:
            found.setdefault(one["workload"], {}).setdefault(one["optimizer"], []).append(one)
    return found


def last_common(runs: Runs) -> float:
    """Return the seconds that the median run of every optimizer has reached."""
    return min(float(np.median([run["curve"]["seconds"][-1] for run in own])) for own in runs.values())


def values_at(workload: str, own: list[Any], runs: Runs, limit: float) -> list[float]:
    """Return the last measurement of each run before a limit of seconds, or infinity for a run that diverged."""
    found = []
    for run in own:
        curve = measured(workload, run, runs)
        index = int(np.searchsorted(run["curve"]["seconds"], limit * (1 + 1e-9), side="right")) - 1
        over = not run["is_finite"] and index == len(curve) - 1
        found.append(np.inf if over else float(curve[max(index, 0)]))
    return found


def measured(workload: str, run: Any, runs: Runs) -> np.ndarray:
    """Return the curve of a run in the error measure of its workload."""
    name = MEASURES.get(workload, LOSS)[0]
    if name != "gap":
        return np.array(run["curve"][name])
    lowest = min(min(one["curve"][LOSS[0]]) for own in runs.values() for one in own)
    return np.maximum(np.array(run["curve"][LOSS[0]]) - lowest, LEAST)


def quartiles(values: list[float]) -> str:
    """Return the median and, of several values, the quartiles as text."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], method="nearest")
    return f"{middle:.2g}" if len(values) == 1 else f"{middle:.2g} ({low:.2g} to {high:.2g})"


def rows(workload: str, runs: Runs) -> list[list[str]]:
    """Return a row for each optimizer, sorted by the error after equal seconds."""
    ends = {name: values_at(workload, own, runs, last_common(runs)) for name, own in runs.items()}
    reference = np.median(ends[REFERENCE]) if REFERENCE in ends else None
    return [
        [
            name,
            runs[name][0]["trial"],
            quartiles(ends[name]),
            "" if reference is None else f"{reference / np.median(ends[name]):.3g}",
            f"{np.median([run['curve']['step'][-1] for run in runs[name]]):,.0f}",
        ]
        for name in sorted(ends, key=lambda name: np.median(ends[name]))
    ]


def report(results: list[Result], config: OptimizersConfig) -> str:
    """Return a table for each workload."""
    parts = ["# Optimizers over seeds"]
    for workload, runs in by_workload(results).items():
        seconds, first = last_common(runs), next(iter(runs.values()))[0]
        header = ["optimizer", "chosen", f"after {seconds:.3g} s", f"{REFERENCE}'s over it", "steps"]
        parts += [
            f"**{workload}**: {MEASURES.get(workload, LOSS)[1]}, median and quartiles over "
            f"{max(map(len, runs.values()))} seeds, after {seconds:.3g} CPU seconds. Each optimizer had "
            f"{first['trials']} trials, on seed {config.tuning_seed}.",
            markdown([header, *rows(workload, runs)]),
        ]
    return "\n\n".join(parts) + "\n"


def figures(results: list[Result], config: OptimizersConfig, folder: Path) -> list[Path]:
    """Draw medians over seconds, with one panel for each workload, and write them with their quartiles."""
    if not (found := panels(results)):
        return []
    write_panels(folder / "curves.json", found)
    shown = [
        panel._replace(title=panel.title.replace("_", "-").title(), curves=called(panel)) for panel in found
    ]
    return [all_curves(folder / "optimizers.png", shown)]


def called(panel: Panel) -> dict[str, Curve]:
    """Return the curves by the names that figures show."""
    return {TITLES.get(name, name.replace("_", " ").title()): curve for name, curve in panel.curves.items()}


def panels(results: list[Result]) -> list[Panel]:
    """Return the curves over seconds, with one panel for each workload."""
    found = []
    for workload, runs in by_workload(results).items():
        curves = {name: along(workload, own, runs) for name, own in runs.items()}
        label = MEASURES.get(workload, LOSS)[1].capitalize().replace("l2", "L2")
        kept = {name: curve for name, curve in curves.items() if curve is not None}
        found.append(Panel(workload, "CPU seconds", label, "log", "log", kept))
    return found


def along(workload: str, own: list[Any], runs: Runs) -> Curve | None:
    """Return median and quartiles of an optimizer over time. None if there are too few measurements."""
    first = max(run["curve"]["seconds"][1] if len(run["curve"]["seconds"]) > 1 else 0.0 for run in own)
    last = min(run["curve"]["seconds"][-1] for run in own)
    if not 0 < first < last:
        return None
    grid = np.geomspace(first, last, KEPT)
    values = [values_at(workload, own, runs, limit) for limit in grid]
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], axis=1, method="nearest").tolist()
    steps = np.median([run["curve"]["step"][-1] for run in own])
    return Curve(grid.tolist(), middle, low, high, f"{own[0]['trial']}, {steps:,.0f} steps")


def check(config: OptimizersConfig) -> None:
    """Raise `ValueError` if a config compares nothing."""
    if not 0 < config.trial_part <= 1:
        raise ValueError(f"optimizers: trial_part must be above 0 and at most 1, got {config.trial_part}.")
    if config.tuning_seed in config.seeds:
        raise ValueError(f"optimizers: tuning_seed={config.tuning_seed} is one of seeds; take another one.")
    for name in config.workloads:
        known = [known for known in WORKLOADS if known in config.trials and known in config.seconds]
        if name not in known:
            raise ValueError(
                f"optimizers: workloads must be of {known}, with trials and seconds, got {name!r}."
            )
        unknown = set(config.optimizers or ()) - (set(config.trials[name]) & set(OPTIMIZERS))
        if unknown:
            raise ValueError(
                f"optimizers: trials.{name} has no {sorted(unknown)}, which optimizers asks for."
            )
        counts = {optimizer: len(trials) for optimizer, trials in config.trials[name].items()}
        if len(set(counts.values())) > 1 or not all(counts.values()):
            raise ValueError(f"optimizers: every optimizer must have as many trials on {name}, got {counts}.")


def cells(config: OptimizersConfig) -> list[Cell]:
    """Return the trials of each optimizer, then its runs."""
    found = []
    for workload in config.workloads:
        for optimizer, trials in config.trials[workload].items():
            if config.optimizers is not None and optimizer not in config.optimizers:
                continue
            own, options = f"{workload}/{optimizer}", (config, workload, optimizer)
            for i, trial in enumerate(trials):
                found.append(Cell(f"{own}/trial{i}", config.tuning_seed, partial(tried, *options, trial)))
            found += [Cell(f"{own}/chosen", seed, partial(chosen, *options)) for seed in config.seeds]
    return found


study = Study(
    "optimizers",
    OptimizersConfig,
    cells=cells,
    report=report,
    figures=figures,
    check=check,
    free=["workloads", "optimizers"],
)

if __name__ == "__main__":
    study.main()
