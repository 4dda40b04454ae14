"""What an order costs: `python -m experiments.studies.overhead [models=[mlp,graph]] [KEY=VALUE ...]`.

For five models (MLP, convolutions, transformer, a graph network on Cora, an embedding table), over depth, width,
batch and inner steps: the bytes and seconds of a gradient, of a second derivative by create_graph=True, of Hessian
products, of a Hessian and its trace, and of a meta-gradient, each by every remedy for its cost. Every cell of the
grid is measured in a fresh process, and once: the same command goes on where it ended. On a CPU bytes are those of
every storage that torch allocates and frees, and seconds those of the processor; on a GPU bytes are the allocator's.
In `folder`:

    cells/            what was measured, a file for each cell
    overhead.md       the tables
    overhead.csv      a row for everything; overhead.json likewise
    overhead.png      the cost of order 2, and what remedies buy in memory for what time
    listings.md       two listings that are often taught, beside ours
    provenance.json   commit, versions, platform, command line, seed
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

from experiments.run import provenance
from experiments.run.build import device
from experiments.run.config import plain
from experiments.run.files import write_text
from experiments.run.job import claimed, failures_reported, launch
from experiments.run.mirrors.opening import open_mirror
from experiments.run.plots.overhead import draw
from experiments.run.progress import Progress
from experiments.studies.overhead import listings
from experiments.studies.overhead.cells import Cell, cells, measure, read
from experiments.studies.overhead.report import report
from experiments.studies.overhead.rows import Row, as_csv, rows_of
from experiments.studies.overhead.schema import OverheadConfig, register_overhead, typed

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("experiments.studies.overhead")
register_overhead()


@hydra.main(config_path="../../../conf", config_name="overhead", version_base="1.3")
def program(config: DictConfig) -> None:
    """Run the cells that are missing, and write the tables."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with failures_reported(folder, log):
        run_job(typed(config), folder)


def run_job(config: OverheadConfig, folder: Path) -> None:
    """Measure what is missing, and report."""
    config.folder = str(folder)
    settings: dict[str, Any] = plain(config)  # type: ignore[reportArgumentType]
    with (
        claimed(folder, is_resumed=True),
        open_mirror(config.logger, folder, settings, resumed_at=None) as mirror,
    ):
        provenance.write(folder, seed=config.seed)
        write_text(folder / "listings.md", listings.text(config.seed))
        grid = list(cells(config, str(device(config))))  # type: ignore[reportArgumentType]
        rows, lost = measure_all(config, grid, folder)
        if not rows:
            raise ValueError(f"overhead: nothing was measured. {' '.join(lost)}")
        mirror.table("overhead", rows)
        mirror.images([draw(folder / "overhead.png", rows)])
    print((folder / "overhead.md").read_text())


def measure_all(config: OverheadConfig, grid: list[Cell], folder: Path) -> tuple[list[Row], list[str]]:
    """Return the rows of all cells, and why some have none; tables are written after each."""
    rows, lost = [], []
    with logging_redirect_tqdm(), Progress(grid, unit="cell") as bar:
        for cell in bar:
            bar.set_postfix_str(cell.name)
            reason = measure(cell, config)
            lost += [f"- {cell.name}: {reason}"] if reason else []
            rows += [] if reason else rows_of(read(cell, config))
            if rows:
                write_text(folder / "overhead.json", json.dumps(rows, indent=1) + "\n")
                write_text(folder / "overhead.csv", as_csv(rows))
                write_text(folder / "overhead.md", report(rows, lost))
    return rows, lost


if __name__ == "__main__":
    launch(program, "overhead", "experiments.studies.overhead")
