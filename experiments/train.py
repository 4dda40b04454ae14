"""Train a meta-learner: `python -m experiments.train [experiment=NAME] [KEY=VALUE ...] [-m]`.

Everything a run leaves behind is in its folder, `outputs/DATE/TIME` or `multirun/DATE/TIME/JOB`:

    .hydra/                what was configured
    provenance.json        commit, versions, platform, command line, seed
    metrics.jsonl          what training computed, a function of configuration and seed alone
    costs.jsonl            what it cost: time of an outer step, peak memory
    checkpoints/last.pt    the whole state; `resume=FOLDER` continues bit for bit on the CPU
    memory.txt, .jsonl     memory of every inner and outer step of the first iterations
    result.json            the test, with its protocol
    plots/                 learning_curve.png, adaptation.png, memory.png
    failure.txt            why the run ended early, if it did
    wandb/                 the offline mirror
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig

from experiments import checkpoint, memory, provenance, result, resume
from experiments.build import build_parts, build_splits, device
from experiments.config import plain, register, typed
from experiments.fit import check_fit, preflight
from experiments.job import claimed, failures_reported, launch, seed_everything
from experiments.journal import Journal
from experiments.loop import Run, train
from experiments.metrics import last_values, read_rows, value_of
from experiments.mirrors.opening import open_mirror
from experiments.plots.adaptation import adaptation
from experiments.plots.learning import learning_curve
from experiments.plots.memory import memory_plot
from experiments.schema import Config

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from experiments.mirrors.mirror import Mirror

log = logging.getLogger("experiments.train")
register()


def main() -> None:
    """Run the program, with the command line completed from the run folder it resumes, if any."""
    launch(_resumed_or_new, "config", "experiments.train")


def _resumed_or_new() -> None:
    sys.argv[1:] = resume.command_line(sys.argv[1:])
    program()


@hydra.main(config_path="../conf", config_name="config", version_base="1.3")
def program(config: DictConfig) -> float:
    """Run one job, and return the metric that a sweeper minimises or maximises."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with failures_reported(folder, log):
        return run_job(typed(config), folder)


def run_job(config: Config, folder: Path) -> float:
    """Train, test, plot and report one run in its folder; return its `config.metric`."""
    config.resume = resume.settled(config.resume, folder)
    seed_everything(config.seed, config.threads, anomaly=config.anomaly)
    splits, parts = build_splits(config), build_parts(config)
    check_fit("train", parts, lambda: splits.train.sample(1).to(device=device(config)))
    if config.preflight:
        draw = lambda: splits.train.sample(config.meta_batch).to(device=device(config))  # noqa: E731
        log.info("%s", preflight(parts, draw))
    state = None if config.resume is None else checkpoint.load(resume.checkpoint_file(config.resume))
    step = 0 if state is None else checkpoint.restore(state, parts, plain(config))
    with claimed(
        folder, is_resumed=resume.is_in_place(config.resume, folder), how_to_go_on=resume.how_to(folder)
    ):
        _begin(config, folder, step)
        with (
            open_mirror(
                config.logger, folder, plain(config), resumed_at=None if state is None else step
            ) as mirror,
            Journal(folder, mirror, until=step) as journal,
        ):
            skipped = 0 if state is None else state.get("skipped", 0)
            run = Run(config, parts, splits, device(config), folder, journal, step, skipped)
            train(run)
            outcome = finish(run, mirror)
    means = {name: value["mean"] for name, value in outcome["metrics"].items()}
    return value_of(config.metric, {**last_values(read_rows(folder / "metrics.jsonl")), **means})


def finish(run: Run, mirror: Mirror) -> dict[str, Any]:
    """Test, plot and report; return the result."""
    outcome = result.judge(run)
    result.write(run.folder, outcome)
    files = draw(run)
    mirror.summarise({name: value["mean"] for name, value in outcome["metrics"].items()})
    mirror.summarise({"protocol": outcome["protocol"]})
    mirror.images(files)
    log.info("%s", report(run.folder, outcome, files))
    return outcome


def report(folder: Path, outcome: dict[str, Any], files: list[Path]) -> str:
    """Return what to print of a finished run."""
    measured = folder / memory.TEXT
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
    files += [] if tested is None else [adaptation(run)]
    return [*files, memory_plot(run.folder)] if memory.read(run.folder) else files


def _begin(config: Config, folder: Path, step: int) -> None:
    """Write down where a run comes from; what it continues keeps its metrics up to there."""
    if config.resume is None:
        provenance.write(folder, seed=config.seed)
        return
    file = resume.checkpoint_file(config.resume)
    if step < config.iterations:
        result.set_aside(folder)
    resume.copy_history(file, folder)
    provenance.write(folder, seed=config.seed, resumed={"from": str(file), "step": step})
    log.info("Continuing %s at step %d.", file, step)


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
