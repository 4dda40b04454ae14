"""Measure curvature along training: `python -m experiments.studies.curvature [problems=[sinusoid]] [KEY=VALUE ...]`.

The Hessian belongs to the loss of an MLP on Omniglot, or to MAML's objective on sinusoids (Finn et al. 2017,
section 5.1). MAML's Hessian needs third derivatives. The study measures traces with 95 % intervals, the largest
eigenvalues with their bounds, and spectral densities at several steps of training.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg
from experiments.run.files import markdown
from experiments.run.plots.style import BLUE, CYCLE, INK, MUTED, VERMILION, figure, legend_below
from experiments.run.progress import Progress
from experiments.run.schema import key
from experiments.studies.study import Cell, Result, Study, StudyConfig, Work
from metagrad.curvature import Density, Operator

MOST_COLUMNS, MOST_TICKS = 3, 9
MARKERS = ("o", "^", "s")
LR, INNER_LR, INNER_STEPS = 1e-3, 0.01, 5
WAYS, SHOTS = 20, 10  # characters, and images of each


@dataclass
class Quantities:
    """The measurements and their precision."""

    probes: int = key("Products for the trace, and as many for each layer.", least=6)
    eigenvalues: int = key("Number of largest eigenvalues.")
    rtol: float = key("Tolerance of eigenvalues, relative to the norm of the matrix.")
    max_matvecs: int = key("Products at most; eigenvalues found by then are taken, with their bounds.")
    density_steps: int = key("Lanczos steps, products for each probe of the density.")
    density_probes: int = key("Probes of the density.")


@dataclass
class CurvatureConfig(StudyConfig):
    """A whole run."""

    problems: list[str] = key("sinusoid (MAML), omniglot (an MLP).")
    iterations: int = key("Training steps.")
    count: int = key("Measurements: at 0, and then evenly on a logarithmic axis.", least=2)
    tasks: int = key("Tasks to measure on, the same ones at every step.")
    measure: Quantities = field(default_factory=Quantities)


class Problem(NamedTuple):
    """Parameters, the loss whose Hessian is measured, and the loss of the next training step."""

    params: dict[str, nn.Parameter]
    measured: Callable[[], Tensor]
    trained: Callable[[], Tensor]


def sinusoid(config: CurvatureConfig, seed: int) -> Problem:
    """Return the MAML objective on sinusoids: the mean query loss after adaptation."""
    tasks, model = mg.tasks.Sinusoid(shots=10, queries=10), mg.models.MLP([1, 40, 40, 1])
    maml = mg.MAML(model, F.mse_loss, inner=mg.optim.rules.sgd(lr=INNER_LR), steps=INNER_STEPS)
    source, fixed = (torch.Generator().manual_seed(2 * seed + i) for i in range(2))
    batch = tasks.sample(config.tasks, generator=fixed)
    trained = lambda: maml(tasks.sample(config.tasks, generator=source)).loss  # noqa: E731
    return Problem(dict(model.named_parameters()), lambda: maml(batch).loss, trained)


def omniglot(config: CurvatureConfig, seed: int) -> Problem:
    """Return the training loss of an MLP on images of characters."""
    tasks = mg.tasks.Omniglot(ways=WAYS, shots=SHOTS, queries=1)
    x, y = tasks.sample(1, generator=torch.Generator().manual_seed(seed)).support
    model = mg.models.MLP([x[0, 0].numel(), 64, 64, WAYS])
    loss = lambda: F.cross_entropy(model(x[0].flatten(1)), y[0])  # noqa: E731
    return Problem(dict(model.named_parameters()), loss, loss)


PROBLEMS = {"sinusoid": sinusoid, "omniglot": omniglot}


def cell(config: CurvatureConfig, name: str, work: Work) -> Result:
    """Train, and measure at some steps: rows of numbers, each with its density."""
    problem, rows = PROBLEMS[name](config, work.seed), []
    optimizer = torch.optim.Adam(problem.params.values(), lr=LR)
    later = config.count - 1
    due = {0, *(round(config.iterations ** (i / later)) for i in range(1, later + 1))}
    for step in Progress(range(config.iterations + 1), unit="step", leave=False):
        if step:
            optimizer.zero_grad()
            problem.trained().backward()
            optimizer.step()
        if step in due:
            loss = problem.measured()
            with mg.hessian(loss, problem.params) as H:
                metrics, density = measure(H, config.measure, work.seed)
            rows.append({"step": step, "loss": loss.item(), **metrics, "density": row_of(density)})
            work.log(step, {"loss": loss.item(), **metrics})
    return {"rows": rows}


def measure(operator: Operator, config: Quantities, seed: int) -> tuple[dict[str, float], Density]:
    """Measure a matrix by name. Every step has the same probes, so differences come only from the matrix."""
    generator = torch.Generator(operator.device).manual_seed(seed)
    traces = {"total": operator.trace(method="xtrace", probes=config.probes, generator=generator)}
    for layer in dict.fromkeys(name.rpartition(".")[0] or name for name in operator.space.names):
        block = operator[layer]
        traces[layer] = block.trace(method="hutchinson", probes=config.probes, generator=generator)
    metrics = {}
    for name, trace in traces.items():
        low, high = trace.interval(0.95)
        metrics |= {f"trace/{name}": trace.value.item(), f"trace/{name}_ci95": (high - low).item() / 2}
    pairs = operator.eigenvalues(
        config.eigenvalues, rtol=config.rtol, max_matvecs=config.max_matvecs, generator=generator
    )
    for i, (value, bound) in enumerate(zip(pairs.values, pairs.residuals, strict=True), start=1):
        metrics |= {f"eigenvalue/{i}": value.item(), f"eigenvalue/{i}_residual": bound.item()}
    steps, probes = config.density_steps, config.density_probes
    density = smoothed(operator.density(steps=steps, probes=probes, generator=generator))
    # A Ritz value, which is an upper bound of the smallest eigenvalue.
    metrics["eigenvalue/lowest_seen"] = density.nodes.min().item()
    return metrics, density


def smoothed(density: Density) -> Density:
    """Widen the Gaussians to what so many Lanczos steps resolve: half the distance of Ritz values in the bulk.

    A narrower kernel shows single Ritz values instead of a continuum of eigenvalues.
    """
    spread = (density.nodes.max() - density.nodes.min()).item()
    return replace(density, sigma=max(density.sigma, spread / (1.5 * density.nodes.shape[1])))


def row_of(density: Density) -> dict[str, Any]:
    """Return a density as JSON values."""
    numbers = {"n": density.n, "sigma": density.sigma, "matvecs": density.matvecs}
    return {**numbers, "nodes": density.nodes.tolist(), "weights": density.weights.tolist()}


def density_of(row: dict[str, Any]) -> Density:
    """Return the density that `row_of` wrote."""
    nodes, weights = (torch.tensor(row[name], dtype=torch.float64) for name in ("nodes", "weights"))
    return Density(nodes, weights, sigma=row["sigma"], n=row["n"], matvecs=row["matvecs"])


def report(results: list[Result], config: CurvatureConfig) -> str:
    """Return the page."""
    table = [["problem", "seed", "step", "loss", "trace (95 %)", "largest", "lowest seen"]]
    for one in results:
        for row in one["rows"]:
            trace = f"{row['trace/total']:.4g} ± {row['trace/total_ci95']:.2g}"
            ends = (f"{row[f'eigenvalue/{which}']:.4g}" for which in ("1", "lowest_seen"))
            table.append(
                [one["cell"], str(one["seed"]), str(row["step"]), f"{row['loss']:.4g}", trace, *ends]
            )
    return f"# Curvature along training\n\n{markdown(table)}\n"


def figures(results: list[Result], config: CurvatureConfig, folder: Path) -> list[Path]:
    """Draw densities, traces and eigenvalues of the first seed of each problem."""
    files = []
    for one in results:
        if one["seed"] == config.seeds[0]:
            rows, name = one["rows"], one["cell"]
            files += [densities(folder / f"{name}_density.png", rows), lines(folder / f"{name}.png", rows)]
    return files


def densities(path: Path, found: Sequence[dict[str, Any]]) -> Path:
    """Draw the spectral density at every measured step, one panel each, over its own range of eigenvalues."""
    rows = math.ceil(len(found) / MOST_COLUMNS)
    columns = math.ceil(len(found) / rows)
    size = (max(3.4 * columns, 6.4), 2.8 * rows + 0.3)
    with figure(path, rows, columns, size=size, sharey=True) as axes:
        panels, all_densities = axes.flatten(), [density_of(row["density"]) for row in found]
        floor, highest = min(map(floor_of, all_densities)), 0.0
        for axis, density, row in zip(panels, all_densities, found, strict=False):
            highest = max(highest, draw_density(axis, density, floor))
            axis.set(title=f"Step {row['step']:,}", xlabel="Eigenvalue")
        for axis in panels[len(found) :]:
            axis.set_axis_off()
        for axis in axes[:, 0]:
            axis.set_ylabel("Spectral density (± standard error)")
        panels[0].set_yscale("log")
        panels[0].set_ylim(floor, 3 * highest)
    return path


def draw_density(axis: Any, density: Density, floor: float, *, color: str = BLUE) -> float:
    """Draw the mean over probes, with a standard error to both sides, and return its largest value."""
    grid = density.grid()
    found = density(grid)
    low, high = found.value - found.stderr, found.value + found.stderr
    if len(density.nodes) > 1:
        axis.fill_between(grid, low.clamp_min(floor), high, color=color, alpha=0.25, linewidth=0)
    axis.plot(grid, found.value, color=color, linewidth=1.1)
    axis.grid(axis="y")
    return found.value.max().item()


def floor_of(density: Density) -> float:
    """Return a tenth of the height of one eigenvalue."""
    return 0.1 / (density.n * density.sigma * math.sqrt(2 * math.pi))


def lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Draw traces of the whole matrix and of layers, and eigenvalues with their bounds, against the step."""
    ends = ("_ci95", "_residual", "total", "lowest_seen")
    names = [name for name in rows[0] if "/" in name and not name.endswith(ends)]
    layers, pairs = ([name for name in names if name.startswith(kind)] for kind in ("trace", "eigenvalue"))
    with figure(path, 1, 3, size=(13.5, 4.2)) as axes:
        whole, parts, eigenvalues = axes[0]
        _line(whole, rows, "trace/total", "_ci95", color=INK)
        for name, marker, color in zip(
            layers, itertools.cycle(MARKERS), itertools.cycle(CYCLE), strict=False
        ):
            _line(parts, rows, name, "_ci95", color=color, marker=marker, label=name.partition("/")[2])
        for i, name in enumerate(pairs):
            label = "Largest eigenvalues" if i == 0 else None
            options = {"color": BLUE, "alpha": 1 - 0.7 * i / len(pairs), "label": label}
            _line(eigenvalues, rows, name, "_residual", **options)
        _line(eigenvalues, rows, "eigenvalue/lowest_seen", color=VERMILION, label="Lowest seen")
        titles = {"Trace": whole, "Trace by layer": parts, "Eigenvalues": eigenvalues}
        for title, axis in titles.items():
            _dress(axis, [row["step"] for row in rows])
            axis.set_title(f"{title}, with {'bounds' if axis is eigenvalues else '95 % intervals'}")
        legend_below(parts, eigenvalues, columns=6)
    return path


