"""The training loop: outer steps, metrics, validation, checkpoints, and the memory of the first steps."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

import metagrad as mg
from experiments.run import checkpoint, outer
from experiments.run.build import generator, in_keys
from experiments.run.config import plain
from experiments.run.evaluate import Interval, accuracies, evaluate, is_classification
from experiments.run.metrics import check_metric
from experiments.run.progress import Progress
from experiments.run.ranks import Ranks, counted
from experiments.run.signals import Deferred, Interrupted, signals_deferred
from metagrad.curvature import SolveError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from experiments.run.build import Parts, Splits
    from experiments.run.journal import Silent
    from experiments.run.schema import Config

MIB = 2**20


@dataclass
class Run:
    """A run in progress, after `step` iterations."""

    config: Config
    parts: Parts
    splits: Splits
    device: torch.device
    folder: Path
    journal: Silent
    step: int = 0
    skipped: int = 0  # tasks left out since metrics were last written
    ranks: Ranks = field(default_factory=Ranks)
    seconds: float = field(default=0.0, init=False)
    untimed: int = field(default=0, init=False)
    signal: Deferred = field(default_factory=Deferred, init=False)


def train(run: Run) -> None:
    """Train up to `config.iterations`. With `memory.enabled`, a memory tracker watches the first steps."""
    config = run.config
    tracked = min(config.memory.outer_steps, config.iterations) if config.memory.enabled else 0
    if run.step == 0:
        run.journal.write(0, _validate(run), {})
    check_metric(config.metric, run.journal.rows())
    with logging_redirect_tqdm(), _progress(run) as bar, signals_deferred() as run.signal:
        if run.step < tracked:
            with mg.MemoryTracker(run.device) as tracker:
                _advance(run, bar, until=tracked, tracker=tracker)
            run.journal.memory(tracker)
        _advance(run, bar, until=config.iterations, tracker=None)


def outer_step(
    run: Run, tracker: mg.MemoryTracker | None
) -> tuple[mg.tasks.Batch, mg.meta.MetaOutput | None]:
    """Sample tasks, adapt to them, and update the meta-parameters. The output may be None, as in `outer.step`."""
    with nullcontext() if tracker is None else tracker.outer(run.step):
        with _phase(tracker, "sample"):
            source = run.parts.generator
            batch = run.ranks.share(run.splits.train.sample(run.config.meta_batch, generator=source))
            batch = batch.to(device=run.device)
        try:
            out = outer.step(run.parts, batch, partial(_phase, tracker), run.ranks)
        except (FloatingPointError, SolveError) as error:
            raise type(error)(f"Iteration {run.step}: {in_keys('algorithm', error)}") from error
    run.parts.schedule.step()
    return batch, out


def peak_memory(device: torch.device) -> float:
    """Return the peak memory in MiB: of the allocator on CUDA, of the whole process (resident) on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def evaluate_split(run: Run, split: str, *, num_tasks: int) -> dict[str, Interval]:
    """Evaluate a run on tasks of its "validation" or "test" split. Every call uses the same tasks."""
    config = run.config.evaluate
    return evaluate(
        run.parts.algorithm,
        getattr(run.splits, split),
        num_tasks=num_tasks,
        steps=config.steps,
        chunk=config.chunk,
        generator=generator(run.config.seed, split),
        device=run.device,
        ranks=run.ranks,
    )


def named(group: str, intervals: dict[str, Interval]) -> dict[str, float]:
    """Flatten intervals into metrics: `group/name(unit)` and `group/name_ci95(unit)`."""
    metrics = {}
    for name, interval in intervals.items():
        stem, bracket, unit = name.partition("(")
        metrics[f"{group}/{name}"] = interval.mean
        metrics[f"{group}/{stem}_ci95{bracket}{unit}"] = interval.ci95
    return metrics


def _advance(run: Run, bar: Progress[Any], *, until: int, tracker: mg.MemoryTracker | None) -> None:
    while run.step < until:
        _iterate(run, bar, tracker)
        if number := run.ranks.largest(run.signal.number or 0):
            _save(run)
            at = f"after {run.step} of {run.config.iterations} iterations"
            raise Interrupted(number, at=at)
        if _due(run, run.config.checkpoint.every):
            _save(run)


