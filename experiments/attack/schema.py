"""The schema of an attack: every key and its type. Values live in `conf/attack.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from experiments.config import check_least, converted, register
from experiments.schema import Logger, key

if TYPE_CHECKING:
    from omegaconf import DictConfig


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
class AttackConfig:
    """A whole run."""

    folder: str = key("Where everything is; the same command goes on there.")
    seeds: list[int] = key("Each has a split of the nodes, and an attack of its own.")
    victims: int = key("Networks that are trained on each graph.")
    threads: int | None = key("Threads of torch on the CPU; null is torch's choice.")
    fraction: float = key("Edges that are flipped, as a part of those there are.")
    points: int = key("How often on the way the accuracy is measured.")
    block: int = key("Pairs that are no edges, and are candidates of a flip.")
    save_every: int = key("Flips from one checkpoint to the next.")
    surrogate: SurrogateConfig = field(default_factory=SurrogateConfig)
    gcn: GCNConfig = field(default_factory=GCNConfig)
    defence: DefenceConfig = field(default_factory=DefenceConfig)
    logger: Logger = MISSING


def register_attack() -> None:
    """Store the schema where `conf/attack.yaml` finds it."""
    register()
    ConfigStore.instance().store(name="attack_schema", node=AttackConfig)


def typed(config: DictConfig) -> AttackConfig:
    """Resolve a composed config and return it as an `AttackConfig`.

    Raises:
        ValueError: A key was added that the schema does not have, or a number is out of its range.
    """
    resolved: AttackConfig = converted("attack", config)
    least = {
        "victims": (resolved.victims, 1),
        "points": (resolved.points, 1),
        "block": (resolved.block, 2),
        "save_every": (resolved.save_every, 1),
        "threads": (1 if resolved.threads is None else resolved.threads, 1),
    }
    check_least("attack", least)
    if not resolved.seeds:
        raise ValueError("attack: seeds is empty; give at least one, seeds=[0].")
    if not 0 < resolved.fraction < 1:
        raise ValueError(f"attack: fraction must be between 0 and 1, got {resolved.fraction}.")
    return resolved
