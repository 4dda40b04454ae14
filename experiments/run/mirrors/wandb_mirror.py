"""The mirror of a run in Weights & Biases."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from experiments.run.metrics import read_rows
from experiments.run.mirrors.mirror import Mirror, imported

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from experiments.run.schema import Logger


class WandbMirror(Mirror):
    """Send what a run records to a wandb run, with our own step counter on every horizontal axis.

    Args:
        wandb: The module.
        run: The wandb run.
        until: The last step that the run has already: those behind a checkpoint are taken again and are the same.
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

    def curves(self, name: str, x: str, curves: Mapping[str, Mapping[int, float]]) -> None:
        """Log curves as one chart."""
        xs, ys = zip(*((list(curve), list(curve.values())) for curve in curves.values()), strict=True)
        chart = self._wandb.plot.line_series(xs, ys, keys=list(curves), title=name, xname=x)
        self._run.log({name: chart})

    def summarise(self, values: Mapping[str, Any]) -> None:
        """Write final results into the summary."""
        self._run.summary.update(dict(values))


@contextmanager
def opened(
    config: Logger, folder: Path, settings: Mapping[str, Any], resumed_at: int | None
) -> Iterator[Mirror]:
    """Open the mirror of a run.

    A run that goes on in its folder is the same wandb run, whose offline parts `wandb sync` uploads in order; in
    another it is a new one. Notes and config say where either continues.

    Raises:
        ValueError: wandb refuses what it is asked for.
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
