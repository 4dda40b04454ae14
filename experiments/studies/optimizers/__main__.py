"""Train by one optimizer: `python -m experiments.studies.optimizers [KEY=VALUE ...] [-m]`.

Each optimizer has the hyper-parameters of `conf/optimizer/NAME.yaml`, of which those in `conf/tuned/NAME.yaml` for
the workload win, and what the command line says of them wins over all. All optimizers of a seed start from the same
model, and spend the same budget of gradient-equivalents: the floating-point operations of their steps, in units of
one gradient on a batch of the workload. Everything is in the folder of the run, `outputs/optimizers/DATE/TIME`, or
below `multirun/optimizers/DATE/TIME`, which `python -m experiments.studies.optimizers.compare FOLDER` draws together:

    .hydra/           what was configured
    settings.json     what was used: the tuned hyper-parameters among it
    provenance.json   commit, versions, platform, command line, seed
    metrics.jsonl     loss on training examples and on held-out drawings, gradient-equivalents spent
    costs.jsonl       seconds of training, evaluations left out
    result.json       the last of each, and whether the run has diverged
    plots/            loss.png
    failure.txt       why the run ended early, if it did
    wandb/            the offline mirror
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig

from experiments.run import provenance, result
from experiments.run.build import device
from experiments.run.config import plain
from experiments.run.files import write_text
from experiments.run.job import claimed, failures_reported, launch, seed_everything
from experiments.run.journal import Journal
from experiments.run.mirrors.opening import open_mirror
from experiments.run.plots.optimizers import losses
from experiments.studies.optimizers.building import Stepper
from experiments.studies.optimizers.compare import read_curve
from experiments.studies.optimizers.schema import OptimizersConfig, register_optimizers, typed
from experiments.studies.optimizers.training import Run, flops_of_gradient, train
from experiments.studies.optimizers.workload import Problem, batches, problem

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("experiments.studies.optimizers")
register_optimizers()


@hydra.main(config_path="../../../conf", config_name="optimizers", version_base="1.3")
def program(config: DictConfig) -> float:
    """Run one job, and return its training loss, for a sweeper to minimise."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with failures_reported(folder, log):
        return run_job(typed(config, HydraConfig.get().overrides.task), folder)


def run_job(config: OptimizersConfig, folder: Path) -> float:
    """Train by one optimizer, plot and report, in a folder; return the training loss, infinite if it diverged."""
    seed_everything(config.seed, config.threads)
    settings = plain(config)  # type: ignore[reportArgumentType]
    now = problem(config.workload, config.seed, device(config), config.allow)  # type: ignore[reportArgumentType]
    with (
        claimed(folder),
        open_mirror(config.logger, folder, settings, resumed_at=None) as mirror,
        Journal(folder, mirror, until=0) as journal,
    ):
        provenance.write(folder, seed=config.seed)
        write_text(folder / "settings.json", json.dumps(settings, indent=2) + "\n")
        run = start(config, now, journal)
        is_finite = train(run)
        outcome = outcome_of(run, folder, config.seed, diverged=not is_finite)
        result.write(folder, outcome)
        mirror.summarise({name: value["mean"] for name, value in outcome["metrics"].items()})
        plot = losses(
            folder / "plots" / "loss.png", {config.workload.name: {_name(config): read_curve(folder)}}
        )
        mirror.images([plot])
    log.info("%s", report(outcome))
    return outcome["metrics"]["loss/train"]["mean"] if is_finite else math.inf


def start(config: OptimizersConfig, now: Problem, journal: Journal) -> Run:
    """Prepare a run."""
    workload = config.workload
    unit = flops_of_gradient(now, next(batches(now.train, workload.batch_size, config.seed)))
    examples = batches(now.train, config.batch_size or workload.batch_size, config.seed)
    every = config.budget / config.evaluations
    return Run(
        now, Stepper(config.optimizer, now, config.allow), examples, unit, config.budget, every, journal
    )


def outcome_of(run: Run, folder: Path, seed: int, *, diverged: bool) -> dict[str, Any]:
    """Return the result as `result.json` holds it; metrics are the last that were finite."""
    curve = read_curve(folder)
    metrics = {name: {"mean": values[-1]} for name, values in curve.items() if values}
    costs = {
        "steps": run.steps,
        "gradient_equivalents": run.gradients,
        "seconds": run.seconds,
        "gradients_of_a_step": run.gradients / max(run.steps, 1),
    }
    return {"step": run.steps, "seed": seed, "diverged": diverged, "costs": costs, "metrics": metrics}


def report(outcome: dict[str, Any]) -> str:
    """Say in a line how a run ended."""
    costs, metrics = outcome["costs"], outcome["metrics"]
    shown = ", ".join(f"{name} {value['mean']:.4g}" for name, value in metrics.items() if "/" in name)
    end = "Diverged" if outcome["diverged"] else "Finished"
    return (
        f"{end} after {costs['steps']} steps, {costs['gradient_equivalents']:.4g} gradient-equivalents "
        f"({costs['gradients_of_a_step']:.3g} a step) and {costs['seconds']:.3g} s: {shown}"
    )


def _name(config: OptimizersConfig) -> str:
    return config.optimizer._target_.rpartition(".")[2]


if __name__ == "__main__":
    launch(program, "optimizers", "experiments.studies.optimizers")
