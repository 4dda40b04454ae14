"""The schema of a search: every key and its type. Values live in `conf/search.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field

from experiments.run.config import check_least
from experiments.run.schema import key
from experiments.studies.search.darts import METHODS, SearchConfig
from experiments.studies.search.data import NUM_CHARACTERS, DataConfig
from experiments.studies.search.training import TrainingConfig
from experiments.studies.study import StudyConfig
from metagrad.tasks.omniglot.splits import NUM_DRAWERS


@dataclass
class ArchitectureConfig(StudyConfig):
    """A whole run; each seed has characters of its own."""

    methods: list[str] = key(f"Hypergradients to search with: {', '.join(METHODS)}.")
    channels: int = key("Of a node of a cell; a multiple of 4.")
    drawn: int = key("Architectures of the random search.")
    repeats: int = key("Trainings of what a search has found; their mean is its accuracy.")
    data: DataConfig = field(default_factory=DataConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)


def check(config: ArchitectureConfig) -> None:
    """Refuse what cannot be.

    Raises:
        ValueError: A number is out of its range, or a method is not known.
    """
    data, search = config.data, config.search
    least = {
        "channels": (config.channels, 4),
        "drawn": (config.drawn, 1),
        "repeats": (config.repeats, 1),
        "data.characters": (data.characters, 2),
        "data.train": (data.train, 1),
        "data.validation": (data.validation, 1),
        "search.steps": (search.steps, 1),
        "search.inner_steps": (search.inner_steps, 1),
        "search.eigenvalue_every": (search.eigenvalue_every, 1),
        "search.products": (search.products, 1),
        "training.epochs": (config.training.epochs, 1),
    }
    check_least("search", least)
    if config.channels % 4:
        raise ValueError(
            f"search: channels must be a multiple of 4, for the group norms, got {config.channels}."
        )
    if data.characters > NUM_CHARACTERS:
        raise ValueError(f"search: data.characters must be at most {NUM_CHARACTERS}, got {data.characters}.")
    if not data.train + data.validation < NUM_DRAWERS:
        raise ValueError(
            f"search: data.train and data.validation must be below {NUM_DRAWERS} together, the drawings of a "
            f"character, got {data.train} and {data.validation}."
        )
    if unknown := [name for name in config.methods if name not in METHODS]:
        raise ValueError(f"search: methods must be among {', '.join(METHODS)}, got {', '.join(unknown)}.")
