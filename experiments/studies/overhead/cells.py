"""The cells of the grid: each is a request to a fresh process, and a file that is not measured again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.run.files import write_text
from experiments.run.processes import answered
from experiments.studies.overhead.methods import GRADIENT, META, PRODUCT, SECOND, WAYS, remedies
from experiments.studies.overhead.schema import OverheadConfig
from experiments.studies.overhead.work import Size
from experiments.studies.overhead.worker import Request

COMPILED = "compiled"
AXES = (
    (GRADIENT, ""),
    (SECOND, ""),
    (PRODUCT, ""),
    (PRODUCT, "forward over reverse"),
    (PRODUCT, "finite difference"),
    (META, ""),
    (META, "step"),
)
OVER_STEPS = ((GRADIENT, ""), (META, ""), (META, "step"), (META, "sqrt"))


class Cell(NamedTuple):
    """A model of a size with what is measured of it; `axis` is what differs from the base."""

    axis: str
    request: Request

    @property
    def name(self) -> str:
        """That of the file."""
        return "-".join([self.request.model, self.axis, *map(str, self.request.size)])


def cells(config: OverheadConfig, device: str) -> Iterator[Cell]:
    """Yield the bases first, so that a run that is interrupted has what matters most."""

    def request(
        model: str, size: Size, steps: list[int], methods: Any, rounds: int = config.rounds
    ) -> Request:
        return Request(model, size, tuple(steps), tuple(methods), rounds, config.seconds, config.seed, device)

    bases = {name: Size(*(values[0] for values in _axes(config, name).values())) for name in config.models}
    for name, base in bases.items():
        every = [(quantity, remedy) for quantity in WAYS for remedy in remedies(quantity, name)]
        chosen = [method for method in every if COMPILED not in method[1]]
        yield Cell("base", request(name, base, [config.inner_steps], chosen))
    for name, base in bases.items():
        yield Cell("steps", request(name, base, config.steps, OVER_STEPS, rounds=1))
    for name, base in bases.items():
        for axis, values in _axes(config, name).items():
            for value in values[1:]:
                size = base._replace(**{axis: value})
                yield Cell(axis, request(name, size, [config.inner_steps], AXES))
    for name in config.compiled:
        size = Size(*(values[0] for values in _axes(config, name).values()))
        size = size._replace(depth=min(config.sizes[name].depth))
        chosen = [(q, r) for q in (GRADIENT, SECOND, META) for r in WAYS[q] if not r or COMPILED in r]
        yield Cell(COMPILED, request(name, size, [config.inner_steps], chosen))


def _axes(config: OverheadConfig, model: str) -> dict[str, list[int]]:
    sizes = config.sizes[model]
    return {"depth": sizes.depth, "width": sizes.width, "batch": sizes.batch}


def measure(cell: Cell, config: OverheadConfig) -> str:
    """Measure a cell that is not there; return why it could not be, or nothing.

    Raises:
        ValueError: It is there, measured with other settings.
    """
    path, asked = _path(cell, config), json.loads(cell.request.to_json()) | {"threads": config.threads}
    if path.exists():
        if json.loads(path.read_text())["request"] != asked:
            raise ValueError(
                f"overhead: {path} was measured with other settings; choose another folder=, or remove it."
            )
        return ""
    with tempfile.TemporaryDirectory(prefix="metagrad-overhead-") as cache:
        found = answered(
            "experiments.studies.overhead.worker",
            cell.request.to_json(),
            threads=config.threads,
            limit=config.limit,
            environment={"TORCHINDUCTOR_CACHE_DIR": cache},
        )
    if "refused" in found:
        return found["refused"]
    write_text(
        path, json.dumps({"axis": cell.axis, "request": asked, "rows": found["rows"]}, indent=1) + "\n"
    )
    return ""


def read(cell: Cell, config: OverheadConfig) -> dict[str, Any]:
    """Return what was measured."""
    return json.loads(_path(cell, config).read_text())


def _path(cell: Cell, config: OverheadConfig) -> Path:
    return Path(config.folder) / "cells" / f"{cell.name}.json"
