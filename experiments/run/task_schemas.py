"""The schemas of tasks and data sets: a key for each argument of their classes, with its type, default and sentence.

`conf/task/` holds what differs, and why.
"""

from __future__ import annotations

from typing import Any

from experiments.run.schema import Data, Task
from experiments.run.signatures import TYPES, schema_of

KINDS = {
    **TYPES,
    "Callable": Any,
    "Count": Any,
    "Dataset": Data,
    "Inputs": Any,
    "Range": list[float],
    "Sequence": Any,
}
"""Types of keys by the first word of an annotation; a `Count` is a number or a pair, `Inputs` columns of a table."""

TASKS: dict[str, type[Task]] = {
    name: schema_of(f"metagrad.tasks.{made}", Task, types=KINDS)
    for name, made in {
        "fewshot": "FewShot",
        "folder": "FewShot",
        "gaussian_process": "GaussianProcess",
        "harmonic": "Harmonic",
        "linear": "Linear",
        "sinusoid_or_line": "SinusoidOrLine",
        "step": "Step",
        "tabular": "Tabular",
    }.items()
}
"""Schemas by the name of the option of `task`."""

DATASETS: dict[str, type[Data]] = {"folders": schema_of("metagrad.tasks.ImageFolders", Data, types=KINDS)}
"""Schemas of what few-shot tasks are made of."""
