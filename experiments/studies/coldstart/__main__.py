"""Recommend to students of few known ratings: `python -m experiments.studies.coldstart [KEY=VALUE ...]`.

MAML, ANIL and CAVIA learn one network from InstEval's students, and are judged on others by how many of their ratings
are seen, beside biases, matrix factorization and a network that is fine-tuned. Then their meta-steps are timed and
weighed on tables of up to ten million rows. It is a study (`study.py`) with a cell for each method, size
and seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from experiments.studies.coldstart.report import figures, report
from experiments.studies.coldstart.run import factorization, fine_tuning, meta_learning, user_and_item
from experiments.studies.coldstart.schema import ColdStartConfig, check
from experiments.studies.coldstart.steps import dense_mib, meta_step
from experiments.studies.study import Cell, Study

LEARNERS = ("maml", "anil", "cavia")


def cells(config: ColdStartConfig) -> list[Cell]:
    """Return every method and every size, for each seed."""
    runs = {
        "biases": partial(user_and_item, config),
        "factors": partial(factorization, config),
        "fine-tuned": partial(fine_tuning, config),
        **{name: partial(meta_learning, config, name) for name in LEARNERS},
        **dict(sizes(config)),
    }
    return [Cell(name, seed, run) for name, run in runs.items() for seed in config.seeds]


def sizes(config: ColdStartConfig) -> Iterator[tuple[str, partial]]:
    """List the meta-steps that are timed: with rows at every size, with whole tables where they fit."""
    for name in LEARNERS:
        for rows in config.rows.sizes:
            yield f"rows/{name}/{rows}", partial(meta_step, config, name, rows, True)
        for rows in config.rows.dense_sizes:
            if dense_mib(config, name, rows) <= config.rows.dense_mib:
                yield f"dense/{name}/{rows}", partial(meta_step, config, name, rows, False)


study = Study("coldstart", ColdStartConfig, cells=cells, report=report, figures=figures, check=check)

if __name__ == "__main__":
    study.main()
