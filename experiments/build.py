"""From a config to objects: the only caller of `hydra.utils.instantiate`."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import hydra
import numpy as np
import torch
from hydra.errors import InstantiationException

from experiments.optimizer_schemas import NeedsClosure
from experiments.schema import Device, Omniglot, Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from experiments.schema import Config, Optimizer
    from metagrad.tasks import TaskDistribution

ALLOWED = ("metagrad.", "torch.optim.", "torch.nn.", "experiments.optimizers.models.")
READ_BY_PROGRAM = ("batch_size", "curvature_batch", "rest", "tuned")
"""Keys of an optimizer's config that are no arguments of it."""
STREAMS = ("train", "validation", "test")


class Splits(NamedTuple):
    """The task distributions of a run."""

    train: TaskDistribution
    validation: TaskDistribution
    test: TaskDistribution


class Parts(NamedTuple):
    """What the training loop moves forward: everything that has a state."""

    maml: Any
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    generator: torch.Generator


def build(config: Target | Mapping[str, Any], *args: object) -> Any:
    """Instantiate what a config names, with `args` before its own arguments.

    Raises:
        ValueError: The target is outside of `ALLOWED`, or refuses its arguments.
    """
    settings = asdict(config) if isinstance(config, Target) else dict(config)
    for target in _targets(settings):
        if not target.startswith(ALLOWED):
            raise ValueError(
                f"build: _target_={target} is not allowed; it must start with {', '.join(ALLOWED)}."
            )
    try:
        return hydra.utils.instantiate(settings, *args, _convert_="all")
    except InstantiationException as error:
        raise ValueError(f"build: {settings['_target_']}: {error.__cause__ or error}") from error


def build_optimizer(config: Optimizer, params: object) -> torch.optim.Optimizer:
    """Build an optimizer of parameters, or of a model where it takes one.

    Raises:
        ValueError: It refuses its arguments.
    """
    settings = {key: value for key, value in asdict(config).items() if key not in READ_BY_PROGRAM}
    make = build(settings)
    try:
        return make(params)
    except (TypeError, ValueError) as error:
        raise ValueError(f"build: {config._target_}: {error}") from error


def build_splits(config: Config) -> Splits:
    """Build the distributions of training, validation and test tasks."""
    judged = replace(config.task, queries=config.evaluate.queries)
    if isinstance(judged, Omniglot):
        return Splits(build(config.task), *(build(replace(judged, split=name)) for name in STREAMS[1:]))
    tasks = build(judged)
    return Splits(build(config.task), tasks, tasks)


def build_parts(config: Config) -> Parts:
    """Build the learner, its outer optimizer, the schedule and the generator of training tasks."""
    model, loss = build(config.model), build(config.loss)
    maml = build(config.algorithm, model, loss).to(device(config))
    optimizer = build_optimizer(_outer(config.optimizer), maml.parameters())
    return Parts(maml, optimizer, build(config.schedule)(optimizer), generator(config.seed, "train"))


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


def _outer(config: Optimizer) -> Optimizer:
    """Refuse what the outer loop cannot offer: a closure over a loss that is known by its name."""
    if isinstance(config, NeedsClosure):
        raise ValueError(
            f"build: {config._target_} needs a closure that computes the loss, which the outer loop has not. Compare "
            "it by experiments.optimizers, or take optimizer=adam, adahessian, sophia_h, shampoo or soap."
        )
    return config


def _targets(config: dict[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if key == "_target_":
            yield value
        elif isinstance(value, dict):
            yield from _targets(value)