def _iterate(run: Run, bar: Progress[Any], tracker: mg.MemoryTracker | None) -> None:
    """Take one outer step and record it. Its batch and output are freed before this function returns."""
    start = time.perf_counter()
    batch, out = outer_step(run, tracker)
    if (advance := getattr(run.parts.algorithm, "advance", None)) is not None:
        advance()
    run.seconds += time.perf_counter() - start
    run.step += 1
    run.untimed += 1
    if run.config.algorithm.nonfinite == "skip":
        run.skipped += batch.num_tasks if out is None else int(out.skipped.sum())
    bar.update()
    _record(run, bar, batch, out, tracker)


def _record(
    run: Run,
    bar: Progress[Any],
    batch: mg.tasks.Batch,
    out: mg.meta.MetaOutput | None,
    tracker: mg.MemoryTracker | None,
) -> None:
    metrics: dict[str, float] = {}
    costs: dict[str, float] = {}
    if _due(run, run.config.log.every):
        metrics |= _train_metrics(run, batch, out)
        costs |= _costs(run)
        bar.set_postfix(_postfix(metrics, costs), refresh=False)
    if _due(run, run.config.evaluate.every):
        with _phase(tracker, "validation"):
            metrics |= _validate(run)
    if metrics:
        run.journal.write(run.step, metrics, costs)


def _save(run: Run) -> None:
    random, skipped = run.ranks.gathered(checkpoint.random_state()), run.ranks.total(run.skipped)
    run.journal.save(run.parts, step=run.step, config=plain(run.config), skipped=skipped, random=random)


def _train_metrics(run: Run, batch: mg.tasks.Batch, out: mg.meta.MetaOutput | None) -> dict[str, float]:
    means = {} if out is None else _means(batch, out)
    metrics = run.ranks.mean(means, weight=0 if out is None else counted(out))
    if run.config.algorithm.nonfinite == "skip":
        metrics["train/skipped(tasks)"] = run.ranks.total(run.skipped)
        run.skipped = 0
    metrics["optimizer/lr"] = float(run.parts.optimizer.param_groups[0]["lr"])
    return metrics


def _means(batch: mg.tasks.Batch, out: mg.meta.MetaOutput) -> dict[str, float]:
    """Return means over the tasks of this process that were not left out."""
    means, kept = {"train/query_loss": out.loss.item()}, ~out.skipped
    if is_classification(batch.query.y):
        means["train/accuracy(%)"] = accuracies(out.query_outputs[kept], batch.query.y[kept]).mean().item()
    if out.support_losses.shape[1]:
        means["train/support_loss"] = out.support_losses[kept, 0].mean().item()
    return means


def _costs(run: Run) -> dict[str, float]:
    milliseconds = 1000 * run.seconds / run.untimed
    run.seconds, run.untimed = 0.0, 0
    return {"time/outer_step(ms)": milliseconds, "memory/peak(MiB)": peak_memory(run.device)}


def _validate(run: Run) -> dict[str, float]:
    num_tasks = run.config.evaluate.validation_tasks
    return named("validation", evaluate_split(run, "validation", num_tasks=num_tasks))


def _progress(run: Run) -> Progress[Any]:
    total = run.config.iterations
    return Progress(total=total, initial=run.step, unit="step", hidden=not run.ranks.is_first)


def _postfix(metrics: dict[str, float], costs: dict[str, float]) -> dict[str, str]:
    shown = {"loss": f"{metrics['train/query_loss']:.3f}"}
    if "train/accuracy(%)" in metrics:
        shown["accuracy"] = f"{metrics['train/accuracy(%)']:.1f}%"
    return {**shown, "peak": f"{costs['memory/peak(MiB)']:.0f}MiB"}


def _due(run: Run, every: int) -> bool:
    return run.step % every == 0 or run.step == run.config.iterations


def _phase(tracker: mg.MemoryTracker | None, name: str) -> AbstractContextManager[Any]:
    return nullcontext() if tracker is None else tracker.phase(name)
