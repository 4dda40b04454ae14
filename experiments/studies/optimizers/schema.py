"""The schema of a comparison: every key and its type. Values live in `conf/optimizers.yaml`, `conf/workload/`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from experiments.run.config import SCHEMAS, check_least, converted, register
from experiments.run.schema import MLP, Conv4, Device, Logger, Model, Optimizer, key
from metagrad.tasks.omniglot.splits import NUM_DRAWERS

if TYPE_CHECKING:
    from collections.abc import Collection

    from omegaconf import DictConfig


@dataclass
class Characters:
    """The drawings of Omniglot's first `count` background characters, the last `held_out` of each for the test."""

    root: str | None = key("The folder of Omniglot; null is METAGRAD_DATA, then metagrad's cache folder.")
    count: int = key("How many characters.")
    held_out: int = key("Drawings of each character that are for the test; there are 20.")
    resize: str = key("area, bilinear or nearest.")
    download: bool = key("Fetch the official archives if they are not there.")


@dataclass
class Workload:
    """What is trained; the gradient of `batch_size` examples is the unit of cost, `budget` many are spent."""

    name: str = key("What tuned settings are looked up by.")
    batch_size: int = key("Examples whose gradient is the unit of cost.")
    budget: float = key("Gradient-equivalents that are spent.")


@dataclass
class OfDrawings(Workload):
    """A workload whose examples are drawings."""

    judged: int = key("Training examples that the loss is measured on.")
    data: Characters = field(default_factory=Characters)
    penalty: float = key("The loss contains so much of half the sum of squared parameters.", 0.0)


@dataclass
class AutoencoderModel(Model):
    """A deep autoencoder; `sizes` runs from the input to the code."""

    sizes: list[int] = MISSING


@dataclass
class Reconstruction(OfDrawings):
    """An autoencoder of drawings."""

    model: AutoencoderModel = field(default_factory=AutoencoderModel)


@dataclass
class MLPClassification(OfDrawings):
    """A classifier of drawings as vectors."""

    model: MLP = field(default_factory=MLP)


@dataclass
class ConvClassification(OfDrawings):
    """A convolutional classifier of drawings."""

    model: Conv4 = field(default_factory=Conv4)


@dataclass
class TransformerClassification(OfDrawings):
    """A classifier of drawings that are cut into patches."""

    model: Model = field(default_factory=SCHEMAS["model"]["transformer"])


@dataclass
class Physics(Workload):
    """A physics-informed network that solves Poisson's equation in the unit square."""

    points: int = key("Collocation points: the square of it inside, and four times as many on the boundary.")
    model: MLP = field(default_factory=MLP)


WORKLOADS: dict[str, type[Workload]] = {
    "autoencoder": Reconstruction,
    "classifier": MLPClassification,
    "conv4": ConvClassification,
    "logistic": MLPClassification,
    "pinn": Physics,
    "transformer": TransformerClassification,
}


@dataclass
class OptimizersConfig:
    """A whole run."""

    seed: int = key("Of all random numbers.")
    device: Device = key("auto (CUDA where there is one), cpu or cuda.")
    threads: int | None = key("Threads of torch on the CPU; null is torch's choice.")
    budget: float = key("Gradient-equivalents that are spent; by default the workload's.")
    evaluations: int = key("How often the losses are measured, evenly in gradient-equivalents.")
    batch_size: int | None = key("Examples of a step; null is what was tuned, else workload.batch_size.")
    allow: list[str] = key(
        "Packages whose classes may be a `_target_`, beside metagrad's and torch's: [mypackage.]."
    )
    workload: Workload = MISSING
    optimizer: Optimizer = MISSING
    logger: Logger = MISSING
    tuned: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "By workload, the settings of the optimizer that were found best."},
    )


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
    resolved = converted("optimizers", _tuned(config, overrides))
    check_least("optimizers", _counts(resolved))
    _check_data(resolved.workload)
    if not resolved.budget > 0:
        raise ValueError(f"optimizers: budget must be above 0 gradient-equivalents, got {resolved.budget}.")
    return resolved


def _check_data(workload: Workload) -> None:
    if not isinstance(workload, OfDrawings):
        return
    if not workload.data.held_out < NUM_DRAWERS:
        raise ValueError(
            f"optimizers: workload.data.held_out must be below {NUM_DRAWERS}, the drawings of a character, got "
            f"{workload.data.held_out}."
        )
    if not workload.penalty >= 0:
        raise ValueError(f"optimizers: workload.penalty must be at least 0, got {workload.penalty}.")


def _tuned(config: DictConfig, overrides: Collection[str]) -> DictConfig:
    """Put what was tuned for the workload in the place of the optimizer's own values, unless these were given."""
    keys = [override.lstrip("+~").partition("=")[0].split(".") for override in overrides]
    given = {key[1] for key in keys if key[0] == "optimizer" and len(key) > 1}
    tuned = dict(config.tuned.get(config.workload.name) or {})
    best = tuned.pop("batch_size", None)
    batch_size = best if config.batch_size is None else config.batch_size
    chosen = {name: value for name, value in tuned.items() if name not in given}
    return OmegaConf.merge(config, {"optimizer": chosen, "batch_size": batch_size})  # type: ignore[reportReturnType]


def _counts(config: OptimizersConfig) -> dict[str, tuple[int, int]]:
    workload, batch_size = config.workload, config.batch_size
    return {
        "seed": (config.seed, 0),
        "threads": (1 if config.threads is None else config.threads, 1),
        "evaluations": (config.evaluations, 1),
        "workload.batch_size": (workload.batch_size, 1),
        "batch_size": (1 if batch_size is None else batch_size, 1),
        **_counts_of(workload),
    }


def _counts_of(workload: Workload) -> dict[str, tuple[int, int]]:
    if isinstance(workload, Physics):
        return {"workload.points": (workload.points, 1)}
    assert isinstance(workload, OfDrawings)
    return {
        "workload.judged": (workload.judged, 1),
        "workload.data.count": (workload.data.count, 1),
        "workload.data.held_out": (workload.data.held_out, 1),
    }
