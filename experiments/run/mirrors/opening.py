"""Opening the mirror that a configuration asks for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from experiments.run.mirrors import csv_mirror, tensorboard_mirror, wandb_mirror
from experiments.run.mirrors.mirror import Mirror
from experiments.run.schema import LoggerName

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from experiments.run.schema import Logger

OPENED = {
    LoggerName.wandb: wandb_mirror.opened,
    LoggerName.tensorboard: tensorboard_mirror.opened,
    LoggerName.csv: csv_mirror.opened,
    LoggerName.none: lambda *_: nullcontext(Mirror()),
}


def open_mirror(
    config: Logger, folder: Path, settings: Mapping[str, Any], *, resumed_at: int | None
) -> AbstractContextManager[Mirror]:
    """Open the mirror that the config asks for.

    Args:
        config: Which, and what wandb is told of the run.
        folder: Of the run.
        settings: The configuration, as a mirror shows it.
        resumed_at: The step that a continued run starts from; None of a new one.

    Raises:
        ValueError: wandb refuses what it is asked for.
    """
    return OPENED[config.name](config, folder, settings, resumed_at)
