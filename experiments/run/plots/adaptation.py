"""Adaptation: the effect of a few inner steps on test tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from experiments.run.build import generator
from experiments.run.evaluate import accuracies, is_classification
from experiments.run.plots.style import BLUE, FAINT, INK, MUTED, ORANGE, SKY, figure, legend_below
from metagrad.tasks import Regression

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from experiments.run.loop import Run

SHOWN = (1, 5, 10)
SHADES = {1: SKY, 5: BLUE, 10: "#00395A"}


def adaptation(run: Run) -> Path:
    """Draw test tasks before and after inner steps: curves for a regression, otherwise a metric over steps."""
    path = run.folder / "plots" / "adaptation.png"
    tasks = run.splits.test
    return _curves(run, tasks, path) if isinstance(tasks, Regression) else _progress(run, path)


def _curves(run: Run, tasks: Regression, path: Path) -> Path:
    source, number = generator(run.config.seed, "test"), run.config.plots.tasks
    functions = tasks.sample_functions(number, generator=source)
    support = tasks.sample_examples(functions, generator=source).support
    grid = torch.linspace(*tasks.x, 201).unsqueeze(-1)
    true = functions.evaluate(grid)
    fits = {k: _predict(run, support, grid, k) for k in (0, *SHOWN) if k <= _most_steps(run, support)}
    with figure(path, 1, number, size=(2.5 * number + 0.5, 3.2), sharex=True, sharey=True) as axes:
        for task, axis in enumerate(axes[0]):
            curves = {steps: fit[task] for steps, fit in fits.items()}
            _fits(axis, grid[:, 0], true[task, :, 0], curves)
            points = support.x[task, :, 0], support.y[task, :, 0]
            axis.plot(*points, "o", color=INK, markersize=4, label="Support points")
            axis.set(xlabel="Input x")
            axis.set_title(f"Task {task + 1}")
        axes[0, 0].set_ylabel("Output y")
        legend_below(axes[0, 0], columns=len(fits) + 2)
    return path


def _fits(axis: Any, x: Tensor, true: Tensor, fits: dict[int, Tensor]) -> None:
    axis.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    axis.plot(x, true, color=ORANGE, linewidth=4, alpha=0.55, label="True curve")
    for steps, fit in fits.items():
        axis.plot(x, fit, **_line(steps))


def _line(steps: int) -> dict[str, Any]:
    if steps == 0:
        return {"color": MUTED, "linestyle": (0, (1.5, 1.5)), "linewidth": 1.4, "label": "Before adapting"}
    return {
        "color": SHADES[steps],
        "linewidth": 1.4,
        "label": f"After {steps} inner step{'s' if steps > 1 else ''}",
    }


@torch.no_grad()
def _predict(run: Run, support: Any, grid: Tensor, steps: int) -> Tensor:
    fast = run.parts.algorithm.adapt(support.to(device=run.device), steps=steps)
    return fast(grid.to(run.device).expand(len(support.x), -1, -1)).squeeze(-1).cpu()


@torch.no_grad()
def _most_steps(run: Run, support: Any) -> int:
    """Return the number of steps to draw. An algorithm that learns each step cannot take more than in training."""
    most = run.config.plots.steps
    try:
        run.parts.algorithm.adapt(support.to(device=run.device), steps=most)
    except ValueError:
        return min(most, run.config.algorithm.steps or 0)
    return most


def _progress(run: Run, path: Path) -> Path:
    values, name = _paths(run)
    steps = range(len(values))
    with figure(path, size=(5.6, 3.6)) as axes:
        axis = axes[0, 0]
        axis.plot(steps, values, color=BLUE, alpha=0.18, linewidth=0.8)
        axis.plot(steps, values.mean(1), "o-", color=BLUE, linewidth=2.4, markersize=4.5)
        axis.set(xlabel="Inner steps", ylabel=name, xticks=list(steps))
        axis.set_title(f"{name.partition(' (')[0]} of {values.shape[1]} test tasks while adapting")
        axis.grid(axis="y")
    return path


@torch.no_grad()
def _paths(run: Run) -> tuple[Tensor, str]:
    number = max(run.config.plots.tasks, min(20, run.config.evaluate.chunk))
    batch = run.splits.test.sample(number, generator=generator(run.config.seed, "test")).to(device=run.device)
    outs = [run.parts.algorithm(batch, steps=k) for k in range(_most_steps(run, batch.support) + 1)]
    if is_classification(batch.query.y):
        return torch.stack(
            [accuracies(out.query_outputs, batch.query.y) for out in outs]
        ).cpu(), "Query accuracy (%)"
    return torch.stack([out.query_losses for out in outs]).cpu(), "Query loss"
