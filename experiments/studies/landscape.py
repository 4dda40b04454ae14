"""The loss landscape along training: `python -m experiments.studies.landscape [only=[gd,adam]] [KEY=VALUE ...]`.

A network learns characters of Omniglot from all examples at once. The optimizers are gradient descent, Adam, SOAP,
K-FAC, sharpness-aware minimization, and descent with a penalty on the trace of the Hessian. Along each run the
study measures the trace and the largest eigenvalue of the Hessian. For the edge of stability it measures the
largest eigenvalue of the preconditioned Hessian.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import metagrad as mg
from experiments.run.files import markdown
from experiments.run.plots.style import CYCLE, INK, figure, legend_below, thousands
from experiments.run.progress import Progress
from experiments.run.schema import key
from experiments.studies import characters
from experiments.studies.study import Cell, Result, Study, StudyConfig, Work, by_cell, spread
from metagrad.curvature import Operator

Stacks = dict[str, Tensor]
"""Rows of vectors by the names of the parameters, [k, ...]."""
Root = Callable[[Stacks], Stacks]
SIZE, SHOTS, DRAWINGS = (
    14,
    10,
    20,
)  # pixels along a side, and training images per character, where all further images are the test set
RTOL, MAX_PRODUCTS = 1e-2, 100  # of the largest eigenvalue
DIVERGED = 100  # times the first loss


class Method(Enum):
    """The optimizer of a run. `gd` is gradient descent."""

    gd = "gd"
    adam = "adam"
    soap = "soap"
    kfac = "kfac"


@dataclass
class RunConfig:
    """One way to train the network, on all examples at every step."""

    title: str = key("How tables and figures call it.")
    method: Method = key("gd, adam, soap or kfac.")
    lr: float = key("The step size.")
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Further options of the optimizer, by name."}
    )
    rho: float | None = key("The radius of sharpness-aware minimization; null: none.", None)
    penalty: float | None = key("The weight of the trace of the Hessian; null: none.", None)


@dataclass
class LandscapeConfig(StudyConfig):
    """A whole study: its runs and their measurements."""

    count: int = key("Characters of Omniglot, other ones for each seed.", least=2)
    hidden: list[int] = key("Units of the hidden layers, with tanh.")
    steps: int = key("Steps of each run.")
    every: int = key("Steps from one measurement of the sharpness to the next.")
    full: int = key("Measurements of the trace, evenly along a run.", least=2)
    probes: int = key("Products of a trace.", least=6)
    runs: dict[str, RunConfig] = key("The runs, by name.")
    only: list[str] | None = key("The names of the runs to make; null: all.")


class Problem(NamedTuple):
    """A network, training images and test images, with one-hot targets."""

    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The parameters by name."""
        return dict(self.model.named_parameters())

    def loss(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the squared error on the training images."""
        x, y = self.train
        return F.mse_loss(functional_call(self.model, dict(params), (x,)), y)

    @torch.no_grad()
    def accuracy(self, images: tuple[Tensor, Tensor]) -> float:
        """Return the percentage of images whose largest output belongs to their class."""
        x, y = images
        return 100 * (self.model(x).argmax(1) == y.argmax(1)).float().mean().item()


def build(config: LandscapeConfig, seed: int) -> Problem:
    """Return the problem of a seed, the same for all runs: its characters, and the network before training."""
    source = torch.Generator().manual_seed(seed)
    levels = characters.load("small1", config.count, generator=source, key="landscape: count", size=SIZE)
    train, test = characters.by_drawers(levels.flatten(2), SHOTS, DRAWINGS - SHOTS)
    mean, deviation, classes = train.x.mean(), train.x.std(), torch.eye(config.count)
    torch.manual_seed(seed)
    model = mg.models.MLP([train.x.shape[1], *config.hidden, config.count], nn.Tanh)
    return Problem(model, *(((part.x - mean) / deviation, classes[part.y]) for part in (train, test)))


def optimizer_of(run: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of a run."""
    if run.method is Method.kfac:
        return mg.optim.KFAC(model, run.lr, **run.options)
    make = {Method.gd: torch.optim.SGD, Method.adam: torch.optim.Adam, Method.soap: mg.optim.SOAP}[run.method]
    return make(model.parameters(), run.lr, **run.options)


def objective(run: RunConfig, problem: Problem) -> Tensor:
    """Evaluate the objective of a run: the loss, the SAM loss, or the loss plus a Hutchinson sample of the trace."""
    if run.rho:
        return mg.optim.sharpness_aware(problem.loss, problem.params, rho=run.rho)
    loss = problem.loss(problem.params)
    if not run.penalty:
        return loss
    with mg.hessian(loss, problem.params, create_graph=True) as H:
        return loss + run.penalty * H.trace(method="hutchinson", probes=1).value


def take_step(run: RunConfig, problem: Problem, optimizer: Any) -> float:
    """Take a step on all examples, and return the objective before the step."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(run, problem)
        value.backward()
        return value

    return optimizer.step(closure).item()


def edge(run: RunConfig, gradient_norm: float) -> float:
    r"""Return the preconditioned sharpness above which steps oscillate with growing amplitude.

    .. math:: \frac{2 (1 + \beta)}{\eta} \text{ with momentum}, \quad
              \frac{2 (1 + \beta_1)}{(1 - \beta_1) \eta} \text{ with an average of gradients}, \quad
              \frac{\|g\|}{2 \rho} \Bigl(\sqrt{1 + \frac{8 \rho}{\eta \|g\|}} - 1\Bigr) \text{ with SAM}

    References:
        Cohen, Kaur, Li, Kolter, Talwalkar, ICLR 2021; Cohen et al., "Adaptive gradient methods at the edge of
        stability", 2022; Long, Bartlett, "Sharpness-aware minimization and the edge of stability", 2023.
    """
    if run.rho:
        ratio = gradient_norm / (2 * run.rho)
        return ratio * (math.sqrt(1 + 4 / (run.lr * ratio)) - 1) if ratio else 0.0
    if run.method in (Method.adam, Method.soap):
        beta = run.options["betas"][0]
        return 2 * (1 + beta) / ((1 - beta) * run.lr)
    return 2 * (1 + run.options.get("momentum", 0.0)) / run.lr


def preconditioned(operator: Operator, run: RunConfig, optimizer: Any, model: nn.Module) -> Operator:
    r"""Return :math:`P^{-1/2} H P^{-1/2}` for the preconditioner that the last step of an optimizer had."""
    make = {Method.gd: None, Method.adam: _adam, Method.soap: _soap, Method.kfac: _kfac}[run.method]
    if make is None:
        return operator
    root, space = make(optimizer, dict(model.named_parameters())), operator.space
    return operator.preconditioned(lambda rows: space.flatten(root(space.unflatten(rows))))


def _adam(optimizer: torch.optim.Adam, params: Mapping[str, nn.Parameter]) -> Root:
    group, scales = optimizer.param_groups[0], {}
    for name, p in params.items():
        state = optimizer.state[p]
        scales[name] = _inverse_root(state["exp_avg_sq"], group, int(state["step"]))
    return lambda stacks: {name: stack * scales[name] for name, stack in stacks.items()}


def _soap(optimizer: Any, params: Mapping[str, nn.Parameter]) -> Root:
    """Scale in the coordinates of SOAP's bases, and transform back."""
    group = optimizer.param_groups[0]

    def turned(stack: Tensor, bases: list[Tensor]) -> Tensor:
        for axis, basis in enumerate(bases, start=1):
            stack = (stack.movedim(axis, -1) @ basis).movedim(-1, axis)
        return stack

    def root(stacks: Stacks) -> Stacks:
        found = {}
        for name, stack in stacks.items():
            state = optimizer.state[params[name]]
            bases, scale = state["bases"], _inverse_root(state["square"], group, state["step"])
            found[name] = turned(turned(stack, bases) * scale, [basis.mT for basis in bases])
        return found

    return root


def _inverse_root(square: Tensor, group: Mapping[str, Any], step: int) -> Tensor:
    """Return the inverse root of Adam's preconditioner, with the corrections of both averages."""
    first, second = group["betas"]
    return ((1 - first**step) * ((square / (1 - second**step)).sqrt() + group["eps"])).rsqrt()


def _kfac(optimizer: Any, params: Mapping[str, nn.Parameter]) -> Root:
    """Multiply the matrix of each layer by the roots of both inverse factors. The bias is the last column."""
    states = {name: optimizer.state[p] for name, p in params.items() if "input_inverse" in optimizer.state[p]}
    roots = {
        name: [_root(state[f"{side}_inverse"]) for side in ("output", "input")]
        for name, state in states.items()
    }

    def root(stacks: Stacks) -> Stacks:
        found = {}
        for name, (left, right) in roots.items():
            bias = f"{name.rpartition('.')[0]}.bias"
            matrix = left @ torch.cat([stacks[name], stacks[bias].unsqueeze(-1)], -1) @ right
            found |= {name: matrix[..., :-1], bias: matrix[..., -1]}
        return found

    return root


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp_min(0).sqrt() @ vectors.mT


def train(config: LandscapeConfig, run: RunConfig, work: Work) -> Result:
    """Train, and return what was measured: `path` every few steps, `traces` at some."""
    problem = build(config, work.seed)
    optimizer = optimizer_of(run, problem.model)
    path, traces = [], []
    marks = {round(i * config.steps / (config.full - 1)) for i in range(config.full)}
    for number in Progress(range(config.steps + 1), unit="step", leave=False):
        if number:
            refuse_divergence(run, number, take_step(run, problem, optimizer), path[0]["loss"])
        if number % config.every == 0 or number in marks:
            path.append({"step": number, **along(run, problem, optimizer, number)})
            work.log(number, {name: value for name, value in path[-1].items() if value is not None})
        if number in marks:
            traces.append({"step": number, **trace(config, problem, work.seed)})
    return {**path[-1], "path": path, "traces": traces}


def refuse_divergence(run: RunConfig, step: int, loss: float, first: float) -> None:
    """Raise `ValueError` if the loss of a run is far above its initial loss."""
    if not loss < DIVERGED * first:
        raise ValueError(
            f"landscape: {run.title}: the loss before step {step} is {loss:.3g}, and was {first:.3g} before the "
            f"first. Lower the lr of the run, which is {run.lr:g}."
        )


def along(run: RunConfig, problem: Problem, optimizer: Any, step: int) -> dict[str, float | None]:
    """Measure loss, accuracies, plain and preconditioned sharpness, and the edge of stability."""
    loss, params = problem.loss(problem.params), problem.params
    gradient = torch.autograd.grad(loss, list(params.values()), retain_graph=True)
    norm = torch.cat([part.flatten() for part in gradient]).norm().item()
    own = None  # before the first step there is no preconditioner
    with mg.hessian(loss, params) as H:
        sharpness = largest(H)
        if run.method is Method.gd:
            own = sharpness
        elif step:
            own = largest(preconditioned(H, run, optimizer, problem.model))
    return {
        "loss": loss.item(),
        "gradient": norm,
        "sharpness": sharpness,
        "edge": edge(run, norm),
        "preconditioned": own,
        "accuracy/train": problem.accuracy(problem.train),
        "accuracy/test": problem.accuracy(problem.test),
    }


def largest(operator: Operator) -> float:
    """Return the largest eigenvalue."""
    generator = torch.Generator().manual_seed(0)
    return operator.eigenvalues(1, rtol=RTOL, max_matvecs=MAX_PRODUCTS, generator=generator).values.item()


def trace(config: LandscapeConfig, problem: Problem, seed: int) -> dict[str, float]:
    """Estimate the trace and half the width of its 95 % interval. All steps of a seed have the same probes."""
    generator = torch.Generator().manual_seed(seed)
    with mg.hessian(problem.loss(problem.params), problem.params) as H:
        found = H.trace(method="xtrace", probes=config.probes, generator=generator)
    low, high = found.interval(0.95)
    return {"trace": found.value.item(), "half": (high - low).item() / 2}


def report(results: list[Result], config: LandscapeConfig) -> str:
    """Return the page."""
    names = (
        "training loss",
        "training accuracy (%)",
        "test accuracy (%)",
        "sharpness",
        "trace",
        "its interval",
    )
    table, seeds = [["run", "step size", *names, "sharpness / edge"]], len({one["seed"] for one in results})
    for name, own in by_cell(results).items():
        run, last = config.runs[name], [one["traces"][-1] for one in own]
        loss = statistics.geometric_mean([one["loss"] for one in own])
        columns = ("accuracy/train", 1), ("accuracy/test", 1), ("sharpness", 2)
        values = [spread([one[column] for one in own], digits) for column, digits in columns]
        values += [
            spread([one["trace"] for one in last]),
            f"± {statistics.mean(one['half'] for one in last):.1f}",
        ]
        edges = spread([at_the_edge(one) for one in own], 2)
        table.append([run.title, f"{run.lr:g}", f"{loss:.1e}", *values, edges])
    return f"""# The landscape that optimizers train in

{config.count} characters of Omniglot, {SHOTS} images of each to train on; a tanh network of {config.hidden} hidden
units, squared errors, {config.steps} steps on all examples, with characters of its own for each of {seeds} seed(s).
Mean and standard deviation over seeds at the last step; the geometric mean of the loss. The interval is the 95 %
interval of one estimate of the trace. The last column is the median over the second half of the preconditioned
sharpness over the edge of stability.

{markdown(table)}
"""


def at_the_edge(result: Result) -> float:
    """Return the median of the preconditioned sharpness over its edge, in the second half of a run."""
    rows = [row for row in result["path"] if row["preconditioned"] is not None]
    return statistics.median(row["preconditioned"] / row["edge"] for row in rows[len(rows) // 2 :])


def ratio(row: dict[str, Any]) -> float | None:
    """Return the preconditioned sharpness over the edge of stability, where there is a preconditioner."""
    return None if row["preconditioned"] is None or not row["edge"] else row["preconditioned"] / row["edge"]


PANELS = (
    ("Training loss", "Mean squared error", lambda row: row["loss"]),
    ("Largest eigenvalue of the Hessian", "Sharpness", lambda row: row["sharpness"]),
    ("1 is the edge of stability of each optimizer", "Preconditioned sharpness / edge", ratio),
)


def figures(results: list[Result], config: LandscapeConfig, folder: Path) -> list[Path]:
    """Draw loss, sharpness, its ratio to the edge of stability, and trace over steps."""
    runs, path = by_cell(results), folder / "landscape.png"
    colors = dict(zip(config.runs, itertools.cycle((*CYCLE, INK))))
    with figure(path, 2, 2, size=(10.5, 7)) as axes:
        for axis, (title, label, quantity) in zip(axes.flatten(), PANELS, strict=False):
            for name, repeated in runs.items():
                _curve(axis, repeated, quantity, label=config.runs[name].title, color=colors[name])
            _dress(axis, title, label)
        axes[0, 0].set_yscale("log")
        axes[0, 1].set_ylim(0, None)
        axes[1, 0].axhline(1, color=INK, linewidth=1, linestyle=":")
        axes[1, 0].set_ylim(0, 1.6)
        _traces(axes[1, 1], runs, colors)
        legend_below(axes[0, 0], columns=len(runs))
    return [path]


def _curve(
    axis: Any, repeated: list[Result], quantity: Callable[[Any], float | None], **options: Any
) -> None:
    """Draw the median over seeds, and their range."""
    points = []
    for rows in zip(*(one["path"] for one in repeated), strict=False):
        values = [value for row in rows if (value := quantity(row)) is not None]
        if values:
            points.append((rows[0]["step"], statistics.median(values), min(values), max(values)))
    steps, medians, lows, highs = zip(*points, strict=True)
    axis.fill_between(steps, lows, highs, color=options["color"], alpha=0.15, linewidth=0)
    axis.plot(steps, medians, linewidth=1.4, **options)


def _traces(axis: Any, runs: dict[str, list[Result]], colors: dict[str, str]) -> None:
    """Draw the mean trace over seeds, with the 95 % interval of the estimates."""
    for name, repeated in runs.items():
        groups = list(zip(*(one["traces"] for one in repeated), strict=False))
        means = [statistics.mean(row["trace"] for row in rows) for rows in groups]
        halves = [math.hypot(*(row["half"] for row in rows)) / len(rows) for rows in groups]
        options = {"marker": "o", "markersize": 3, "linewidth": 1.4, "elinewidth": 1, "capsize": 2}
        axis.errorbar([rows[0]["step"] for rows in groups], means, yerr=halves, **options, color=colors[name])
    _dress(axis, "Trace of the Hessian", "Trace, with 95 % intervals")
    axis.set_ylim(0, None)


def _dress(axis: Any, title: str, label: str) -> None:
    axis.set_title(title)
    axis.set_xlabel("Training step")
    axis.set_ylabel(label)
    axis.grid(axis="y")
    thousands(axis.xaxis)


def check(config: LandscapeConfig) -> None:
    """Raise `ValueError` for runs that do not exist, or whose edge of stability is not known."""
    if unknown := [name for name in config.only or [] if name not in config.runs]:
        raise ValueError(f"landscape: only must be among {', '.join(config.runs)}, got {', '.join(unknown)}.")
    for name, run in config.runs.items():
        if (run.rho or run.penalty) and run.method is not Method.gd:
            raise ValueError(
                f"landscape: runs.{name} has a rho or a penalty, whose edge of stability is only known for "
                f"method=gd, got {run.method.value}."
            )


def cells(config: LandscapeConfig) -> list[Cell]:
    """Return every run with every seed. Seeds are the outer loop."""
    chosen = {name: run for name, run in config.runs.items() if name in (config.only or config.runs)}
    return [
        Cell(name, seed, partial(train, config, run)) for seed in config.seeds for name, run in chosen.items()
    ]


study = Study(
    "landscape", LandscapeConfig, cells=cells, report=report, figures=figures, check=check, free=["only"]
)

if __name__ == "__main__":
    study.main()
