"""The schema of `experiments.studies.overhead`: every key and its type. Values live in `conf/overhead.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from experiments.run.config import check_keys, check_least, converted, register
from experiments.run.schema import Device, Logger, key
from experiments.studies.overhead.models import MODELS

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass
class Sizes:
    """Those of a model; of each axis the first is that of the base, and the others are taken one at a time."""

    depth: list[int] = key("Layers.")
    width: list[int] = key("Features of a layer, columns of a table.")
    batch: list[int] = key("Examples, nodes of a graph, lookups in a table.")


@dataclass
class OverheadConfig:
    """What is measured."""

    folder: str = key("Where cells, tables and the figure are; cells that are there are not measured again.")
    seed: int = key("Of weights and data.")
    device: Device = key("auto (CUDA where there is one), cpu or cuda.")
    threads: int = key("Threads of torch on the CPU.")
    models: list[str] = key("Which of mlp, convnet, transformer, graph and table.")
    sizes: dict[str, Sizes] = field(
        default_factory=dict, metadata={"help": "Depths, widths and batches of each model."}
    )
    steps: list[int] = key("Numbers of inner steps.")
    inner_steps: int = key("Inner steps where remedies are compared.")
    compiled: list[str] = key("Models of which compiled functions are measured, at the least depth.")
    rounds: int = key("How often everything is timed, in turns.")
    seconds: float = key("Of a method in a round; one call at least.")
    limit: float = key("Seconds after which a cell is given up.")
    logger: Logger = MISSING


def register_overhead() -> None:
    """Store the schema where `conf/overhead.yaml` finds it."""
    register()
    ConfigStore.instance().store(name="overhead_schema", node=OverheadConfig)


def typed(config: DictConfig) -> OverheadConfig:
    """Resolve a composed config and return it as an `OverheadConfig`.

    Raises:
        ValueError: A key was added that the schema does not have, a model is unknown or has no sizes, or a number is
            out of its range.
    """
    resolved = converted("overhead", config)
    for name in (*resolved.models, *resolved.compiled):
        if name not in MODELS or name not in resolved.sizes:
            raise ValueError(f"overhead: models must be some of {', '.join(MODELS)}, with sizes, got {name}.")
    for name, sizes in resolved.sizes.items():
        check_keys("overhead", sizes, f"sizes.{name}.")
    check_least("overhead", _counts(resolved))
    return resolved


def _counts(config: OverheadConfig) -> dict[str, tuple[int, int]]:
    sizes = {
        f"sizes.{name}.{axis}": (min(values, default=0), 1)
        for name in config.models
        for axis, values in vars(config.sizes[name]).items()
    }
    return sizes | {
        "seed": (config.seed, 0),
        "threads": (config.threads, 1),
        "steps": (min(config.steps, default=0), 1),
        "inner_steps": (config.inner_steps, 1),
        "rounds": (config.rounds, 1),
    }
