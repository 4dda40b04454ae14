"""From a config to objects: the only caller of `hydra.utils.instantiate`."""

from __future__ import annotations

import inspect
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import hydra
import numpy as np
import torch
from hydra.errors import InstantiationException

from experiments.run.schema import Device
from experiments.run.schemas import given
from metagrad.meta import Algorithm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from experiments.run.schema import Config, Optimizer, Target, Task
    from metagrad.tasks import TaskDistribution

ALLOWED = ("metagrad.", "torch.optim.", "torch.nn.")
STREAMS = ("train", "validation", "test")


class Splits(NamedTuple):
    """The task distributions of a run."""

    train: TaskDistribution
    validation: TaskDistribution
    test: TaskDistribution


class Parts(NamedTuple):
    """What the training loop moves forward: everything that has a state."""

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


def build(config: Target | Mapping[str, Any], *args: object, allow: Sequence[str] = ()) -> Any:
    """Instantiate what a config names, with `args` before its own arguments.

    Args:
        config: A target and its arguments; those under `args` of a custom one are arguments too.
        args: Arguments that come first.
        allow: Packages whose targets are built beside those of `ALLOWED`.

    Raises:
        ValueError: The target is outside of these packages, or refuses its arguments.
    """
    settings = _arguments(asdict(config) if is_dataclass(config) else dict(config))  # type: ignore[reportArgumentType]
    for target in _targets(settings):
        _check_allowed(target, allow)
    try:
        return hydra.utils.instantiate(settings, *args, _convert_="all")
    except InstantiationException as error:
        raise ValueError(f"build: {settings['_target_']}: {error.__cause__ or error}") from error


def build_optimizer(config: Optimizer, params: object, allow: Sequence[str] = ()) -> torch.optim.Optimizer:
    """Build an optimizer of parameters, or of a model where it takes one.

    Raises:
        ValueError: It refuses its arguments.
    """
    make = build(asdict(config), allow=allow)
    try:
        return make(params)
    except (TypeError, ValueError) as error:
        raise ValueError(f"build: {config._target_}: {error}") from error


def build_tasks(config: Task, allow: Sequence[str] = (), **changes: object) -> TaskDistribution:
    """Build a task distribution, with other values of those arguments that it has.

    Raises:
        ValueError: As `build`, with the keys of the command line where the distribution names its arguments.
    """
    settings = _arguments(asdict(config))
    settings |= {name: value for name, value in changes.items() if name in settings}
    try:
        return build(settings, allow=allow)
    except ValueError as error:
        raise ValueError(in_keys("task", error)) from error


def in_keys(prefix: str, error: ValueError) -> str:
    """Return what a distribution says of its arguments, with their keys on the command line."""
    words = str(error).replace("Pass download=True", f"Set {prefix}.download=true")
    return words.replace("by root= or METAGRAD_DATA", f"by {prefix}.root= or METAGRAD_DATA")


def build_splits(config: Config) -> Splits:
    """Build the distributions of training, validation and test tasks."""
    queries = {} if config.evaluate.queries is None else {"queries": config.evaluate.queries}
    judged = [build_tasks(config.task, config.allow, split=name, **queries) for name in STREAMS[1:]]
    return Splits(build_tasks(config.task, config.allow), *judged)


def build_parts(config: Config) -> Parts:
    """Build the learner, its outer optimizer, the schedule and the generator of training tasks."""
    allow = config.allow
    model, loss = (
        _without(config.algorithm.without, build(config.model, allow=allow)),
        build(config.loss, allow=allow),
    )
    algorithm = build(given(config.algorithm), model, loss, allow=allow)
    if not isinstance(algorithm, Algorithm) or not isinstance(algorithm, torch.nn.Module):
        raise ValueError(
            f"build: {config.algorithm._target_} is no meta-learning algorithm: expected a torch.nn.Module with "
            f"forward(batch) and adapt(support), as metagrad.meta.Algorithm says, got {type(algorithm).__name__}."
        )
    optimizer = build_optimizer(config.optimizer, algorithm.to(device(config)).parameters(), allow)
    schedule = build(config.schedule, allow=allow)(optimizer)
    takes_closure = asks_for_closure(type(optimizer))
    return Parts(algorithm, model, loss, optimizer, schedule, generator(config.seed, "train"), takes_closure)


def asks_for_closure(make: type[torch.optim.Optimizer]) -> bool:
    """Return whether optimizers of a class see how the loss is computed, or compute it several times a step."""
    arguments = inspect.signature(make.step).parameters
    is_required = "closure" in arguments and arguments["closure"].default is inspect.Parameter.empty
    return is_required or "curvature" in arguments or getattr(make, "notes_losses", False)


def device(config: Config) -> torch.device:
    """Return the device of a run.

    Raises:
        ValueError: CUDA was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if config.device is Device.cuda and not available:
        raise ValueError("train: device=cuda, but torch finds no CUDA device; use device=auto or device=cpu.")
    return torch.device("cuda" if available and config.device is not Device.cpu else "cpu")


def generator(seed: int, stream: str) -> torch.Generator:
    """Return a generator of its own for each stream of tasks, so that none shifts another."""
    sequence = np.random.SeedSequence(seed, spawn_key=(STREAMS.index(stream),))
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))


def _without(name: str | None, model: torch.nn.Module) -> torch.nn.Module:
    """Leave a module out of a model."""
    if name is not None:
        try:
            model.get_submodule(name)
        except AttributeError as error:
            raise ValueError(
                f"build: algorithm.without={name}: {type(model).__name__} has no such module."
            ) from error
        model.set_submodule(name, torch.nn.Identity())
    return model


def _arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Put the `args` of custom targets among their arguments, at every depth."""
    nested = {key: _arguments(value) if isinstance(value, dict) else value for key, value in settings.items()}
    own = nested.pop("args", None) if "_target_" in nested else None
    return {**nested, **(own or {})}


def _targets(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        if "_target_" in config:
            yield str(config["_target_"])
        config = list(config.values())
    if isinstance(config, (list, tuple)):
        for value in config:
            yield from _targets(value)


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
