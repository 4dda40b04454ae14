"""A study: cells that are computed once, and a page and figures of their results.

A program of this form is a schema and three functions, which list the cells, write the page and draw the figures.
The same command resumes an interrupted study, since cells with a result do not run again. In the folder of the
study:

    NAME/SEED/result.json  the result of a cell, and its other files
    STUDY.md, *.png        the page and the figures, written again after every cell
    results.json           the results of all cells
    settings.json          the configuration
    provenance.json        commit, versions, platform, command line
    results.csv, or wandb/, or tensorboard/ by `logger=`
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING
from tqdm.contrib.logging import logging_redirect_tqdm

from experiments.run import provenance, result
from experiments.run.config import check_counts, converted, plain, register
from experiments.run.files import write_text
from experiments.run.help import CONF
from experiments.run.job import claimed, failures_reported, launch, seed_everything
from experiments.run.loggers import Mirror, open_mirror
from experiments.run.progress import Progress
from experiments.run.schema import Logger, key

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("experiments.studies.study")
FREE = ("folder", "seeds", "threads", "logger")
"""Keys that another run in the same folder may change."""

Result = dict[str, Any]
"""The result of a cell, as JSON. In a report it includes `cell` and `seed`."""


class Work(NamedTuple):
    """The arguments of a cell.

    Attributes:
        folder: The folder of the cell, for a checkpoint and other files.
        seed: The seed of the cell and of the global random states.
        log: Logs metrics by name at a step.
    """

    folder: Path
    seed: int
    log: Callable[[int, Mapping[str, float]], None]


class Cell(NamedTuple):
    """A part of a study that is run once.

    Attributes:
        name: The name of the cell. Cells with the same name and different seeds are repetitions.
        seed: The seed of its random numbers.
        run: Computes its result.
    """

    name: str
    seed: int
    run: Callable[[Work], Result]


@dataclass
class StudyConfig:
    """The configuration of every study."""

    folder: str = key("Where everything is; the same command goes on there.")
    seeds: list[int] = key("The repetitions of each cell.", least=0)
    threads: int | None = key("Threads of torch on the CPU; null is torch's choice.")
    logger: Logger = MISSING


C = TypeVar("C", bound=StudyConfig)


class Study(Generic[C]):
    """A program that computes cells.

    Args:
        name: The name of its config, `conf/NAME.yaml`, of its page, and the prefix of its errors.
        schema: The type of its config, a `StudyConfig` with more fields.
        cells: Returns the cells of a config, in the order in which they run.
        report: Returns the page about the available results, as Markdown.
        figures: Draws the available results into a folder, and returns the files.
        check: Raises `ValueError` for an invalid config.
        free: Further keys that another run in the same folder may change, such as keys that choose cells.
    """

    def __init__(
        self,
        name: str,
        schema: type[C],
        *,
        cells: Callable[[C], Sequence[Cell]],
        report: Callable[[list[Result], C], str],
        figures: Callable[[list[Result], C, Path], Sequence[Path]],
        check: Callable[[C], None] = lambda config: None,
        free: Sequence[str] = (),
    ) -> None:
        self.name, self.schema = name, schema
        self._cells, self._report, self._figures, self._check = cells, report, figures, check
        self._free = {*FREE, *free}
        register()
        ConfigStore.instance().store(name=f"{name}_schema", node=schema)

    def main(self) -> None:
        """Run the program as the command line says."""

        def program(config: DictConfig) -> None:
            folder = Path(HydraConfig.get().runtime.output_dir)
            with failures_reported(folder, log):
                print(self.run(self.typed(config), folder))

        run = hydra.main(config_path=str(CONF), config_name=self.name, version_base="1.3")(program)
        launch(run, self.name, f"experiments.studies.{self.name}")

    def typed(self, config: DictConfig) -> C:
        """Resolve a composed config and return it as an object of the schema.

        Raises:
            ValueError: A key is not in the schema, there is no seed, or `check` raises.
        """
        resolved: C = converted(self.name, config)
        if not resolved.seeds:
            raise ValueError(f"{self.name}: seeds is empty; give at least one, seeds=[0].")
        check_counts(self.name, resolved)
        self._check(resolved)
        return resolved

    def run(self, config: C, folder: Path) -> str:
        """Run the cells that are missing, and return the page."""
        settings: dict[str, Any] = plain(config)  # type: ignore[reportArgumentType]
        with (
            claimed(folder, is_resumed=True),
            open_mirror(config.logger, folder, settings, resumed_at=None) as mirror,
            logging_redirect_tqdm(),
        ):
            self._check_settings(folder, settings)
            provenance.write(folder, seed=config.seeds[0])
            text, results, files = "", [], []
            cells = Progress(self._cells(config), unit="cell")
            for cell in cells:
                cells.set_postfix_str(f"{cell.name} {cell.seed}".strip())
                results.append(_result(cell, folder, config.threads, mirror))
                text, files = self._write(results, config, folder)
            mirror.table("results", _table(results))
            mirror.images(files)
        return text

    def _write(self, results: list[Result], config: C, folder: Path) -> tuple[str, Sequence[Path]]:
        text = self._report(results, config)
        write_text(folder / f"{self.name}.md", text)
        write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
        return text, self._figures(results, config, folder)

    def _check_settings(self, folder: Path, settings: dict[str, Any]) -> None:
        """Write the configuration, or compare it with the configuration in the folder."""
        fixed = {name: value for name, value in settings.items() if name not in self._free}
        file, text = folder / "settings.json", json.dumps(fixed, indent=2) + "\n"
        if file.exists() and file.read_text() != text:
            raise ValueError(
                f"{self.name}: {folder} holds a run with other settings, {file}; choose another folder=, or remove "
                "it."
            )
        write_text(file, text)


def by_cell(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the results by cell name, in their order."""
    found: dict[str, list[Result]] = {}
    for one in results:
        found.setdefault(one["cell"], []).append(one)
    return found


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean and the standard deviation of repetitions as text, or the value of a single repetition."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def _result(cell: Cell, folder: Path, threads: int | None, mirror: Mirror) -> Result:
    """Return the result of a cell. It is computed if it does not exist."""
    own = folder / cell.name / str(cell.seed)
    file, prefix = own / result.FILE, f"{cell.name}/{cell.seed}".lstrip("/")
    if not file.exists():
        own.mkdir(parents=True, exist_ok=True)
        seed_everything(cell.seed, threads)

        def mirrored(step: int, values: Mapping[str, float]) -> None:
            mirror.log(step, {f"{prefix}/{name}": value for name, value in values.items()})

        found = cell.run(Work(own, cell.seed, mirrored))
        write_text(file, json.dumps({"cell": cell.name, "seed": cell.seed, **found}, indent=1) + "\n")
    return json.loads(file.read_text())


def _table(results: list[Result]) -> list[dict[str, Any]]:
    """Return the numbers and strings of the results, as rows with the same keys."""
    names = dict.fromkeys(
        name for one in results for name, value in one.items() if isinstance(value, (str, int, float))
    )
    return [{name: one.get(name) for name in names} for one in results]
