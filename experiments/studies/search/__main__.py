"""Search cells by gradients: `python -m experiments.studies.search [KEY=VALUE ...]`.

Cells of a small convolutional network for characters are found by differentiable architecture search (DARTS), with
one hypergradient after another, and by random search; what is found is trained from scratch. It is a study
(`study.py`) with a cell for each hypergradient and seed, one for the random search, and one for an
architecture made by hand, which has a 3 x 3 convolution on every edge.
"""

from __future__ import annotations

from functools import partial

import torch

from experiments.studies.search.darts import METHODS, Search
from experiments.studies.search.data import load
from experiments.studies.search.report import curves, report
from experiments.studies.search.schema import ArchitectureConfig, check
from experiments.studies.search.space import BY_HAND, Network
from experiments.studies.search.training import Trainer
from experiments.studies.study import Cell, Result, Study, Work


def cells(config: ArchitectureConfig) -> list[Cell]:
    """Return for each seed the random search, the architecture by hand, and a search by each hypergradient."""
    runs = {"random": drawn, "by_hand": by_hand}
    runs |= {name: partial(searched, method=name) for name in config.methods}
    return [Cell(name, seed, partial(run, config)) for seed in config.seeds for name, run in runs.items()]


def drawn(config: ArchitectureConfig, work: Work) -> Result:
    """Search at random."""
    data = load(config.data, work.seed)
    return trainer(config).random_search(data, config.drawn, config.repeats, work.seed)


def by_hand(config: ArchitectureConfig, work: Work) -> Result:
    """Train a cell of convolutions."""
    data = load(config.data, work.seed)
    return {"accuracy": trainer(config).repeated(BY_HAND, data, config.repeats, work.seed), "seconds": 0.0}


def searched(config: ArchitectureConfig, work: Work, *, method: str) -> Result:
    """Search by a hypergradient, and train what is found."""
    data = load(config.data, work.seed)
    torch.manual_seed(work.seed)  # every hypergradient begins at the same weights
    search = Search(Network(config.data.characters, config.channels), data, config.search, work.seed)
    found = search.run(METHODS[method](config.search), work.log)
    return {
        "accuracy": trainer(config).repeated(found["architecture"], data, config.repeats, work.seed),
        **found,
    }


def trainer(config: ArchitectureConfig) -> Trainer:
    """Return what trains architectures from scratch."""
    return Trainer(config.training, config.channels, config.data.characters)


study = Study(
    "search", ArchitectureConfig, cells=cells, report=report, figures=curves, check=check, free=["methods"]
)

if __name__ == "__main__":
    study.main()
