"""The mirror of a run in Weights & Biases. The run folder is the record: losing the mirror loses nothing."""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from experiments.schema import LoggerName

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from experiments.schema import Logger


log = logging.getLogger("experiments.mirror")


class Mirror:
    """Receive what a run records, and do nothing with it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the metrics of one step."""

    def images(self, files: Sequence[Path]) -> None:
        """Receive plots."""

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Receive a table, one mapping a row, all with the same keys."""

    def summarise(self, values: Mapping[str, Any]) -> None:
        """Receive final results."""


class WandbMirror(Mirror):
    """Send what a run records to a wandb run, with our own step counter on every horizontal axis."""

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of one step."""
        self._run.log({"step": step, **values})

    def images(self, files: Sequence[Path]) -> None:
        """Log plots as images named `plots/NAME`."""
        import wandb

        self._run.log({f"plots/{file.stem}": wandb.Image(str(file)) for file in files})

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table."""
        import wandb

        columns: list[Any] = list(rows[0])
        self._run.log(
            {name: wandb.Table(columns=columns, data=[[_cell(row[c]) for c in columns] for row in rows])}
        )

    def summarise(self, values: Mapping[str, Any]) -> None:
        """Write final results into the summary."""
        self._run.summary.update(dict(values))


@contextmanager
def open_mirror(
    config: Logger, folder: Path, settings: Mapping[str, Any], *, resumed_at: int | None
) -> Iterator[Mirror]:
    """Open the mirror that the config asks for.

    An offline wandb run cannot be resumed: a continued run is a new one that says so in its notes and config.

    Raises:
        ValueError: wandb refuses what it is asked for.
    """
    if config.name is LoggerName.none:
        yield Mirror()
        return
    wandb = _imported()
    if wandb is None:
        yield Mirror()
        return
    notes = (
        config.notes
        if resumed_at is None
        else f"{config.notes or ''} Continues at step {resumed_at}.".strip()
    )
    try:
        run = wandb.init(
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
        raise ValueError(
            f"logger: wandb does not begin ({str(error).splitlines()[0]}). Set logger.mode=offline, or logger=none."
        ) from error
    # Not `with run`: its exit prints a traceback of whatever ended the run.
    try:
        yield WandbMirror(run)
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def _imported() -> Any:
    """Return the package wandb; None, with one warning, where it is not installed."""
    try:
        import wandb
    except ImportError:
        _warn_that_it_is_missing()
        return None
    return wandb


@functools.cache
def _warn_that_it_is_missing() -> None:
    log.warning(
        "The package wandb is not installed: metrics are in the run folder alone. Run `pip install wandb`, or set "
        "logger=none to hear no more of it."
    )


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float, str)) else str(value)
