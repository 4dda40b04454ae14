"""The journal of a run: metrics, costs, and their mirror."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from experiments.run import checkpoint
from experiments.run.files import write_text
from experiments.run.loggers import Mirror
from experiments.run.metrics import JsonLines, read_rows

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    import metagrad as mg
    from experiments.run.build import Parts


MEMORY = "memory.txt"


class Silent:
    """The journal of all processes of a run except the first, which receives the records and writes nothing."""

    mirror = Mirror()

    def write(self, step: int, metrics: Mapping[str, float], costs: Mapping[str, float]) -> None:
        """Receive one step."""

    def memory(self, tracker: mg.MemoryTracker) -> None:
        """Receive the memory of the first steps."""

    def save(self, parts: Parts, **state: Any) -> None:
        """Receive a state to resume from."""

    def rows(self) -> list[dict[str, Any]]:
        """Return no metrics, since none are written."""
        return []


class Journal(Silent):
    """Write metrics and costs of a run.

    `metrics.jsonl` depends only on configuration and seed, so an interrupted and resumed run has the same bytes.
    Times and memory differ between runs and are in `costs.jsonl`.

    Args:
        folder: The run folder.
        mirror: The mirror, which receives the same values.
        until: Initial step of the run.
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

    def memory(self, tracker: mg.MemoryTracker) -> None:
        """Write the memory of the first steps."""
        write_text(self.folder / MEMORY, f"{tracker.table()}\n\n{tracker.summary()}\n")
        rows = [record.as_dict() for record in tracker.records()]
        write_text(
            (self.folder / MEMORY).with_suffix(".jsonl"), "".join(json.dumps(row) + "\n" for row in rows)
        )
        if rows:
            self.mirror.table("memory", rows)

    def save(self, parts: Parts, **state: Any) -> None:
        """Write a checkpoint, after the metrics before it are on the disk."""
        self._metrics.sync()
        checkpoint.save(self.folder / checkpoint.FILE, parts, **state)

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics to write."""
        return read_rows(self.folder / "metrics.jsonl")

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()
        self._costs.close()
