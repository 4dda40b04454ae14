"""Compare optimizers over seeds: `python -m experiments.optimizers.study [workloads=[pinn]] [KEY=VALUE ...]`.

Every optimizer has the same number of trials on a workload, on a seed that is used for nothing else; the settings
with the least training loss then train from every seed, for so many seconds of CPU. The same command goes on where it
ended. In `folder`:

    WORKLOAD/OPTIMIZER/trialN/SEED/result.json   the loss that a trial ends at
    WORKLOAD/OPTIMIZER/chosen/SEED/result.json   the curve of a run with the settings that were chosen
    optimizers_study.md, optimizers_study.png    medians and quartiles at equal seconds and equal gradients
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from experiments import result
from experiments.build import device
from experiments.config import check_least
from experiments.help import CONF
from experiments.optimizers.building import Stepper
from experiments.optimizers.cost import FlopCounter
from experiments.optimizers.schema import WORKLOADS, OptimizersConfig, register_optimizers, typed
from experiments.optimizers.summary import figures, report
from experiments.optimizers.training import flops_of_gradient
from experiments.optimizers.workload import Examples, Problem, batches, problem
from experiments.schema import key
from experiments.study import Cell, Result, Study, StudyConfig, Work

COUNTED_STEPS, COUNTED_SECONDS = 10, 0.5
"""Operations are counted on so many steps, or for so long, beside the run: counting takes longer than they do."""


@dataclass
class OptimizersStudyConfig(StudyConfig):
    """Which workloads, which settings, and for how long."""

    workloads: list[str] = key("What is trained, of those in `trials`.")
    optimizers: list[str] | None = key("Which, of those in `trials`; null is all.")
    tuning_seed: int = key("The seed of trials, none of `seeds`.")
    evaluations: int = key("How often a run is measured, evenly in seconds.")
    seconds: dict[str, float] = key("By workload, seconds of CPU of a run, measurements left out.")
    shared: dict[str, dict[str, str]] = key(
        "By workload and optimizer, the settings that its trials have in common."
    )
    trials: dict[str, dict[str, list[str]]] = key("By workload and optimizer, the settings that are tried.")


class Start(NamedTuple):
    """A run that has not begun."""

    problem: Problem
    step: Stepper
    batches: Iterator[Examples]


def check(config: OptimizersStudyConfig) -> None:
    """Refuse what is no comparison."""
    check_least("optimizers_study", {"evaluations": (config.evaluations, 1)})
    if config.tuning_seed in config.seeds:
        raise ValueError(
            f"optimizers_study: tuning_seed={config.tuning_seed} is one of seeds; take another one."
        )
    for name in config.workloads:
        known = [known for known in WORKLOADS if known in config.trials and known in config.seconds]
        if name not in known:
            raise ValueError(
                f"optimizers_study: workloads must be of {known}, with trials and seconds, got {name!r}."
            )
        unknown = set(config.optimizers or ()) - set(config.trials[name])
        if unknown:
            raise ValueError(
                f"optimizers_study: trials.{name} has no {sorted(unknown)}, which optimizers asks for."
            )
        counts = {optimizer: len(trials) for optimizer, trials in config.trials[name].items()}
        if len(set(counts.values())) > 1 or not all(counts.values()):
            raise ValueError(
                f"optimizers_study: every optimizer must have as many trials on {name}, got {counts}."
            )
        if not config.seconds[name] > 0:
            raise ValueError(f"optimizers_study: seconds.{name} must be above 0, got {config.seconds[name]}.")


def cells(config: OptimizersStudyConfig) -> list[Cell]:
    """List the trials of each optimizer, then its runs."""
    found = []
    for workload in config.workloads:
        for optimizer, trials in config.trials[workload].items():
            if config.optimizers is not None and optimizer not in config.optimizers:
                continue
            own = f"{workload}/{optimizer}"
            run = partial(tried, config, workload, optimizer)
            found += [
                Cell(f"{own}/trial{i}", config.tuning_seed, partial(run, trial))
                for i, trial in enumerate(trials)
            ]
            run = partial(chosen, config, workload, optimizer)
            found += [Cell(f"{own}/chosen", seed, run) for seed in config.seeds]
    return found


def tried(config: OptimizersStudyConfig, workload: str, optimizer: str, trial: str, work: Work) -> Result:
    """Return the training loss that a trial ends at."""
    settings = settings_of(workload, optimizer, _joined(config, workload, optimizer, trial))
    curve, is_finite = raced(start(settings, work.seed), config.seconds[workload], evaluations=1)
    loss = curve["loss/train"][-1] if is_finite else math.inf
    return {"workload": workload, "optimizer": optimizer, "trial": trial, "loss": loss}


def chosen(config: OptimizersStudyConfig, workload: str, optimizer: str, work: Work) -> Result:
    """Return the curve of a run by the settings whose trial ended lowest."""
    files = work.folder.parents[1].glob(f"trial*/{config.tuning_seed}/{result.FILE}")
    best = min((json.loads(file.read_text()) for file in sorted(files)), key=lambda one: one["loss"])
    settings = settings_of(workload, optimizer, _joined(config, workload, optimizer, best["trial"]))
    rate = gradients_of_work(settings, work.seed)
    curve, is_finite = raced(start(settings, work.seed), config.seconds[workload], config.evaluations)
    curve["gradients"] = [rate * amount for amount in curve.pop("work")]
    last = {name: values[-1] for name, values in curve.items()}
    work.log(int(last["step"]), last)
    return {
        "workload": workload,
        "optimizer": optimizer,
        "trial": best["trial"],
        "trials": len(config.trials[workload][optimizer]),
        "is_finite": is_finite,
        "curve": curve,
    }


def _joined(config: OptimizersStudyConfig, workload: str, optimizer: str, trial: str) -> str:
    return f"{config.shared.get(workload, {}).get(optimizer, '')} {trial}"


@functools.cache
def settings_of(workload: str, optimizer: str, changes: str) -> OptimizersConfig:
    """Return what `experiments.optimizers` would run for these changes, without what was tuned before."""
    keys = [
        change if change.startswith("batch_size=") else f"optimizer.{change}" for change in changes.split()
    ]
    overrides = [f"workload={workload}", f"optimizer={optimizer}", *keys]
    register_optimizers()
    is_ready = GlobalHydra.instance().is_initialized()
    with nullcontext() if is_ready else initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("optimizers", overrides)
    OmegaConf.update(config, "tuned", {}, merge=False)
    return typed(config, overrides)


def start(settings: OptimizersConfig, seed: int) -> Start:
    """Build the model of a seed, the same for every optimizer, its data and an optimizer."""
    torch.manual_seed(seed)
    now = problem(settings.workload, seed, device(settings))  # type: ignore[reportArgumentType]
    examples = batches(now.train, settings.batch_size or settings.workload.batch_size, seed)
    return Start(now, Stepper(settings.optimizer, now), examples)


def raced(run: Start, seconds: float, evaluations: int) -> tuple[dict[str, list[float]], bool]:
    """Train for so many seconds; return what was measured, by name, and whether every loss was finite."""
    curve: dict[str, list[float]] = {}
    spent, steps = 0.0, 0

    def record() -> None:
        for name, value in {
            "step": steps,
            "seconds": spent,
            "work": run.step.work,
            **run.problem.judge(),
        }.items():
            curve.setdefault(name, []).append(value)

    record()
    while spent < seconds:
        examples, began = next(run.batches), time.process_time()
        is_finite = stepped(run.step, examples)
        spent, steps = spent + time.process_time() - began, steps + 1
        if not is_finite:
            return curve, False
        if spent >= min(seconds, seconds / evaluations * len(curve["step"])):
            record()
    return curve, math.isfinite(curve["loss/train"][-1])


def stepped(step: Stepper, examples: Examples) -> bool:
    """Take a step; say whether the loss before it was finite."""
    try:
        return math.isfinite(step(examples).item())
    except torch.linalg.LinAlgError:  # type: ignore[reportPrivateImportUsage]  # of numbers that are not finite
        return False


def gradients_of_work(settings: OptimizersConfig, seed: int) -> float:
    """Count the operations of some first steps, in gradients for each call of the closure or product."""
    run = start(settings, seed)
    unit = flops_of_gradient(
        run.problem, next(batches(run.problem.train, settings.workload.batch_size, seed))
    )
    began = time.process_time()
    with FlopCounter() as counter:
        for _ in range(COUNTED_STEPS):
            stepped(run.step, next(run.batches))
            if time.process_time() - began > COUNTED_SECONDS:
                break
    return counter.flops / unit / run.step.work


study = Study(
    "optimizers_study",
    OptimizersStudyConfig,
    cells=cells,
    report=report,
    figures=figures,
    check=check,
    free=["workloads", "optimizers"],
    module="experiments.optimizers.study",
)

if __name__ == "__main__":
    study.main()
