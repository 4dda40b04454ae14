"""The schema of a distillation: every key and its type. Values live in `conf/distill.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from experiments.run.config import check_least
from experiments.run.schema import key
from experiments.studies.distill.networks import NETWORKS
from experiments.studies.study import StudyConfig
from metagrad.tasks.omniglot.splits import NUM_DRAWERS


@dataclass
class LearnConfig:
    """How images are learned."""

    steps: int = key("Outer steps, each with a meta-gradient.")
    lr: float = key(
        "The rate of Adam on images and on the logarithm of the inner rate; it falls to zero by a cosine."
    )
    batch: int = key("Real drawings that the outer loss is measured on.")
    inner_time: float = key("The inner rate that learning begins with, times the inner steps.")
    watch_every: int = key("Outer steps from one look at the accuracy on validation drawings to the next.")
    memory: Any = key("What the unroll keeps: full, sqrt, step, or a budget as 64MiB.")


@dataclass
class JudgeConfig:
    """How networks are trained on a set of images, to judge it."""

    steps: int = key("Steps on a small set; on learned images also as many as they were learned through.")
    rates: list[float] = key(
        "Rates, of which the validation drawings choose; for learned images also their own."
    )
    trials: int = key("Networks that are tested for each set and seed, each from a fresh initialisation.")
    networks: list[str] = key("Networks; the first is the one that images are learned for.")
    epochs: int = key("Passes over all drawings, by Adam on batches of 128.")


@dataclass
class CostConfig:
    """Whose meta-gradients are measured."""

    networks: dict[str, list[int]] = key("The inner steps, for each network.")
    memories: list[str] = key("What the unroll keeps.")


@dataclass
class DistillConfig(StudyConfig):
    """A whole run; a seed draws the real images that everything begins with, and all networks."""

    classes: int = key("Alphabets, those with most characters.")
    per_class: int = key("Images of each in a small set.")
    drawers: list[int] = key("Drawers of each character for training, validation and test; there are 20.")
    momentum: float = key("Of gradient descent on a small set.")
    lengths: list[int] = key("Inner steps that images are learned through; each has a set of its own.")
    learn: LearnConfig = field(default_factory=LearnConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    cost: CostConfig = field(default_factory=CostConfig)


def check(config: DistillConfig) -> None:
    """Refuse numbers that are out of their range, and networks that are not there."""
    counts = {"classes": (config.classes, 2), "per_class": (config.per_class, 1)}
    counts |= {"learn.steps": (config.learn.steps, 1), "judge.trials": (config.judge.trials, 1)}
    counts |= {"learn.watch_every": (config.learn.watch_every, 1)}
    counts |= {"lengths": (min(config.lengths, default=1), 1)}
    check_least("distill", counts)
    if len(config.drawers) != 3 or min(config.drawers) < 1 or sum(config.drawers) > NUM_DRAWERS:
        raise ValueError(
            f"distill: drawers must be three numbers of 1 or more, {NUM_DRAWERS} together at most, got "
            f"{config.drawers}."
        )
    for name in (*config.judge.networks, *config.cost.networks):
        if name not in NETWORKS:
            raise ValueError(f"distill: networks are {', '.join(NETWORKS)}, got {name!r}.")
    if not config.judge.networks or not config.judge.rates:
        raise ValueError("distill: judge.networks and judge.rates must not be empty.")
