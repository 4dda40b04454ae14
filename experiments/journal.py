"""The journal of a run: what training computes, what it costs, and the mirror of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.metrics import JsonLines

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from experiments.mirrors.mirror import Mirror


class Journal:
    """Write metrics and costs of a run.

    `metrics.jsonl` is a function of configuration and seed alone: a run and its interrupted twin have the
    same bytes. Times and memory, which differ, go to `costs.jsonl`.

    Args:
        folder: The run folder.
        mirror: Where everything is shown as well.
        until: The step the run starts from.
    """

    def __init__(self, folder: Path, mirror: Mirror, *, until: int) -> None:
        self.folder, self.mirror = folder, mirror
        self._metrics = JsonLines(folder / "metrics.jsonl", until=until)
        self._costs = JsonLines(folder / "costs.jsonl", until=until)

    def write(self, step: int, metrics: Mapping[str, float], costs: Mapping[str, float]) -> None:
        """Write one step."""
        self._metrics.write(step, metrics)
        if costs:
            self._costs.write(step, costs)
        self.mirror.log(step, {**metrics, **costs})

    def sync(self) -> None:
        """Wait until the metrics are on the disk."""
        self._metrics.sync()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()
        self._costs.close()
