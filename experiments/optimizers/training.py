"""The loop of a comparison: steps until the budget is spent, the cost of each, and losses along the way."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from experiments.journal import Journal
from experiments.optimizers.building import Step
from experiments.optimizers.cost import FlopCounter
from experiments.optimizers.workload import Examples, Problem


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
    bar = tqdm(total=run.budget, unit="gradient", disable=None, dynamic_ncols=True)
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
        try:
            loss = run.step(examples).item()
        except torch.linalg.LinAlgError:  # type: ignore[reportPrivateImportUsage]  # what decompositions make of numbers that are not finite
            loss = math.nan
    run.seconds += time.perf_counter() - began
    run.steps += 1
    run.gradients += counter.flops / run.unit
    return math.isfinite(loss)


def _record(run: Run) -> bool:
    """Judge the model and write it down, unless a loss is not finite."""
    metrics = run.problem.judge()
    if not all(map(math.isfinite, metrics.values())):
        return False
    metrics["gradient_equivalents"] = run.gradients
    run.journal.write(run.steps, metrics, {"time/training(s)": run.seconds})
    return True
