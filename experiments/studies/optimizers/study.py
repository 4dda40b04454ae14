"""Compare optimizers over seeds: `python -m experiments.studies.optimizers.study [workloads=[pinn]] [KEY=VALUE ...]`.

Every optimizer has the same number of trials on a workload, on a seed that is used for nothing else; the settings
with the least training loss then train from every seed, for so many seconds of CPU. The same command goes on where it
ended. In `folder`:

    WORKLOAD/OPTIMIZER/trialN/SEED/result.json   the loss that a trial comes to
    WORKLOAD/OPTIMIZER/chosen/SEED/result.json   the curve of a run with the settings that were chosen
    optimizers_study.md, optimizers_study.png    medians and quartiles at equal seconds and equal gradients
    curves.json                                  those over seconds, which pages of the site draw
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import OmegaConf

from experiments.run import result
from experiments.run.config import check_least, composed
from experiments.run.schema import key
from experiments.studies.optimizers.schema import WORKLOADS, OptimizersConfig, register_optimizers, typed
from experiments.studies.optimizers.summary import figures, report
from experiments.studies.optimizers.training import gradients_of_work, raced, start
from experiments.studies.study import Cell, Result, Study, StudyConfig, Work

TRIAL_EVALUATIONS = 20


@dataclass
class OptimizersStudyConfig(StudyConfig):
    """Which workloads, which settings, and for how long."""

    workloads: list[str] = key("What is trained, of those in `trials`.")
    optimizers: list[str] | None = key("Which, of those in `trials`; null is all.")
    tuning_seed: int = key("The seed of trials, none of `seeds`.")
    evaluations: int = key("How often a run is measured, evenly in seconds.")
    seconds: dict[str, float] = key("By workload, seconds of CPU of a run, measurements left out.")
    trial_part: float = key("The part of these that a trial takes.")
    shared: dict[str, dict[str, Any]] = key(  # str; OmegaConf merges no file into a dict of dicts of str
        "By workload and optimizer, the settings that its trials have in common."
    )
    trials: dict[str, dict[str, list[str]]] = key("By workload and optimizer, the settings that are tried.")


def check(config: OptimizersStudyConfig) -> None:
    """Refuse what is no comparison."""
    check_least("optimizers_study", {"evaluations": (config.evaluations, 1)})
    if not 0 < config.trial_part <= 1:
        raise ValueError(
            f"optimizers_study: trial_part must be above 0 and at most 1, got {config.trial_part}."
        )
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
    """Return the median training loss over the second half of a trial: the last may be a chance of its steps."""
    settings = settings_of(workload, optimizer, _joined(config, workload, optimizer, trial))
    curve, is_finite = raced(
        start(settings, work.seed), config.trial_part * config.seconds[workload], TRIAL_EVALUATIONS
    )
    losses = curve["loss/train"]
    loss = statistics.median(losses[len(losses) // 2 :]) if is_finite else math.inf
    return {"workload": workload, "optimizer": optimizer, "trial": trial, "loss": loss}


def chosen(config: OptimizersStudyConfig, workload: str, optimizer: str, work: Work) -> Result:
    """Return the curve of a run by the settings whose trial came lowest."""
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
    """Return what `experiments.studies.optimizers` would run for these changes, without what was tuned before."""
    keys = [
        change if change.startswith("batch_size=") else f"optimizer.{change}" for change in changes.split()
    ]
    overrides = [f"workload={workload}", f"optimizer={optimizer}", *keys]
    register_optimizers()
    config = composed("optimizers", overrides)
    OmegaConf.update(config, "tuned", {}, merge=False)
    return typed(config, overrides)


study = Study(
    "optimizers_study",
    OptimizersStudyConfig,
    cells=cells,
    report=report,
    figures=figures,
    check=check,
    free=["workloads", "optimizers"],
)

if __name__ == "__main__":
    study.main()
