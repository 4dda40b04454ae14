"""Attack images and defend them: `python -m experiments.studies.attack_images [KEY=VALUE ...]`.

Networks learn characters of Omniglot, each with a defence that penalises derivatives of the loss in the image, by
adversarial training, or plainly; first-order attacks and Newton's method look for adversarial examples in a box
around each test image. It is a study (`study.py`) with a cell for each defence and seed.
"""

from __future__ import annotations

from functools import partial

from experiments.studies.attack_images.report import figures, report
from experiments.studies.attack_images.run import cell
from experiments.studies.attack_images.schema import CALL, ImagesConfig, check
from experiments.studies.study import Cell, Study


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
)

if __name__ == "__main__":
    study.main()
