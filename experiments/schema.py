"""The schema of a run: every key and its type. Values live in `conf/`; Hydra refuses any other key."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Device(Enum):
    """Where a run computes; `auto` is CUDA when there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class LoggerName(Enum):
    """Where metrics are mirrored, beside the run folder."""

    wandb = "wandb"
    none = "none"


@dataclass
class Target:
    """Something `build()` instantiates: the dotted name of a class or function, and its arguments."""

    _target_: str = MISSING


@dataclass
class Loss(Target):
    """A loss function of (prediction, target); regression when targets are floating point."""

    _partial_: bool = True


@dataclass
class Task(Target):
    """A distribution over tasks with `shots` support and `queries` query examples (per class)."""

    shots: int = MISSING
    queries: int = MISSING


@dataclass
class Sinusoid(Task):
    """Sine waves of random amplitude and phase."""


@dataclass
class Omniglot(Task):
    """Characters from a folder `root`; null looks where metagrad keeps its data."""

    root: str | None = MISSING
    ways: int = MISSING
    split: str = MISSING
    rotations: bool = MISSING
    resize: str = MISSING
    download: bool = MISSING


@dataclass
class Model(Target):
    """The network that is adapted."""


@dataclass
class MLP(Model):
    """A multilayer perceptron; `sizes` runs from the inputs to the outputs."""

    sizes: list[int] = MISSING


@dataclass
class Conv4(Model):
    """Four convolutional blocks and a linear classifier."""

    ways: int = MISSING
    hidden: int = MISSING
    pool: str = MISSING
    norm: str = MISSING
    head: str = MISSING


@dataclass
class InnerRule(Target):
    """The update rule of the inner loop."""

    lr: float = MISSING
    momentum: float = MISSING
    weight_decay: float = MISSING
    nesterov: bool = MISSING


@dataclass
class Algorithm(Target):
    """MAML and its family."""

    inner: InnerRule = field(default_factory=InnerRule)
    steps: int = MISSING
    order: int = MISSING
    memory: str = MISSING
    truncate: int | None = MISSING
    tolerance: float | None = MISSING
    task_chunk: int | None = MISSING
    nonfinite: str = MISSING
    compile: Any = MISSING  # a bool or a str, which OmegaConf cannot merge; MAML refuses what is neither


@dataclass
class Optimizer(Target):
    """The optimizer of the outer loop, or one that `experiments.optimizers` compares.

    That program alone reads `batch_size`, the examples of a step (null: as many as the workload says), and `tuned`,
    from the name of a workload to the hyper-parameters that were found best there.
    """

    _partial_: bool = True
    lr: float = MISSING
    batch_size: int | None = None
    tuned: dict[str, Any] = field(default_factory=dict)


@dataclass
class FirstOrder(Optimizer):
    """An optimizer with weight decay."""

    weight_decay: float = MISSING


@dataclass
class Adam(FirstOrder):
    """torch.optim.Adam."""

    betas: list[float] = MISSING
    eps: float = MISSING


@dataclass
class SGD(FirstOrder):
    """torch.optim.SGD."""

    momentum: float = MISSING
    nesterov: bool = MISSING


@dataclass
class Schedule(Target):
    """The learning-rate schedule of the outer loop, one tick per iteration."""

    _partial_: bool = True


@dataclass
class Constant(Schedule):
    """The learning rate stays what it is."""

    factor: float = MISSING


@dataclass
class Cosine(Schedule):
    """The learning rate falls to `eta_min` along half a cosine over `T_max` iterations."""

    T_max: int = MISSING
    eta_min: float = MISSING


@dataclass
class Logger:
    """The mirror of a run's metrics; `mode` is wandb's (offline, online, disabled)."""

    name: LoggerName = MISSING
    project: str = MISSING
    entity: str | None = MISSING
    mode: str = MISSING
    group: str | None = MISSING
    notes: str | None = MISSING
    tags: list[str] = MISSING


@dataclass
class Log:
    """Write the metrics of every `every`-th iteration."""

    every: int = MISSING


@dataclass
class Evaluate:
    """Validation during the run and the test at its end."""

    every: int = MISSING
    validation_tasks: int = MISSING
    tasks: int = MISSING
    queries: int = MISSING
    steps: int = MISSING
    chunk: int = MISSING


@dataclass
class Checkpoint:
    """Save the state of a run every `every` iterations, and at its end."""

    every: int = MISSING


@dataclass
class Memory:
    """Track the memory of the first `outer_steps` outer steps."""

    enabled: bool = MISSING
    outer_steps: int = MISSING


@dataclass
class Plots:
    """What the plots show: `tasks` curves, after up to `steps` inner steps."""

    tasks: int = MISSING
    steps: int = MISSING


@dataclass
class Program:
    """What every program that trains has."""

    seed: int = MISSING
    device: Device = MISSING
    threads: int | None = MISSING
    iterations: int = MISSING
    meta_batch: int = MISSING
    anomaly: bool = MISSING
    task: Task = MISSING
    loss: Loss = MISSING
    model: Model = MISSING
    algorithm: Algorithm = MISSING
    optimizer: Optimizer = MISSING
    schedule: Schedule = MISSING
    logger: Logger = MISSING


@dataclass
class Config(Program):
    """A whole run."""

    resume: str | None = MISSING
    log: Log = field(default_factory=Log)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    memory: Memory = field(default_factory=Memory)
    plots: Plots = field(default_factory=Plots)
