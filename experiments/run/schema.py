"""The schema of a run: every key and its type. Values are in `conf/`. Hydra raises an error for any other key."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Device(Enum):
    """The device of a run. `auto` is CUDA if there is a CUDA device."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class LoggerName(Enum):
    """The mirror of the metrics, in addition to the run folder."""

    wandb = "wandb"
    tensorboard = "tensorboard"
    csv = "csv"
    none = "none"


def key(sentence: str, default: Any = MISSING, *, least: int = 1) -> Any:
    """Return a field with its sentence for `--help`, and with its minimum if it is an integer."""
    return field(default=default, metadata={"help": sentence, "least": least})


@dataclass
class Target:
    """An object that `build()` creates: the dotted name of a class or function, and its arguments.

    `--help` prints the docstring of the target for each key.
    """

    _target_: str = key("What is built: a class or function, by its dotted name.")


@dataclass
class Custom:
    """A target from the user's code, with any arguments in `args`."""

    args: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "The arguments of the target, by name: {width: 64}."}
    )


@dataclass
class Loss(Target):
    """A loss function of (prediction, target). The task is a regression if targets are floating point."""

    _partial_: bool = True


@dataclass
class Task(Target):
    """A distribution over tasks."""


@dataclass
class CustomTask(Task, Custom):
    """A distribution from the user's code: an object with `sample(num_tasks, generator=...)`.

    If tasks are evaluated, `queries` is set to `evaluate.queries`, and `split` to "validation" or "test".
    """


@dataclass
class Data(Target):
    """A data set of pairs (x, label) for few-shot tasks."""


@dataclass
class CustomData(Data, Custom):
    """A data set from the user's code."""


@dataclass
class Model(Target):
    """The network that is adapted."""


@dataclass
class CustomModel(Model, Custom):
    """A network from the user's code."""


@dataclass
class InnerRule(Target):
    """The update rule of the inner loop. `experiments.run.schemas` has the rules of metagrad."""


@dataclass
class CustomRule(InnerRule, Custom):
    """A rule from the user's code, or a rule made of other rules: `chain`, `mask`, `schedule`."""


@dataclass
class Hypergradient(Target):
    """The method of the meta-gradient, if it does not differentiate through all inner steps."""


@dataclass
class Algorithm(Target):
    """A meta-learning algorithm. `experiments.run.schemas` has the algorithms of metagrad.

    The program reads all of these keys. It passes only the keys that the target accepts to the target.
    """

    inner: Any = key("The rule of the inner steps; null where the algorithm has none.", None)
    steps: int | None = key("The number of inner steps; null where the algorithm has none.", None, least=0)
    nonfinite: str = key("raise; or skip: leave out tasks whose loss is not finite, and count them.", "raise")
    without: str | None = key(
        "The module of the model that is left out, where the algorithm fits a head of its own to each task.",
        None,
    )


@dataclass
class CustomAlgorithm(Algorithm, Custom):
    """An algorithm from the user's code, which follows the protocol `metagrad.meta.Algorithm`."""


@dataclass
class Optimizer(Target):
    """The optimizer of the outer loop, which updates the meta-parameters."""

    _partial_: bool = True
    lr: float = key("The step size.")


@dataclass
class CustomOptimizer(Optimizer, Custom):
    """An optimizer from the user's code. It receives a closure if its `step` requires one."""


@dataclass
class Schedule(Target):
    """The learning-rate schedule of the outer loop, which advances once per iteration."""

    _partial_: bool = True


@dataclass
class Constant(Schedule):
    """A constant learning rate."""

    factor: float = MISSING


@dataclass
class Cosine(Schedule):
    """The learning rate falls to `eta_min` along half a cosine over `T_max` iterations."""

    T_max: int = MISSING
    eta_min: float = MISSING


@dataclass
class Logger:
    """The mirror of a run's metrics."""

    name: LoggerName = key("wandb, tensorboard, csv or none; the other keys are wandb's.")
    project: str = key("The wandb project.")
    entity: str | None = key("The wandb user or team; null is wandb's default.")
    mode: str = key("online, offline or disabled; the environment variable WANDB_MODE where it is set.")
    group: str | None = key("The wandb group of the run.")
    notes: str | None = key("What wandb shows beside the run.")
    tags: list[str] = key("The wandb tags of the run.")


@dataclass
class Log:
    """How often metrics are written."""

    every: int = key("Iterations from one row of metrics to the next.")


@dataclass
class Evaluate:
    """Validation during the run and the test at its end."""

    every: int = key("Iterations from one validation to the next.")
    validation_tasks: int = key("Tasks of a validation, the same ones each time.", least=2)
    tasks: int = key("Tasks of the test at the end.", least=2)
    queries: int | None = key("Query examples of a task that is evaluated (per class).")
    steps: int | None = key(
        "Inner steps on a task that is evaluated; null where the algorithm has none.", least=0
    )
    chunk: int = key("Tasks that are evaluated at once.")


@dataclass
class Checkpoint:
    """How often the state of a run is saved. It is also saved at the end, and when a signal ends the run."""

    every: int = key("Iterations from one checkpoint to the next.")


@dataclass
class Memory:
    """The memory of the first outer steps."""

    enabled: bool = key("Track the memory of the first outer steps.")
    outer_steps: int = key("How many outer steps are tracked.")


@dataclass
class Plots:
    """The content of the plots."""

    tasks: int = key("Tasks in the plot of adaptation.")
    steps: int = key("Inner steps in the plot of adaptation.")


@dataclass
class Program:
    """The keys of every program that trains."""

    seed: int = key("Of all random numbers.", least=0)
    device: Device = key("auto (CUDA where there is one), cpu or cuda.")
    threads: int | None = key("Threads of torch on the CPU; null is torch's choice.")
    iterations: int = key("Outer steps.")
    meta_batch: int = key("Tasks of one outer step.")
    anomaly: bool = key(
        "Name the operation whose backward pass made a NaN (torch.autograd.set_detect_anomaly); slow."
    )
    allow: list[str] = key(
        "Packages whose classes and functions may be a `_target_`, beside metagrad's and torch's: [mypackage.]."
    )
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

    preflight: bool = key(
        "Print before training which derivatives are wrong or missing, where the run ends, and the memory of a step."
    )
    resume: str | None = key(
        "A run folder, to go on in it; a checkpoint, to start a new run from it; or auto, to go on from the one "
        "in the run's own folder, if any."
    )
    metric: str = key(
        "What a sweeper gets to minimise or maximise: the last validation/NAME or train/NAME, or test/NAME; NAME is "
        "query_loss or accuracy."
    )
    log: Log = field(default_factory=Log)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    memory: Memory = field(default_factory=Memory)
    plots: Plots = field(default_factory=Plots)
