"""Meta-steps on tables of many rows: what they take, on synthetic ratings."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from experiments.run.allocations import peak_bytes
from experiments.run.seconds import cpu_seconds
from experiments.studies.coldstart.learner import TABLES, Recommender, learner, optimizers
from experiments.studies.coldstart.ratings import INPUTS
from metagrad.tasks import Batch, Examples

if TYPE_CHECKING:
    from experiments.studies.coldstart.schema import ColdStartConfig
    from experiments.studies.study import Result, Work

TRAITS = 32  # rows of their table, which tasks look up whole


def meta_step(config: ColdStartConfig, name: str, rows: int, is_sparse: bool, work: Work) -> Result:
    """Time and weigh the meta-gradient of a table of many rows, and apart from it a step of SparseAdam."""
    shape, settings = config.model, config.rows
    sizes = {"lecturer": rows, "course": 2 * rows, "traits": TRAITS}
    model = Recommender(sizes, settings.width, shape.hidden, shape.context, 3.0)
    maml = learner(
        name,
        model,
        steps=config.training.steps,
        lr=config.training.lr,
        sparse=TABLES if is_sparse else (),
    )
    generator = torch.Generator().manual_seed(work.seed)
    tables, _ = optimizers(maml, config.training.outer_lr)
    gradient, update = [], []
    for number in range(settings.repeats + 2):
        batch = synthetic(config, rows, generator)
        maml.zero_grad()
        spent = cpu_seconds(lambda batch=batch: maml(batch).loss.backward())
        stepped = cpu_seconds(tables.step) if is_sparse else 0.0
        if number > 1:  # what is found out once has been
            gradient.append(spent)
            update.append(stepped)
    maml.zero_grad()
    batch = synthetic(config, rows, generator)
    return {
        "rows": rows,
        "method": name,
        "sparse": is_sparse,
        "ms": 1000 * statistics.median(gradient),
        "peak_mib": peak_bytes(lambda: maml(batch).loss.backward()) / 2**20,
        "table_mib": sum(model.get_parameter(table).nbytes for table in TABLES) / 2**20,
        "update_ms": 1000 * statistics.median(update),
        "state_mib": nbytes(tables.state.values()) / 2**20,
    }


def synthetic(config: ColdStartConfig, rows: int, generator: torch.Generator) -> Batch:
    """Draw students who rate lecturers at random."""
    settings, shots = config.rows, config.shots[-1]
    shape = (settings.students, shots + config.queries)
    x = {name: torch.randint(TRAITS, shape, generator=generator) for name in INPUTS}
    x["lecturer"] = torch.randint(rows, shape, generator=generator)
    x["course"] = 2 * x["lecturer"] + x["course"] % 2
    y = torch.randint(1, 6, (*shape, 1), generator=generator).float()
    seen, judged = slice(None, shots), slice(shots, None)
    return Batch(*(Examples({k: v[:, part] for k, v in x.items()}, y[:, part]) for part in (seen, judged)))


def dense_mib(config: ColdStartConfig, name: str, rows: int) -> float:
    """Return about how much a meta-step of whole tables takes: MAML has those of each student at each inner step."""
    table = rows * (config.rows.width + 3) * 4 / 2**20
    copies = 2 * config.rows.students * (config.training.steps + 1) if name == "maml" else 3
    return copies * table


def nbytes(states: Iterable[dict]) -> int:
    """Return the bytes of the tensors in the state of an optimizer."""
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))
