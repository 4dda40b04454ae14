"""Poison a citation graph: `python -m experiments.attack [seeds=[0]] [fraction=0.05] [KEY=VALUE ...]`.

Edges of Cora are flipped by Metattack, the gradient of training through a sparse adjacency matrix, and as many are
added at random; a graph convolutional network is trained on each graph, and defended. The same command goes on where
it ended. In `folder`:

    SEED/flips.jsonl  the pairs that were flipped, with the seconds of each
    SEED/last.pt      where the attack is
    SEED/result.json  accuracies on every graph, and the memory of a meta-gradient, sparse and dense
    attack.md         the tables
    attack.png        accuracy over the edges that are flipped
    settings.json     what was configured; provenance.json: commit, versions, platform, command line
    wandb/            the offline mirror
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from tqdm.contrib.logging import logging_redirect_tqdm

from experiments import provenance
from experiments.attack.report import curves, report, rows_of
from experiments.attack.run import run_seed
from experiments.attack.schema import AttackConfig, register_attack, typed
from experiments.config import plain
from experiments.files import write_text
from experiments.job import claimed, failures_reported, launch, seed_everything
from experiments.mirror import open_mirror

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("experiments.attack")
FREE = ("folder", "seeds", "threads", "logger", "save_every")
"""Keys that another run in the same folder may change."""

register_attack()


@hydra.main(config_path="../../conf", config_name="attack", version_base="1.3")
def program(config: DictConfig) -> None:
    """Attack with every seed, and write the tables."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with failures_reported(folder, log):
        run_job(typed(config), folder)


def run_job(config: AttackConfig, folder: Path) -> None:
    """Run what is missing, and report."""
    settings: dict[str, Any] = plain(config)  # type: ignore[reportArgumentType]
    with (
        claimed(folder, is_resumed=True),
        open_mirror(config.logger, folder, settings, resumed_at=None) as mirror,
        logging_redirect_tqdm(),
    ):
        check_settings(folder, {name: value for name, value in settings.items() if name not in FREE})
        provenance.write(folder, seed=config.seeds[0])
        results = []
        for seed in config.seeds:
            seed_everything(seed, config.threads)
            results.append(run_seed(config, seed, folder / str(seed), mirror))
            text = report(results, config)
            write_text(folder / "attack.md", text)
            figure = curves(folder / "attack.png", results)
        mirror.table("accuracy", rows_of(results))
        mirror.images([figure])
    print(text)


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write down what was configured, or compare it with what is there.

    Raises:
        ValueError: The folder holds a run with other settings.
    """
    file, text = folder / "settings.json", json.dumps(settings, indent=2) + "\n"
    if file.exists() and file.read_text() != text:
        raise ValueError(
            f"attack: {folder} holds a run with other settings, {file}; choose another folder=, or remove it."
        )
    write_text(file, text)


if __name__ == "__main__":
    launch(program, "attack", "experiments.attack")
