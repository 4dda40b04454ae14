"""The mirror of a run in TensorBoard: `tensorboard --logdir outputs`."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.image import imread

from experiments.run.mirrors.mirror import Mirror, imported

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from experiments.run.schema import Logger


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

    def curves(self, name: str, x: str, curves: Mapping[str, Mapping[int, float]]) -> None:
        """Log curves as scalars named `NAME/CURVE`."""
        for curve, values in curves.items():
            for i, value in values.items():
                self._writer.add_scalar(f"{name}/{curve}", value, i)

    def summarise(self, values: Mapping[str, Any]) -> None:
        """Log final results as text."""
        for name, value in values.items():
            self._writer.add_text(f"result/{name}", value if isinstance(value, str) else json.dumps(value))


@contextmanager
def opened(
    config: Logger, folder: Path, settings: Mapping[str, Any], resumed_at: int | None
) -> Iterator[Mirror]:
    """Open the mirror of a run, in its folder; of a continued one, TensorBoard hides the steps that are run again."""
    tensorboard = imported("torch.utils.tensorboard", "tensorboard")
    if tensorboard is None:
        yield Mirror()
        return
    purged = None if resumed_at is None else resumed_at + 1
    with tensorboard.SummaryWriter(str(folder / "tensorboard"), purge_step=purged) as writer:
        writer.add_text("config", f"```json\n{json.dumps(settings, indent=2, default=str)}\n```")
        yield TensorBoardMirror(writer)
