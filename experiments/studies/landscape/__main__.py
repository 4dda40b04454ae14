"""The loss landscape along training: `python -m experiments.studies.landscape [only=[gd,adam]] [KEY=VALUE ...]`.

One network learns characters of Omniglot from all examples at once, by gradient descent, Adam, SOAP and K-FAC, by
sharpness-aware minimization and with a penalty on the trace of the Hessian. Along each run are measured the largest
eigenvalue of the Hessian and of the preconditioned Hessian, against the edge of stability, and traces, eigenvalues
and spectral densities. The same command goes on where it ended; `experiments.studies.study` says what is in `folder`.
"""

from __future__ import annotations

from functools import partial

from experiments.run.plots.landscape import figures
from experiments.studies.landscape.report import report
from experiments.studies.landscape.run import train
from experiments.studies.landscape.schema import LandscapeConfig, check
from experiments.studies.study import Cell, Study


def cells(config: LandscapeConfig) -> list[Cell]:
    """Return every run with every seed; all runs of a seed before the next."""
    chosen = {name: run for name, run in config.runs.items() if name in (config.only or config.runs)}
    return [
        Cell(name, seed, partial(train, config, run)) for seed in config.seeds for name, run in chosen.items()
    ]


study = Study(
    "landscape", LandscapeConfig, cells=cells, report=report, figures=figures, check=check, free=["only"]
)

if __name__ == "__main__":
    study.main()
