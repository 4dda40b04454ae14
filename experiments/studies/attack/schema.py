"""The schema of an attack: every key and its type. Values live in `conf/attack.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from experiments.run.config import check_least
from experiments.run.schema import key
from experiments.studies.study import StudyConfig


@dataclass
class SurrogateConfig:
    """The training that the attack differentiates through."""

    steps: int = key("Steps of gradient descent.")
    lr: float = key("Their rate.")
    momentum: float = key("Their momentum.")
    memory: Any = key("What the unroll keeps: full, sqrt, step, or a budget as 64MiB.")


@dataclass
class GCNConfig:
    """The network that is attacked."""

    hidden: int = key("Hidden units.")
    epochs: int = key("Steps of Adam on all training nodes.")
    lr: float = key("The rate of Adam.")
    dropout: float = key("Of words and hidden units.")
    weight_decay: float = key("Of all weights.")


@dataclass
class DefenceConfig:
    """Two defences: learned weights of edges, and no edges between papers that share too few words."""

    steps: int = key("Steps on the weights of edges.")
    lr: float = key("Their rate.")
    inner_steps: int = key("Training steps that are differentiated through for each.")
    inner_lr: float = key("Their rate.")
    jaccard: float = key("Edges whose papers have a Jaccard index below this are left out by the second.")


@dataclass
class AttackConfig(StudyConfig):
    """A whole run; each seed has a split of the nodes, and an attack of its own."""

    victims: int = key("Networks that are trained on each graph.")
    fraction: float = key("Edges that are flipped, as a part of those there are.")
    points: int = key("How often on the way the accuracy is measured.")
    block: int = key("Pairs that are no edges, and are candidates of a flip.")
    save_every: int = key("Flips from one checkpoint to the next.")
    surrogate: SurrogateConfig = field(default_factory=SurrogateConfig)
    gcn: GCNConfig = field(default_factory=GCNConfig)
    defence: DefenceConfig = field(default_factory=DefenceConfig)


def check(config: AttackConfig) -> None:
    """Refuse numbers that are out of their range."""
    names = ("victims", "points", "save_every")
    check_least("attack", {"block": (config.block, 2)} | {name: (getattr(config, name), 1) for name in names})
    if not 0 < config.fraction < 1:
        raise ValueError(f"attack: fraction must be between 0 and 1, got {config.fraction}.")
