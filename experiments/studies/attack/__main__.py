"""Poison a citation graph: `python -m experiments.studies.attack [seeds=[0]] [fraction=0.05] [KEY=VALUE ...]`.

Edges of Cora are flipped by Metattack, the gradient of training through a sparse adjacency matrix, and as many are
added at random; a graph convolutional network is trained on each graph, and defended. It is a study
(`study.py`) with a cell for each seed, which also keeps `flips.jsonl`, the pairs that were flipped with
the seconds of each, and `last.pt`, where the attack is.
"""

from __future__ import annotations

from functools import partial

from experiments.studies.attack.report import curves, report
from experiments.studies.attack.run import attack
from experiments.studies.attack.schema import AttackConfig, check
from experiments.studies.study import Cell, Study


def cells(config: AttackConfig) -> list[Cell]:
    """Return an attack for each seed."""
    return [Cell("cora", seed, partial(attack, config)) for seed in config.seeds]


study = Study(
    "attack", AttackConfig, cells=cells, report=report, figures=curves, check=check, free=["save_every"]
)

if __name__ == "__main__":
    study.main()
