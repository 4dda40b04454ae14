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
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig

from experiments import checkpoint, memory, provenance, result, resume
from experiments.build import build_parts, build_splits, device
from experiments.config import plain, register, typed
from experiments.job import failures_reported, seed_everything
from experiments.journal import Journal
from experiments.loop import Run, train
from experiments.mirror import open_mirror
from experiments.plots.adaptation import adaptation
from experiments.plots.learning import learning_curve
from experiments.plots.memory import memory_plot
from experiments.schema import Config

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from experiments.build import Parts
    from experiments.mirror import Mirror

log = logging.getLogger("experiments.train")
register()


def main() -> None:
    """Run the program, with the command line completed from the run folder it resumes, if any."""
    try:
        sys.argv[1:] = resume.command_line(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
    program()


@hydra.main(config_path="../conf", config_name="config", version_base="1.3")
def program(config: DictConfig) -> None:
    """Run one job; what goes wrong is in its log and its folder as well as on the terminal."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with failures_reported(folder, log):
        run_job(typed(config), folder)


def run_job(config: Config, folder: Path) -> None:
    """Train, test, plot and report one run in its folder."""
    seed_everything(config.seed, config.threads, anomaly=config.anomaly)
    splits, parts = build_splits(config), build_parts(config)
    settings = plain(config)
    step = _start(config, parts, folder)
    resumed_at = None if config.resume is None else step
    with (
        open_mirror(config.logger, folder, settings, resumed_at=resumed_at) as mirror,
        Journal(folder, mirror, until=step) as journal,
    ):
        run = Run(config, parts, splits, device(config), folder, journal, step)
        train(run)
        report = finish(run, mirror)
    log.info("%s", report)


def finish(run: Run, mirror: Mirror) -> str:
    """Test and plot, and return what to print."""
    outcome = result.judge(run)
    result.write(run.folder, outcome)
    files = draw(run)
    mirror.summarise({name: value["mean"] for name, value in outcome["metrics"].items()})
    mirror.summarise({"protocol": outcome["protocol"]})
    mirror.images(files)
    measured = run.folder / memory.TEXT
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
    files = [learning_curve(run.folder, train_steps=trained, steps=tested), adaptation(run)]
    return [*files, memory_plot(run.folder)] if memory.read(run.folder) else files


def _start(config: Config, parts: Parts, folder: Path) -> int:
    if config.resume is None:
        provenance.write(folder, seed=config.seed)
        return 0
    file = resume.checkpoint_file(config.resume)
    step = checkpoint.restore(checkpoint.load(file), parts, plain(config))
    resume.copy_history(file, folder)
    provenance.write(folder, seed=config.seed, resumed={"from": str(file), "step": step})
    log.info("Continuing %s at step %d.", file, step)
    return step


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
