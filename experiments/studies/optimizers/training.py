"""The loop of a comparison: steps until the budget is spent, the cost of each, and losses along the way."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

from experiments.run.build import device
from experiments.run.journal import Journal
from experiments.run.progress import Progress
from experiments.studies.characters import Examples
from experiments.studies.optimizers.building import Step, Stepper
from experiments.studies.optimizers.cost import FlopCounter
from experiments.studies.optimizers.schema import OptimizersConfig
from experiments.studies.optimizers.workload import Problem, batches, problem

COUNTED_STEPS, COUNTED_SECONDS = 10, 0.5
"""Operations are counted on so many steps, or for so long, beside the run: counting takes longer than they do."""


@dataclass
class Run:
    """A run in progress; costs are sums over the `steps` taken, without what evaluations cost."""

    problem: Problem
    step: Step
    batches: Iterator[Examples]
    unit: int  # floating-point operations of one gradient
    budget: float
    every: float  # gradient-equivalents from one evaluation to the next
    journal: Journal
    steps: int = 0
    gradients: float = 0.0
    seconds: float = 0.0


def train(run: Run) -> bool:
    """Take steps until the budget is spent; return whether every loss was finite, and stop at one that is not."""
    bar = Progress(total=run.budget, unit="gradient")
    with logging_redirect_tqdm(), bar:
        due = run.every
        is_finite = _record(run)
        while is_finite and run.gradients < run.budget:
            before = run.gradients
            is_finite = advance(run)
            bar.update(min(run.gradients, run.budget) - before)
            if is_finite and run.gradients >= min(due, run.budget):
                is_finite = _record(run)
                due = run.every * (1 + run.gradients // run.every)
    return is_finite


def flops_of_gradient(problem: Problem, examples: Examples) -> int:
    """Count the operations of one gradient of the loss."""
    with FlopCounter() as counter:
        torch.autograd.grad(problem.loss(examples), list(problem.model.parameters()))
    return counter.flops


def advance(run: Run) -> bool:
    """Take one step; return whether the loss before it was finite."""
    examples, began = next(run.batches), time.perf_counter()
    with FlopCounter() as counter:
        is_finite = stepped(run.step, examples)
    run.seconds += time.perf_counter() - began
    run.steps += 1
    run.gradients += counter.flops / run.unit
    return is_finite


def _record(run: Run) -> bool:
    """Judge the model and write it down, unless a loss is not finite."""
    metrics = run.problem.judge()
    if not all(map(math.isfinite, metrics.values())):
        return False
    metrics["gradient_equivalents"] = run.gradients
    run.journal.write(run.steps, metrics, {"time/training(s)": run.seconds})
    return True


class Start(NamedTuple):
    """A run that has not begun."""

    problem: Problem
    step: Stepper
    batches: Iterator[Examples]


def start(settings: OptimizersConfig, seed: int) -> Start:
    """Build the model of a seed, the same for every optimizer, its data and an optimizer."""
    torch.manual_seed(seed)
    now = problem(settings.workload, seed, device(settings))  # type: ignore[reportArgumentType]
    examples = batches(now.train, settings.batch_size or settings.workload.batch_size, seed)
    return Start(now, Stepper(settings.optimizer, now), examples)


def raced(run: Start, seconds: float, evaluations: int) -> tuple[dict[str, list[float]], bool]:
    """Train for so many seconds; return what was measured, by name, and whether every loss was finite."""
    curve: dict[str, list[float]] = {}
    spent, steps = 0.0, 0

    def record() -> None:
        for name, value in {
            "step": steps,
            "seconds": spent,
            "work": run.step.work,
            **run.problem.judge(),
        }.items():
            curve.setdefault(name, []).append(value)

    record()
    while spent < seconds:
        examples, began = next(run.batches), time.process_time()
        is_finite = stepped(run.step, examples)
        spent, steps = spent + time.process_time() - began, steps + 1
        if not is_finite:
            return curve, False
        if spent >= min(seconds, seconds / evaluations * len(curve["step"])):
            record()
    return curve, math.isfinite(curve["loss/train"][-1])


def stepped(step: Step, examples: Examples) -> bool:
    """Take a step; say whether the loss before it was finite."""
    try:
        return math.isfinite(step(examples).item())
    except torch.linalg.LinAlgError:  # type: ignore[reportPrivateImportUsage]  # what decompositions make of numbers that are not finite
        return False


def gradients_of_work(settings: OptimizersConfig, seed: int) -> float:
    """Count the operations of some first steps, in gradients for each call of the closure or product."""
    run = start(settings, seed)
    unit = flops_of_gradient(
        run.problem, next(batches(run.problem.train, settings.workload.batch_size, seed))
    )
    began = time.process_time()
    with FlopCounter() as counter:
        for _ in range(COUNTED_STEPS):
            stepped(run.step, next(run.batches))
            if time.process_time() - began > COUNTED_SECONDS:
                break
    return counter.flops / unit / run.step.work
