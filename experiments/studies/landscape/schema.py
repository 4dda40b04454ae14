"""The schema of a landscape run: every key and its type. Values live in `conf/landscape.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from experiments.run.config import check_least
from experiments.run.schema import key
from experiments.studies.curvature.schema import Eigenvalues, Spectrum, Trace
from experiments.studies.study import StudyConfig
from metagrad.tasks.omniglot.splits import NUM_DRAWERS

LEAST_PROBES = 6


class Method(Enum):
    """What takes the steps; `gd` is gradient descent."""

    gd = "gd"
    adam = "adam"
    soap = "soap"
    kfac = "kfac"


@dataclass
class RunConfig:
    """One way to train the network, on all examples at every step."""

    title: str = key("How tables and figures call it.")
    method: Method = key("gd, adam, soap or kfac.")
    lr: float = key("The step size.")
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Further options of the optimizer, by name."}
    )
    rho: float | None = key("The radius of sharpness-aware minimization; null: none.", None)
    penalty: float | None = key("The weight of the trace of the Hessian; null: none.", None)


@dataclass
class Characters:
    """The images: characters of Omniglot, other ones for each seed."""

    count: int = key("Characters.")
    shots: int = key("Drawings of each to train on, of 20; the others are the test set.")
    size: int = key("Pixels along a side.")


@dataclass
class LandscapeConfig(StudyConfig):
    """A whole study: runs, and what is measured along them."""

    data: Characters = field(default_factory=Characters)
    hidden: list[int] = key("Units of the hidden layers, with tanh.")
    steps: int = key("Steps of each run.")
    every: int = key("Steps from one measurement of the sharpness to the next.")
    full: int = key("Measurements of traces, eigenvalues and densities, evenly along a run.")
    trace: Trace = field(default_factory=Trace)
    eigenvalues: Eigenvalues = field(default_factory=Eigenvalues)
    density: Spectrum = field(default_factory=Spectrum)
    sharpness_rtol: float = key("To what part of its size the sharpness is known.")
    runs: dict[str, RunConfig] = key("The runs, by name.")
    only: list[str] | None = key("The names of the runs to make; null: all.")


def check(config: LandscapeConfig) -> None:
    """Refuse numbers that are out of their range."""
    check_least(
        "landscape",
        {
            "data.count": (config.data.count, 2),
            "data.shots": (config.data.shots, 1),
            "data.size": (config.data.size, 2),
            "steps": (config.steps, 1),
            "every": (config.every, 1),
            "full": (config.full, 2),
            "trace.probes": (config.trace.probes, LEAST_PROBES),
            "eigenvalues.count": (config.eigenvalues.count, 1),
            "density.steps": (config.density.steps, 1),
            "density.probes": (config.density.probes, 1),
        },
    )
    if config.data.shots >= NUM_DRAWERS:
        raise ValueError(
            f"landscape: data.shots must leave drawings to test on, below {NUM_DRAWERS}, got {config.data.shots}."
        )
    unknown = [name for name in config.only or [] if name not in config.runs]
    if unknown:
        raise ValueError(f"landscape: only must be among {', '.join(config.runs)}, got {', '.join(unknown)}.")
    for name, run in config.runs.items():
        if (run.rho or run.penalty) and run.method is not Method.gd:
            raise ValueError(
                f"landscape: runs.{name} has a rho or a penalty, whose edge of stability is known for method=gd "
                f"alone, got {run.method.value}."
            )
