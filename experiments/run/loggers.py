"""Mirrors of a run: the interface, CSV files, TensorBoard, and Weights & Biases."""

from __future__ import annotations

import csv
import functools
import importlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.image import imread

from experiments.run.files import write_text
from experiments.run.metrics import read_rows
from experiments.run.schema import LoggerName

if TYPE_CHECKING:
    from experiments.run.schema import Logger


log = logging.getLogger("experiments.run.mirrors")


class Mirror:
    """Receive the records of a run and ignore them."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the metrics of one step."""

    def images(self, files: Sequence[Path]) -> None:
        """Receive plots."""

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Receive a table: one mapping for each row, all with the same keys."""

    def summarise(self, values: Mapping[str, Any]) -> None:
        """Receive final results."""


def imported(module: str, package: str) -> Any:
    """Return a module. If its package is not installed, warn once and return None."""
    try:
        return importlib.import_module(module)
    except ImportError:
        _warn_that_it_is_missing(package)
        return None


@functools.cache
def _warn_that_it_is_missing(package: str) -> None:
    log.warning(
        "The package %s is not installed: metrics are in the run folder alone. Run `pip install %s`, or set "
        "logger=none to hear no more of it.",
        package,
        package,
    )


class CsvMirror(Mirror):
    """Write metrics to `metrics.csv` as rows of step, name and value, and each table to a CSV file of its name.

    Args:
        folder: The run folder.
        until: The last step that a resumed run already has. None for a new run.
    """

    def __init__(self, folder: Path, until: int | None) -> None:
        self._folder, path = folder, folder / "metrics.csv"
        lines = path.read_text().splitlines() if until is not None and path.exists() else []
        kept = [line for line in lines[1:] if int(line.partition(",")[0]) <= (until or 0)]
        write_text(path, "\n".join(["step,name,value", *kept, ""]))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of one step."""
        with (self._folder / "metrics.csv").open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([step, *pair] for pair in values.items())

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table."""
        with (self._folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


class TensorBoardMirror(Mirror):
    """Send metrics to a `SummaryWriter` as scalars, plots as images, tables and results as text."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of one step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def images(self, files: Sequence[Path]) -> None:
        """Log plots as images named `plots/NAME`."""
        for file in files:
            self._writer.add_image(f"plots/{file.stem}", np.asarray(imread(file)), dataformats="HWC")

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table as Markdown, which TensorBoard draws."""
        header = list(rows[0])
        lines = [header, ["---"] * len(header), *([str(row[column]) for column in header] for row in rows)]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines))

    def summarise(self, values: Mapping[str, Any]) -> None:
        """Log final results as text."""
        for name, value in values.items():
            self._writer.add_text(f"result/{name}", value if isinstance(value, str) else json.dumps(value))


@contextmanager
def opened_tensorboard(
    config: Logger, folder: Path, settings: Mapping[str, Any], resumed_at: int | None
) -> Iterator[Mirror]:
    """Open the mirror of a run in its folder. For a resumed run, TensorBoard hides the steps that run again."""
    tensorboard = imported("torch.utils.tensorboard", "tensorboard")
    if tensorboard is None:
        yield Mirror()
        return
    purged = None if resumed_at is None else resumed_at + 1
    with tensorboard.SummaryWriter(str(folder / "tensorboard"), purge_step=purged) as writer:
        writer.add_text("config", f"```json\n{json.dumps(settings, indent=2, default=str)}\n```")
        yield TensorBoardMirror(writer)


class WandbMirror(Mirror):
    """Send the records of a run to wandb, with the run's own step counter on every horizontal axis.

    Args:
        wandb: The module.
        run: The wandb run.
        until: The last step that the wandb run already has. Steps after a checkpoint run again and give the same
            values.
    """

    def __init__(self, wandb: Any, run: Any, until: int) -> None:
        self._wandb, self._run, self._until = wandb, run, until
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of one step."""
        if step > self._until:
            self._run.log({"step": step, **values})

    def images(self, files: Sequence[Path]) -> None:
        """Log plots as images named `plots/NAME`."""
        self._run.log({f"plots/{file.stem}": self._wandb.Image(str(file)) for file in files})

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table."""
        columns = list(rows[0])
        data = [[_cell(row[column]) for column in columns] for row in rows]
        self._run.log({name: self._wandb.Table(columns=columns, data=data)})

    def summarise(self, values: Mapping[str, Any]) -> None:
        """Write final results into the summary."""
        self._run.summary.update(dict(values))


@contextmanager
def opened_wandb(
    config: Logger, folder: Path, settings: Mapping[str, Any], resumed_at: int | None
) -> Iterator[Mirror]:
    """Open the mirror of a run.

    A run that is resumed in its folder is the same wandb run. `wandb sync` uploads its offline parts in order. In
    another folder it is a new wandb run. Notes and config hold the step of the checkpoint.

    Raises:
        ValueError: wandb does not accept the configuration.
    """
    wandb = imported("wandb", "wandb")
    if wandb is None:
        yield Mirror()
        return
    notes = (
        config.notes
        if resumed_at is None
        else f"{config.notes or ''} Continues at step {resumed_at}.".strip()
    )
    former = None if resumed_at is None else _run_in(folder)
    rows = [] if former is None else read_rows(folder / "metrics.jsonl")
    try:
        run = wandb.init(
            id=former,
            resume=former and "allow",
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            group=config.group,
            notes=notes,
            tags=config.tags,
            name="/".join(folder.parts[-2:]),
            dir=folder,
            settings=wandb.Settings(quiet=True),
            config={**settings, "resumed_at": resumed_at},
        )
    except (wandb.Error, ValueError) as error:
        reason = " ".join(str(error).partition(" [type=")[0].split())  # without pydantic's appendix
        raise ValueError(
            f"logger: wandb does not begin ({reason}). Set logger.mode=offline, or logger=none."
        ) from error
    # Not `with run`: its exit prints a traceback of whatever ended the run.
    try:
        yield WandbMirror(wandb, run, until=max((row["step"] for row in rows), default=-1))
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def _run_in(folder: Path) -> str | None:
    """Return the id of the latest wandb run of a folder, which is the end of a name such as `offline-run-TIME-ID`."""
    names = sorted(
        (path.name for path in folder.glob("wandb/*run-*-*")), key=lambda name: name.split("-")[-2]
    )
    return names[-1].rpartition("-")[2] if names else None


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float, str)) else str(value)


OPENED = {
    LoggerName.wandb: opened_wandb,
    LoggerName.tensorboard: opened_tensorboard,
    LoggerName.csv: lambda _, folder, __, resumed_at: nullcontext(CsvMirror(folder, resumed_at)),
    LoggerName.none: lambda *_: nullcontext(Mirror()),
}


def open_mirror(
    config: Logger, folder: Path, settings: Mapping[str, Any], *, resumed_at: int | None
) -> AbstractContextManager[Mirror]:
    """Open the mirror that the config names.

    Args:
        config: The logger, and the settings of wandb.
        folder: The run folder.
        settings: The configuration, as a mirror shows it.
        resumed_at: The step of the checkpoint of a resumed run. None for a new run.

    Raises:
        ValueError: wandb does not accept the configuration.
    """
    return OPENED[config.name](config, folder, settings, resumed_at)
