"""Train a meta-learner: `python -m experiments.train [experiment=NAME] [KEY=VALUE ...] [-m]`.

Everything a run leaves behind is in its folder, `outputs/DATE/TIME` or `multirun/DATE/TIME/JOB`:

    .hydra/                the configuration
    provenance.json        commit, versions, platform, command line, seed
    metrics.jsonl          metrics of training, which depend only on configuration and seed
    costs.jsonl            time of an outer step and peak memory
    checkpoints/last.pt    the whole state, from which `resume=FOLDER` resumes, bitwise identical on a CPU
    memory.txt, .jsonl     memory of every inner and outer step of the first iterations
    result.json            the test, with its protocol
    plots/                 learning_curve.png, adaptation.png
    failure.txt            why the run ended early, if it did
    metrics.csv, memory.csv, or wandb/, or tensorboard/ by `logger=`
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig

from experiments.run import checkpoint, provenance, ranks, result, resume
from experiments.run.build import build_parts, build_splits, device
from experiments.run.config import plain, register, typed
from experiments.run.fit import check_fit, preflight
from experiments.run.job import claimed, failures_reported, launch, seed_everything
from experiments.run.journal import MEMORY, Journal, Silent
from experiments.run.loggers import open_mirror
from experiments.run.loop import Run, train
from experiments.run.metrics import last_values, value_of
from experiments.run.plots.adaptation import adaptation
from experiments.run.plots.learning import learning_curve
from experiments.run.schema import Config
from experiments.run.signals import signals_raised

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omegaconf import DictConfig

    from experiments.run.ranks import Ranks

log = logging.getLogger("experiments.train")
register()


def main() -> None:
    """Run the program, with the command line completed from the run folder it resumes, if any."""
    launch(_resumed_or_new, "config", "experiments.train")


def _resumed_or_new() -> None:
    sys.argv[1:] = ranks.command_line(sys.argv[1:])
    program()


@hydra.main(config_path="../conf", config_name="config", version_base="1.3")
def program(config: DictConfig) -> float:
    """Run one job, and return the metric that a sweeper minimizes or maximizes."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with failures_reported(folder, log):
        return run_job(typed(config), folder)


def run_job(config: Config, folder: Path) -> float:
    """Train, test, plot and report one run in its folder, and return its `config.metric`."""
    with ranks.joined(uses_cuda=device(config).type == "cuda") as here:
        return _run_job(config, folder, here)


def _run_job(config: Config, folder: Path, here: Ranks) -> float:
    config.resume = resume.settled(config.resume, folder)
    seed_everything(config.seed, config.threads, anomaly=config.anomaly)
    splits, parts = build_splits(config), build_parts(config)
    here.check(config, parts)
    check_fit("train", parts, lambda: splits.train.sample(1).to(device=device(config)))
    if config.preflight:
        draw = lambda: splits.train.sample(config.meta_batch).to(device=device(config))  # noqa: E731
        log.info("%s", preflight(parts, draw))
    state = None if config.resume is None else checkpoint.load(resume.checkpoint_file(config.resume))
    here.seed(config.seed)
    step = 0 if state is None else checkpoint.restore(state, parts, plain(config), here.rank)
    skipped = 0 if state is None or not here.is_first else state.get("skipped", 0)
    with _journal(config, folder, step, here) as journal:
        run = Run(config, parts, splits, device(config), folder, journal, step, skipped, here)
        train(run)
        outcome = result.judge(run)
        return finish(run, outcome) if here.is_first else math.nan


@contextlib.contextmanager
def _journal(config: Config, folder: Path, step: int, here: Ranks) -> Iterator[Silent]:
    """Claim the folder and open the files that the first process writes. The other processes write nothing."""
    if not here.is_first:
        with signals_raised():
            yield Silent()
        return
    resumed_at = None if config.resume is None else step
    with claimed(
        folder, is_resumed=resume.is_in_place(config.resume, folder), how_to_go_on=resume.how_to(folder)
    ):
        _begin(config, folder, step, here)
        with (
            open_mirror(config.logger, folder, plain(config), resumed_at=resumed_at) as mirror,
            Journal(folder, mirror, until=step) as journal,
        ):
            yield journal


def finish(run: Run, outcome: dict[str, Any]) -> float:
    """Write the result, plot and report, and return the metric of the run."""
    result.write(run.folder, outcome)
    files, mirror = draw(run), run.journal.mirror
    means = {name: value["mean"] for name, value in outcome["metrics"].items()}
    mirror.summarise(means)
    mirror.summarise({"protocol": outcome["protocol"]})
    mirror.images(files)
    log.info("%s", report(run.folder, outcome, files))
    return value_of(run.config.metric, {**last_values(run.journal.rows()), **means})


def report(folder: Path, outcome: dict[str, Any], files: list[Path]) -> str:
    """Return what to print of a finished run."""
    measured = folder / MEMORY
    return "\n".join(
        [
            f"Finished.\n{result.text(outcome)}",
            *([f"Memory of the first outer steps:\n{measured.read_text()}"] if measured.exists() else []),
            f"Plots: {', '.join(_shown(file) for file in files)}",
        ]
    )


def draw(run: Run) -> list[Path]:
    """Draw the plots of a run."""
    trained, tested = run.config.algorithm.steps, run.config.evaluate.steps
    files = [learning_curve(run.folder, train_steps=trained, steps=tested)]
    return files if tested is None else [*files, adaptation(run)]


def _begin(config: Config, folder: Path, step: int, here: Ranks) -> None:
    """Write the provenance of a run. A resumed run keeps its metrics up to the checkpoint."""
    if config.resume is None:
        provenance.write(folder, seed=config.seed, processes=here.size)
        return
    file = resume.checkpoint_file(config.resume)
    if step < config.iterations:
        result.set_aside(folder)
    resume.copy_history(file, folder)
    resumed = {"from": str(file), "step": step}
    provenance.write(folder, seed=config.seed, processes=here.size, resumed=resumed)
    log.info("Continuing %s at step %d.", file, step)


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
