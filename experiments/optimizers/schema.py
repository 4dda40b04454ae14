"""The schema of a comparison: every key and its type. Values live in `conf/optimizers.yaml`, `conf/workload/`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from experiments.config import check_keys, check_least, register
from experiments.schema import MLP, Conv4, Device, Logger, Model, Optimizer

if TYPE_CHECKING:
    from collections.abc import Collection

    from omegaconf import DictConfig

NUM_DRAWINGS = 20


@dataclass
class Characters:
    """The drawings of Omniglot's first `count` background characters, the last `held_out` of each for the test."""

    root: str | None = MISSING
    count: int = MISSING
    held_out: int = MISSING
    resize: str = MISSING
    download: bool = MISSING


@dataclass
class Workload:
    """What is trained; the gradient of `batch_size` examples is the unit of cost, `budget` many are spent."""

    name: str = MISSING
    batch_size: int = MISSING
    budget: float = MISSING
    judged: int = MISSING
    data: Characters = field(default_factory=Characters)


@dataclass
class AutoencoderModel(Model):
    """A deep autoencoder; `sizes` runs from the input to the code."""

    sizes: list[int] = MISSING


@dataclass
class Reconstruction(Workload):
    """An autoencoder of drawings."""

    model: AutoencoderModel = field(default_factory=AutoencoderModel)


@dataclass
class MLPClassification(Workload):
    """A classifier of drawings as vectors."""

    model: MLP = field(default_factory=MLP)


@dataclass
class ConvClassification(Workload):
    """A convolutional classifier of drawings."""

    model: Conv4 = field(default_factory=Conv4)


WORKLOADS: dict[str, type[Workload]] = {
    "autoencoder": Reconstruction,
    "classifier": MLPClassification,
    "conv4": ConvClassification,
}


@dataclass
class OptimizersConfig:
    """A whole run."""

    seed: int = MISSING
    device: Device = MISSING
    threads: int | None = MISSING
    budget: float = MISSING
    evaluations: int = MISSING
    workload: Workload = MISSING
    optimizer: Optimizer = MISSING
    logger: Logger = MISSING


def register_optimizers() -> None:
    """Store the schemas where `conf/optimizers.yaml` finds them."""
    register()
    store = ConfigStore.instance()
    store.store(name="optimizers_schema", node=OptimizersConfig)
    for name, node in WORKLOADS.items():
        store.store(group="schema/workload", name=name, node=node, package="workload")


def typed(config: DictConfig, overrides: Collection[str] = ()) -> OptimizersConfig:
    """Resolve a composed config and return it as an `OptimizersConfig`, its optimizer tuned for its workload.

    Args:
        config: As Hydra composes it.
        overrides: What the command line says, as `KEY=VALUE`; that of `optimizer.*` wins over what was tuned.

    Raises:
        ValueError: A key was added that the schema does not have, or a number is out of its range.
    """
    resolved: Any = OmegaConf.to_object(_tuned(config, overrides))
    check_keys("optimizers", resolved)
    check_least("optimizers", _counts(resolved))
    held_out = resolved.workload.data.held_out
    if not held_out < NUM_DRAWINGS:
        raise ValueError(
            f"optimizers: workload.data.held_out must be below {NUM_DRAWINGS}, the drawings of a character, got "
            f"{held_out}."
        )
    if not resolved.budget > 0:
        raise ValueError(f"optimizers: budget must be above 0 gradient-equivalents, got {resolved.budget}.")
    return resolved


def _tuned(config: DictConfig, overrides: Collection[str]) -> DictConfig:
    """Put what was tuned for the workload in the place of the optimizer's own values, unless these were given."""
    keys = [override.lstrip("+~").partition("=")[0].split(".") for override in overrides]
    given = {key[1] for key in keys if key[0] == "optimizer" and len(key) > 1}
    tuned = config.optimizer.tuned.get(config.workload.name) or {}
    chosen = {name: value for name, value in tuned.items() if name not in given}
    return OmegaConf.merge(config, {"optimizer": chosen})  # type: ignore[reportReturnType]


def _counts(config: OptimizersConfig) -> dict[str, tuple[int, int]]:
    workload, batch_size = config.workload, config.optimizer.batch_size
    return {
        "seed": (config.seed, 0),
        "threads": (1 if config.threads is None else config.threads, 1),
        "evaluations": (config.evaluations, 1),
        "workload.batch_size": (workload.batch_size, 1),
        "workload.judged": (workload.judged, 1),
        "workload.data.count": (workload.data.count, 1),
        "workload.data.held_out": (workload.data.held_out, 1),
        "optimizer.batch_size": (1 if batch_size is None else batch_size, 1),
    }
