"""What a mirror receives, and the mirror that shows nothing."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

log = logging.getLogger("experiments.run.mirrors")


class Mirror:
    """Receive what a run records, and do nothing with it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the metrics of one step."""

    def images(self, files: Sequence[Path]) -> None:
        """Receive plots."""

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Receive a table, one mapping a row, all with the same keys."""

    def curves(self, name: str, x: str, curves: Mapping[str, Mapping[int, float]]) -> None:
        """Receive curves of one figure, each a mapping of `x` to values, by their names."""

    def summarise(self, values: Mapping[str, Any]) -> None:
        """Receive final results."""


def imported(module: str, package: str) -> Any:
    """Return a module; None, with one warning, where the package that has it is not installed."""
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
