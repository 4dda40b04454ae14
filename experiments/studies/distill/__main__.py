"""Distil a data set: `python -m experiments.studies.distill [seeds=[0]] [lengths=[100]] [KEY=VALUE ...]`.

Ten images a class are learned by the gradient of training on them, from an initialisation that is drawn anew for
each step; networks are then trained from fresh initialisations on these, on as many real drawings and on all. It is a
study (`study.py`): a cell for each set of images and seed, which keeps `images.pt`, and one for each
network whose meta-gradient is measured, in every memory mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from experiments.studies.distill.coresets import CORESETS
from experiments.studies.distill.cost import measure
from experiments.studies.distill.report import figure_of, report
from experiments.studies.distill.schema import DistillConfig, check
from experiments.studies.distill.sets import chosen, everything, learned
from experiments.studies.study import Cell, Result, Study, Work


def cells(config: DistillConfig) -> list[Cell]:
    """Return a cell for each set of images, and for each network whose meta-gradients are measured."""
    runs: dict[str, Callable[[Work], Result]] = {
        "all": partial(everything, config),
        **{name: partial(chosen, config, name) for name in CORESETS},
        **{f"learned_{steps}": partial(learned, config, steps) for steps in config.lengths},
        **{
            f"cost_{name}": partial(measure, config, name)
            for name, steps in config.cost.networks.items()
            if steps
        },
    }
    return [Cell(name, seed, run) for name, run in runs.items() for seed in config.seeds]


study = Study(
    "distill", DistillConfig, cells=cells, report=report, figures=figure_of, check=check, free=["lengths"]
)

if __name__ == "__main__":
    study.main()
