"""Build the objects that a config describes."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from hydra.utils import get_object

from experiments.run.schema import Device
from experiments.run.schemas import given
from metagrad.meta import Algorithm
from metagrad.optim import LBFGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from experiments.run import schema
    from experiments.run.schema import Config, Optimizer, Target, Task
    from metagrad.tasks import TaskDistribution

ALLOWED = ("metagrad.", "torch.optim.", "torch.nn.")
STREAMS = ("train", "validation", "test")
NEEDED = {
    "CAVIA": "Take model=context_mlp for curves, or model=conv4 model.context=100 for images.",
    "MAMLPlusPlus": "Take model=conv4 model.norm=running, or algorithm.norm=null for models without batch norm.",
}
"""The change to make if an algorithm cannot be built, by its class."""


class Splits(NamedTuple):
    """The task distributions of a run."""

    train: TaskDistribution
    validation: TaskDistribution
    test: TaskDistribution


class Parts(NamedTuple):
    """The objects with a state, which the training loop updates."""

    algorithm: Algorithm
    model: torch.nn.Module
    loss_fn: Any
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    generator: torch.Generator
    takes_closure: bool

    @property
    def module(self) -> torch.nn.Module:
        """The algorithm as a module, whose parameters and buffers are learned."""
        assert isinstance(self.algorithm, torch.nn.Module)
        return self.algorithm


def build(
    config: Target | Mapping[str, Any], *args: object, allow: Sequence[str] = (), key: str = "build"
) -> Any:
    """Build the object that a config names. Arguments that are objects are built first.

    Args:
        config: A target and its arguments, including the `args` of a custom target.
        args: Arguments that come first.
        allow: Further packages whose targets are built, in addition to `ALLOWED`.
        key: The key of the config on the command line, for errors.

    Raises:
        ValueError: The target is outside of these packages, does not exist, or raises for its arguments.
    """
    return _built(asdict(config) if is_dataclass(config) else config, args, allow, key)  # type: ignore[reportArgumentType]


def _built(config: Any, args: Sequence[object], allow: Sequence[str], key: str) -> Any:
    if isinstance(config, (list, tuple)):
        return [_built(one, (), allow, key) for one in config]
    if not isinstance(config, Mapping):
        return config
    settings = {**config, **(config.get("args") or {})} if "_target_" in config else config
    parts = {
        name: _built(value, (), allow, f"{key}.{name}") for name, value in settings.items() if name != "args"
    }
    if "_target_" not in parts:
        return parts
    target, is_partial = str(parts.pop("_target_")), parts.pop("_partial_", False)
    _check_allowed(target, allow)
    args = [*args, *parts.pop("_args_", ())]
    try:
        make = get_object(target)
        return functools.partial(make, *args, **parts) if is_partial else make(*args, **parts)
    except Exception as error:
        raise ValueError(f"{key}: {target}: {in_keys(key, error)}") from error


def in_keys(key: str, error: Exception) -> str:
    """Return the message of an error, with keys of the command line instead of Python arguments."""
    words = re.sub(r"^\w+\((?:.*, )?(\w+)(?:=[^)]*)?\): ", rf"{key}.\1: ", str(error))
    words = words.replace("Pass download=True", f"Set {key}.download=true")
    return words.replace("by root= or METAGRAD_DATA", f"by {key}.root= or METAGRAD_DATA")


def build_optimizer(config: Optimizer, params: object, allow: Sequence[str] = ()) -> torch.optim.Optimizer:
    """Build an optimizer of parameters.

    Raises:
        ValueError: The optimizer raises for its arguments.
    """
    return build({**asdict(config), "_partial_": False}, params, allow=allow, key="optimizer")


def build_tasks(config: Task, allow: Sequence[str] = (), **changes: object) -> TaskDistribution:
    """Build a task distribution. Changes to arguments that it does not have are ignored.

    Raises:
        ValueError: As `build`.
    """
    settings = asdict(config)
    given = {**settings, **(settings.pop("args", None) or {})}
    return build(
        {**given, **{name: value for name, value in changes.items() if name in given}},
        allow=allow,
        key="task",
    )


def build_splits(config: Config) -> Splits:
    """Build the distributions of training, validation and test tasks."""
    queries = {} if config.evaluate.queries is None else {"queries": config.evaluate.queries}
    judged = [build_tasks(config.task, config.allow, split=name, **queries) for name in STREAMS[1:]]
    return Splits(build_tasks(config.task, config.allow), *judged)


def build_parts(config: Config) -> Parts:
    """Build the learner, its outer optimizer, the schedule and the generator of training tasks."""
    allow = config.allow
    model, loss = build(config.model, allow=allow, key="model"), build(config.loss, allow=allow, key="loss")
    _find_head(config.algorithm, model)
    _leave_out(config.algorithm.without, model)
    try:
        algorithm = build(given(config.algorithm), model, loss, allow=allow, key="algorithm")
    except ValueError as error:
        needed = NEEDED.get(config.algorithm._target_.rpartition(".")[2], "")
        raise ValueError(f"{error} {needed}".strip()) from error
    if not isinstance(algorithm, Algorithm) or not isinstance(algorithm, torch.nn.Module):
        raise ValueError(
            f"build: {config.algorithm._target_} is no meta-learning algorithm: expected a torch.nn.Module with "
            f"forward(batch) and adapt(support), as metagrad.meta.Algorithm says, got {type(algorithm).__name__}."
        )
    optimizer = build_optimizer(config.optimizer, algorithm.to(device(config)).parameters(), allow)
    schedule = build(config.schedule, allow=allow, key="schedule")(optimizer)
    takes_closure = asks_for_closure(type(optimizer))
    return Parts(algorithm, model, loss, optimizer, schedule, generator(config.seed, "train"), takes_closure)


def asks_for_closure(make: type[torch.optim.Optimizer]) -> bool:
    """Return whether optimizers of a class use the graph of the loss, or compute the loss several times per step."""
    arguments = inspect.signature(make.step).parameters
    is_required = "closure" in arguments and arguments["closure"].default is inspect.Parameter.empty
    searches = issubclass(make, LBFGS)  # along a line, by the loss at other parameters
    return is_required or searches or "curvature" in arguments or getattr(make, "notes_losses", False)


def device(config: Config) -> torch.device:
    """Return the device of a run.

    Raises:
        ValueError: The config chooses CUDA, and this machine has no CUDA device.
    """
    available = torch.cuda.is_available()
    if config.device is Device.cuda and not available:
        raise ValueError("train: device=cuda, but torch finds no CUDA device; use device=auto or device=cpu.")
    return torch.device("cuda" if available and config.device is not Device.cpu else "cpu")


def generator(seed: int, stream: str) -> torch.Generator:
    """Return a separate generator for each stream of tasks, so that the streams are independent."""
    sequence = np.random.SeedSequence(seed, spawn_key=(STREAMS.index(stream),))
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))


def _find_head(config: schema.Algorithm, model: torch.nn.Module) -> None:
    """Set the name of the head to the last module with parameters, if the model has no module of the default name."""
    layers = [name for name, module in model.named_modules() if module._parameters]
    has_default = any(name.partition(".")[0] == "head" for name in layers)
    for key in ("head", "without"):
        value = getattr(config, key, None)
        if value == "head" and layers and not has_default:
            setattr(config, key, layers[-1])
        elif isinstance(value, int):  # as Hydra reads algorithm.head=4
            setattr(config, key, str(value))


def _leave_out(name: str | None, model: torch.nn.Module) -> None:
    """Replace a module of a model by the identity."""
    if name is None:
        return
    try:
        model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"algorithm.without={name}: {type(model).__name__} has no such module.") from error
    model.set_submodule(name, torch.nn.Identity())


def _check_allowed(target: str, allow: Sequence[str]) -> None:
    packages = [package.strip().rstrip(".") for package in allow]
    if not all(packages):
        raise ValueError(
            f"build: allow must be a list of packages, as allow=[mypackage.], got {list(allow)}."
        )
    if not target.startswith((*ALLOWED, *(f"{package}." for package in packages))):
        package = target.rpartition(".")[0]
        raise ValueError(
            f"build: _target_={target} is not allowed; it must start with {', '.join(ALLOWED)} or a package that you "
            f"allow, as by allow=[{package or 'mypackage'}.]."
        )