def _line(axis: Any, rows: Sequence[dict[str, Any]], name: str, half: str = "", **options: Any) -> None:
    steps, values = [row["step"] for row in rows], [row[name] for row in rows]
    halves = [row[name + half] for row in rows] if half else None
    style = {"marker": "o", "markersize": 4, "linewidth": 1.4, "elinewidth": 1, "capsize": 2, **options}
    axis.errorbar(steps, values, yerr=halves, **style)


def _dress(axis: Any, steps: list[int]) -> None:
    """Label the axis of steps. The axis is logarithmic, including zero, if steps span more than a decade."""
    from matplotlib.ticker import FixedLocator, NullLocator

    first, last = next((step for step in steps if step), 1), steps[-1]
    if last > 10 * first:
        axis.set_xscale("symlog", linthresh=first, linscale=0.5)
        axis.set_xlim(-0.4 * first, 1.4 * last)
    axis.set_xlabel("Training step")
    axis.grid(axis="y")
    axis.axhline(0, color=MUTED, linewidth=0.8)
    axis.xaxis.set_major_locator(FixedLocator(steps, nbins=MOST_TICKS))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def check(config: CurvatureConfig) -> None:
    """Raise `ValueError` for problems that do not exist."""
    if unknown := [name for name in config.problems if name not in PROBLEMS]:
        raise ValueError(
            f"curvature: problems must be among {', '.join(PROBLEMS)}, got {', '.join(unknown)}."
        )


def cells(config: CurvatureConfig) -> list[Cell]:
    """Return every problem with every seed."""
    return [
        Cell(name, seed, partial(cell, config, name)) for name in config.problems for seed in config.seeds
    ]


study = Study(
    "curvature",
    CurvatureConfig,
    cells=cells,
    report=report,
    figures=figures,
    check=check,
    free=["problems"],
)

if __name__ == "__main__":
    study.main()
