"""Attack images and defend them: `python -m experiments.attack.images [seeds=[0]] [defences=[cure]] [KEY=VALUE ...]`.

Networks learn characters of Omniglot, each with a defence that penalises derivatives of the loss in the image, by
adversarial training, or plainly; first-order attacks and Newton's method look for adversarial examples in a box
around each test image. It is a study (`experiments/study.py`) with a cell for each defence and seed.
"""

from __future__ import annotations

from functools import partial

from experiments.attack.images.report import figures, report
from experiments.attack.images.run import cell
from experiments.attack.images.schema import CALL, ImagesConfig, check
from experiments.study import Cell, Study


def cells(config: ImagesConfig) -> list[Cell]:
    """Return a network for each defence and seed."""
    return [
        Cell(name, seed, partial(cell, config, name)) for seed in config.seeds for name in config.defences
    ]


study = Study(
    CALL,
    ImagesConfig,
    cells=cells,
    report=report,
    figures=figures,
    check=check,
    free=["defences"],
    module="experiments.attack.images",
)

if __name__ == "__main__":
    study.main()
