"""The schema of a curvature run: every key and its type. Values live in `conf/curvature.yaml` and `conf/problem/`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from hydra.core.config_store import ConfigStore

from experiments.run.config import check_least, converted, register
from experiments.run.schema import Config, Program, key

if TYPE_CHECKING:
    from omegaconf import DictConfig


class Objective(Enum):
    """What is trained, and the loss whose curvature is measured."""

    meta = "meta"
    adapted = "adapted"
    supervised = "supervised"


class Matrix(Enum):
    """Which curvature matrix; `ggn` is the Gauss-Newton matrix, `fisher` the exact one."""

    hessian = "hessian"
    ggn = "ggn"
    fisher = "fisher"


class TraceMethod(Enum):
    """How the trace of the whole matrix is estimated; `auto` chooses by budget and size."""

    auto = "auto"
    hutchinson = "hutchinson"
    hutchpp = "hutch++"
    xtrace = "xtrace"


@dataclass
class Trace:
    """Traces: `probes` products for the whole matrix, and as many for each layer."""

    method: TraceMethod = key(
        "auto, hutchinson, hutchpp or xtrace: of the whole matrix; layers have hutchinson."
    )
    probes: int = key("Products for the whole matrix, and as many for each layer; at least 6.")


@dataclass
class Eigenvalues:
    """The `count` largest eigenvalues, to `rtol` times the norm of the matrix."""

    count: int = key("How many of the largest eigenvalues.")
    rtol: float = key("To what part of the norm of the matrix.")
    max_products: int = key("Products at most; what is reached then is taken, with its bound.")


@dataclass
class Spectrum:
    """The density of the spectrum: `steps` products for each of `probes` probes."""

    steps: int = key("Lanczos steps, products for each probe.")
    probes: int = key("Probes.")


class Quantities(Protocol):
    """What a program is told of what it measures."""

    trace: Trace
    eigenvalues: Eigenvalues
    density: Spectrum


@dataclass
class Measure:
    """When curvature is measured, and on how many tasks; `steps` wins over `count`."""

    steps: list[int] | None = key("The steps to measure at, as [0,10,1000]; null is `count` of them.")
    count: int = key("So many steps: 0 and then evenly on a logarithmic axis, up to iterations.")
    tasks: int = key("Tasks to measure on, the same ones at every step.")


@dataclass
class CurvatureConfig(Program):
    """A whole run."""

    checkpoint: str | None = key(
        "A run folder, a checkpoint, or a state dict: measured as it is, not trained."
    )
    objective: Objective = key(
        "meta: the query loss after adaptation, in the initialisation; adapted: in the adapted parameters; "
        "supervised: the model itself, on one task."
    )
    matrix: Matrix = key("hessian, ggn (Gauss-Newton) or fisher.")
    measure: Measure = field(default_factory=Measure)
    trace: Trace = field(default_factory=Trace)
    eigenvalues: Eigenvalues = field(default_factory=Eigenvalues)
    density: Spectrum = field(default_factory=Spectrum)


def register_curvature() -> None:
    """Store the schemas where `conf/curvature.yaml` finds them."""
    register()
    ConfigStore.instance().store(name="curvature_schema", node=CurvatureConfig)


def typed(config: DictConfig) -> CurvatureConfig:
    """Resolve a composed config and return it as a `CurvatureConfig`.

    Raises:
        ValueError: A key was added that the schema does not have, or a number is out of its range.
    """
    resolved = converted("curvature", config)
    _check_counts(resolved)
    _check_order(resolved)
    return resolved


def training(config: CurvatureConfig) -> Config:
    """Return what `experiments.run.build` and `experiments.train` read: the keys that both programs have."""
    return Config(**{item.name: getattr(config, item.name) for item in fields(Program)})


def steps_of(config: CurvatureConfig) -> list[int]:
    """Return the steps at which to measure: those given, or 0 and then evenly on a logarithmic axis."""
    if config.measure.steps is not None:
        return sorted(set(config.measure.steps))
    later = config.measure.count - 1
    return sorted({0, *(round(config.iterations ** (i / later)) for i in range(1, later + 1))})


def _check_counts(config: CurvatureConfig) -> None:
    least = {
        "seed": (config.seed, 0),
        "threads": (1 if config.threads is None else config.threads, 1),
        "iterations": (config.iterations, 1),
        "meta_batch": (config.meta_batch, 1),
        "measure.count": (config.measure.count, 2),
        "measure.tasks": (config.measure.tasks, 1),
        "trace.probes": (config.trace.probes, 6),
        "eigenvalues.count": (config.eigenvalues.count, 1),
        "eigenvalues.max_products": (config.eigenvalues.max_products, 1),
        "density.steps": (config.density.steps, 1),
        "density.probes": (config.density.probes, 1),
    }
    check_least("curvature", least)
    outside = [step for step in config.measure.steps or [] if not 0 <= step <= config.iterations]
    if outside or config.measure.steps == []:
        raise ValueError(
            f"curvature: measure.steps must be some of 0 to iterations = {config.iterations}, got "
            f"{config.measure.steps}."
        )


def _check_order(config: CurvatureConfig) -> None:
    """Refuse objectives whose adaptation is a constant in part: their derivatives are not those of the objective."""
    order, truncate = (getattr(config.algorithm, name, None) for name in ("order", "truncate"))
    if config.objective is Objective.meta and (order == 1 or truncate is not None):
        raise ValueError(
            "curvature: objective=meta differentiates through adaptation, so algorithm.order must be 2 and "
            f"algorithm.truncate null, got {order} and {truncate}. Set objective=adapted for the "
            "curvature at adapted parameters."
        )
