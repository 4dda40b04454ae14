"""Steps of optimizers beside gradients: their time and memory."""

from __future__ import annotations

import copy
import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from experiments.benchmarks.optimizers.methods import METHODS, Method, Work
from experiments.run.progress import Progress
from metagrad.memory import MemoryTracker

FEWEST = 3  # steps of a round


@dataclass
class Result:
    """What one optimizer did: ratios to a gradient, one of times for each round; or why it did nothing."""

    times: list[float] = field(default_factory=list)
    peak: float = float("nan")
    note: str = ""

    @property
    def time(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.times)


@dataclass
class Measured:
    """One workload: the seconds and bytes of a gradient, and every optimizer."""

    seconds: float
    nbytes: int
    results: dict[str, Result]


def measure(work: Work, names: Sequence[str], rounds: int) -> Measured:
    """Let the optimizers take turns, in a new order each round, and each of their steps with a gradient."""
    results = {name: Result() for name in names}
    gradient = gradient_of(work, copy.deepcopy(work.model))
    unit = peak_of(gradient)  # before .grad is there
    steps = {
        name: step for name in names if (step := _started(work, METHODS[name], results[name])) is not None
    }
    gradients: list[float] = []
    for number in Progress(range(rounds), unit="round", leave=False):
        for name in random.Random(number).sample(list(steps), len(steps)):
            own = other = 0.0
            for _ in range(max(METHODS[name].period, FEWEST)):
                gradients.append(seconds(gradient))
                other += gradients[-1]
                own += seconds(steps[name])
            results[name].times.append(own / other)
    for name in Progress(steps, unit="peak", leave=False):
        results[name].peak = (
            peak_of(functools.partial(_period, work, METHODS[name], copy.deepcopy(work.model))) / unit
        )
    return Measured(statistics.median(gradients), unit, results)


def seconds(run: Callable[[], object]) -> float:
    """Time one call: with one thread by the time of the processor, which others that run beside it leave alone."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


def peak_of(run: Callable[[], object]) -> int:
    """Return the most bytes that a call holds at a time, of what it makes."""
    with MemoryTracker(device="cpu") as tracker, tracker.outer(0):
        run()
    return tracker.peak


def gradient_of(work: Work, model: nn.Module) -> Callable[[], Tensor]:
    """Return what computes a gradient as a training step does."""

    def gradient() -> Tensor:
        model.zero_grad()
        loss = work.loss(model)
        loss.backward()
        return loss.detach()

    return gradient


def _started(work: Work, method: Method, result: Result) -> Callable[[], object] | None:
    """Take the first step, in which state is made; note why it cannot be taken."""
    try:
        step = method.stepper(work, copy.deepcopy(work.model))
        step()
    except ModuleNotFoundError as error:
        result.note = f"{error.name} is not installed"
    except (RuntimeError, TypeError, ValueError) as error:
        result.note = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:90]
    else:
        return step
    return None


def _period(work: Work, method: Method, model: nn.Module) -> None:
    step = method.stepper(work, model)
    for _ in range(method.period + 1):
        step()
