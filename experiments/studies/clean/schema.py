"""The schema of a cleaning: every key and its type. Values live in `conf/clean.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field

from experiments.run.config import check_least
from experiments.run.schema import key
from experiments.studies.study import StudyConfig
from metagrad.tasks.omniglot.splits import NUM_DRAWERS

METHODS = (
    "CG",
    "Neumann",
    "Nystrom",
    "T1-T2",
    "Unroll",
    "FiniteDifference",
    "reweight",
    "learned loss",
)
"""Ways of learning weights."""


@dataclass
class DataConfig:
    """What is classified."""

    alphabets: int = key("Alphabets of Omniglot's background set, the classes.")
    characters: int = key("Characters of each.")
    drawers: list[int] = key("Of 20, those who draw for training, validation and test.")
    wrong: float = key("The part of the training drawings that get another class.")
    whiten: bool = key("Whiten the features, which makes the Hessian closer to a multiple of the identity.")


@dataclass
class LoopConfig:
    """The two levels."""

    steps: int = key("Outer steps.")
    outer_lr: float = key("Their rate, by Adam, on the logits of the weights.")
    inner_steps: int = key("Inner steps for each, from where the last ones ended.")
    lr: float = key("Their rate, that of Neumann's series, of T1-T2 and of unrolled steps.")
    momentum: float = key("Their momentum.")
    penalty: float = key("On the squares of the parameters, at the inner level.")
    terms: int = key("Steps of CG, terms of the series, products of Nystrom, unrolled steps.")
    damping: float = key("Of Nystrom's approximation, which has a low rank.")


@dataclass
class ReweightConfig:
    """Learning to reweight: a weight of each example of a batch, of one step, never kept."""

    steps: int = key("Steps of gradient descent.")
    batch: int = key("Training examples of each.")
    lr: float = key("Their rate.")


@dataclass
class CleanConfig(StudyConfig):
    """A whole run."""

    methods: list[str] = key("Ways of learning weights; the references are always there.")
    penalties: list[float] = key("Where training on what is found has its penalty from; validation chooses.")
    points: int = key("How often on the way the accuracy is measured.")
    data: DataConfig = field(default_factory=DataConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    reweight: ReweightConfig = field(default_factory=ReweightConfig)


def check(config: CleanConfig) -> None:
    """Refuse numbers that are out of their range."""
    counts = {
        "data": ("alphabets", "characters"),
        "loop": ("steps", "inner_steps", "terms"),
        "reweight": ("steps", "batch"),
    }
    least = {
        f"{part}.{name}": (getattr(getattr(config, part), name), 1)
        for part in counts
        for name in counts[part]
    }
    check_least(
        "clean", {**least, "points": (config.points, 1), "data.alphabets": (config.data.alphabets, 2)}
    )
    data = config.data
    if len(data.drawers) != 3 or min(data.drawers) < 1 or sum(data.drawers) > NUM_DRAWERS:
        raise ValueError(
            f"clean: data.drawers must be three numbers of 1 or more, together {NUM_DRAWERS} at most, got "
            f"{list(data.drawers)}."
        )
    if not 0 < data.wrong < 1:
        raise ValueError(f"clean: data.wrong must be between 0 and 1, got {data.wrong}.")
    unknown = [name for name in config.methods if name not in METHODS]
    if unknown:
        raise ValueError(f"clean: methods has {unknown[0]!r}; expected some of {', '.join(METHODS)}.")
    if not config.penalties:
        raise ValueError("clean: penalties is empty; give at least one.")
