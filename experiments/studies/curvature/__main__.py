"""Measure curvature: `python -m experiments.studies.curvature [problem=NAME] [checkpoint=PATH] [KEY=VALUE ...]`.

Trains a model and measures a curvature matrix of its loss at some steps; or, with `checkpoint=PATH`, measures the
model of a file as it is. Everything is in the folder of the run, `outputs/curvature/DATE/TIME`:

    .hydra/                  what was configured
    provenance.json          commit, versions, platform, command line, seed
    metrics.jsonl            loss, traces with 95 % intervals, eigenvalues with bounds, at every measured step
    densities.jsonl          the spectral densities: Ritz values and their weights
    costs.jsonl              time, products, peak memory of every measurement
    checkpoints/STEP.pt      the model as it was measured; `checkpoint=FILE` measures it again
    plots/                   density.png, traces.png, eigenvalues.png
    failure.txt              why the run ended early, if it did
    wandb/                   the offline mirror
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from tqdm.contrib.logging import logging_redirect_tqdm

from experiments.run import checkpoint, provenance
from experiments.run.build import Parts, build_parts, build_tasks, device, generator
from experiments.run.config import plain
from experiments.run.fit import check_fit
from experiments.run.job import claimed, failures_reported, launch, seed_everything
from experiments.run.journal import Journal
from experiments.run.loop import peak_memory
from experiments.run.metrics import JsonLines, read_rows
from experiments.run.mirrors.opening import open_mirror
from experiments.run.plots.curvature import draw
from experiments.run.progress import Progress
from experiments.studies.curvature.loading import load_model
from experiments.studies.curvature.measure import TOTAL, measure, row_of
from experiments.studies.curvature.problem import Problem, as_vectors, problem, tasks_to_measure
from experiments.studies.curvature.schema import (
    CurvatureConfig,
    Objective,
    register_curvature,
    steps_of,
    training,
    typed,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from metagrad.tasks import Batch, TaskDistribution

log = logging.getLogger("experiments.studies.curvature")
register_curvature()


@hydra.main(config_path="../../../conf", config_name="curvature", version_base="1.3")
def program(config: DictConfig) -> None:
    """Run one job; what goes wrong is in its log and its folder as well as on the terminal."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with failures_reported(folder, log):
        run_job(typed(config), folder)


@dataclass(frozen=True)
class Run:
    """A run in progress: what is trained, and the tasks that it is measured on."""

    config: CurvatureConfig
    parts: Parts
    tasks: TaskDistribution
    measured: Batch
    device: torch.device
    folder: Path
    journal: Journal
    densities: JsonLines

    def problem(self) -> Problem:
        """Return what the curvature is of, now."""
        return problem(self.config.objective, self.parts, self.parts.loss_fn, self.measured)


def run_job(config: CurvatureConfig, folder: Path) -> None:
    """Train and measure, or measure a checkpoint; then plot and report."""
    shared = training(config)
    seed_everything(config.seed, config.threads, anomaly=config.anomaly)
    parts, where = build_parts(shared), device(shared)
    tasks = build_tasks(config.task, config.allow)
    check_fit("curvature", parts, lambda: as_vectors(config, tasks.sample(1)).to(device=where))
    start = 0 if config.checkpoint is None else load_model(config.checkpoint, parts)
    with (
        claimed(folder),
        open_mirror(config.logger, folder, _settings(config), resumed_at=None) as mirror,
        Journal(folder, mirror, until=0) as journal,
    ):
        provenance.write(folder, seed=config.seed)
        measured = tasks_to_measure(config, tasks, where)
        densities = JsonLines(folder / "densities.jsonl")
        run = Run(config, parts, tasks, measured, where, folder, journal, densities)
        if config.checkpoint is None:
            train(run)
        else:
            with Progress(total=1, unit="measurement") as bar:
                record(run, start, bar, "measurement 1 of 1")
        densities.close()
        files = draw(folder)
        mirror.images(files)
    shown = [str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file) for file in files]
    log.info("%s\nPlots: %s", report(folder), ", ".join(shown))


def train(run: Run) -> None:
    """Train up to the last step to be measured, and measure at each."""
    due = steps_of(run.config)
    source = generator(run.config.seed, "train")
    bar = Progress(total=due[-1], unit="step")
    with logging_redirect_tqdm(), bar:
        for step in range(due[-1] + 1):
            if step:
                train_step(run, source)
                bar.update()
            if step in due:
                record(run, step, bar, f"measurement {due.index(step) + 1} of {len(due)}")


def train_step(run: Run, source: torch.Generator) -> None:
    """Move the model by one step of the optimizer: on fresh tasks, or for supervised learning on all its examples."""
    parts = run.parts
    parts.optimizer.zero_grad(set_to_none=True)
    if run.config.objective is Objective.supervised:
        now = run.problem()
        now.loss(now.params, now.x, now.y).backward()
    else:
        batch = run.tasks.sample(run.config.meta_batch, generator=source).to(device=run.device)
        parts.algorithm(as_vectors(run.config, batch)).loss.backward()
    parts.optimizer.step()
    parts.schedule.step()


def record(run: Run, step: int, bar: Progress[Any], name: str) -> None:
    """Measure, and write down what was found; the bar shows which part of the measurement `name` is on."""
    began = time.perf_counter()
    now = run.problem()
    with now.operator(run.config.matrix) as operator:
        seed = run.config.seed
        found = measure(operator, run.config, seed, lambda part: bar.set_postfix_str(f"{name}: {part}"))
    with torch.no_grad():
        metrics = {"loss": now.loss(now.params, now.x, now.y).item(), **found.metrics}
    costs = {
        "time/measurement(s)": time.perf_counter() - began,
        "products": found.products,
        "memory/peak(MiB)": peak_memory(run.device),
    }
    run.journal.write(step, metrics, costs)
    run.densities.write(step, row_of(found.density))
    checkpoint.save(
        run.folder / "checkpoints" / f"{step}.pt", run.parts, step=step, config=_settings(run.config)
    )
    log.info("Step %d: loss %.4g, trace %s, %s", step, metrics["loss"], _trace(metrics), found.density)


def report(folder: Path) -> str:
    """Format the metrics of a run as a table."""
    lines = [f"{'step':>8}{'loss':>12}{'trace (95 %)':>26}{'largest':>12}{'lowest seen':>13}"]
    for row in read_rows(folder / "metrics.jsonl"):
        ends = f"{row['eigenvalue/1']:12.4g}{row['eigenvalue/lowest_seen']:13.4g}"
        lines.append(f"{row['step']:8}{row['loss']:12.4g}{_trace(row):>26}{ends}")
    return "\n".join(lines)


def _trace(metrics: dict[str, float]) -> str:
    return f"{metrics[f'trace/{TOTAL}']:.4g} +- {metrics[f'trace/{TOTAL}_ci95']:.2g}"


def _settings(config: CurvatureConfig) -> dict[str, Any]:
    return plain(config)  # type: ignore[reportArgumentType]


if __name__ == "__main__":
    launch(program, "curvature", "experiments.studies.curvature")
